"""Embedding: rows that fill the batch, rows across many chunks, the padding row, indices outside the table."""

from __future__ import annotations

import pytest
import torch
from harness import verify

from liger_hw.kernels.embedding.embedding import LigerEmbedding, embedding_bwd, liger_embedding
from liger_hw.kernels.embedding.row_sums import MAX_UNSORTED_TOKENS
from liger_hw.kernels.embedding.stable_sort import CHUNK, SINGLE_CHUNK, sort_indices
from liger_hw.registry import Sample, get_op


def _weight(generator, lane, rows=7, cols=9):
    return torch.randn(rows, cols, generator=generator).to(lane.device).requires_grad_()


def test_one_index_without_a_dimension(lane, generator):
    weight = _weight(generator, lane)
    verify(get_op("embedding"), Sample(args=(weight, torch.tensor(3, device=lane.device))), 0)


def test_a_weight_without_rows_is_named(lane):
    weight = torch.zeros(0, 5, device=lane.device, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"liger_embedding: weight \(0, 5\) has no rows that indices \(3,\) could take"
    ):
        liger_embedding(weight, torch.zeros(3, dtype=torch.int64, device=lane.device))
    y = liger_embedding(weight, torch.zeros(0, dtype=torch.int64, device=lane.device))
    y.sum().backward()
    assert y.shape == (0, 5) and weight.grad.shape == (0, 5)


BATCHES = {
    "some rows twice, few tokens": [5, 1, 5, 0, 6, 1, 5],
    "a row between others, as many tokens as one launch takes": [4, 2] * (MAX_UNSORTED_TOKENS // 2),
    "one token more": [4, 2] * (MAX_UNSORTED_TOKENS // 2) + [0],
    "one row fills the batch": [3] * 150,
    "two rows meet at a chunk's end": [1] * 16 + [2] * 16 + [4] * 32,
    "a row over many chunks between single ones": [0, 1] + [2] * 70 + [3, 5],
    "nothing but the padding row": [6] * 40,
    "every row once, backwards": [6, 5, 4, 3, 2, 1, 0],
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", BATCHES)
def test_batches(lane, generator, seed, batch, dtype):
    indices = torch.tensor(BATCHES[batch], dtype=dtype, device=lane.device)
    verify(get_op("embedding"), Sample((_weight(generator, lane), indices, 6), {}, 1, indices.numel()), seed)


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 64, 65, 150])
def test_rows_that_no_token_names_are_zero(lane, generator, tokens):
    """Rows that no token names are zero, whatever was in memory, with and without a sort."""
    named = torch.tensor([0, 1, 64, 400, 401, 402, 767, 998, 999])
    indices = named[torch.randint(len(named), (tokens,), generator=generator)]
    weight, counts = _weight(generator, lane, rows=1000, cols=5), torch.bincount(indices, minlength=1000).float()
    out = liger_embedding(weight, indices.to(lane.device), 401)
    (found,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    counts[401] = 0
    assert torch.equal(found.cpu(), counts[:, None].expand(-1, 5))


def test_order_of_the_batch_does_not_matter_to_its_shape(lane, generator, seed):
    indices = torch.randint(7, (2, 3, 5), generator=generator).to(lane.device)
    verify(get_op("embedding"), Sample((_weight(generator, lane), indices.transpose(0, 2)), {}, 1, 30), seed)


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("times", [1, MAX_UNSORTED_TOKENS])
def test_outside_the_table(lane, generator, times):
    """Neither memory of others is read nor a gradient written: NaN, and zero."""
    weight = _weight(generator, lane)
    indices = torch.tensor([0, -1, 7, 3, 2**31 - 1, 2**32 + 2, -(2**32) + 2] * times, device=lane.device)
    out = liger_embedding(weight, indices)
    assert out.isnan().all(1).tolist() == [False, True, True, False, True, True, True] * times
    (found,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    assert found.sum(1).tolist() == [9 * times, 0, 0, 9 * times, 0, 0, 0]


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("times", [1, MAX_UNSORTED_TOKENS])
def test_indices_and_gradient_may_be_strided(lane, generator, times):
    weight = _weight(generator, lane)
    indices = torch.tensor([1, 5, 2, 5, 1, 5] * times, device=lane.device)[::2]
    out = liger_embedding(weight, indices)
    grad = torch.arange(1.0, 10.0).to(lane.device)[:, None].expand(9, len(indices)).t()
    (found,) = torch.autograd.grad(out, weight, grad)
    expected = torch.zeros(7, 9)
    expected[1], expected[2] = 2 * times * torch.arange(1.0, 10.0), times * torch.arange(1.0, 10.0)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.lanes("gpu")
@pytest.mark.parametrize("times", [1, MAX_UNSORTED_TOKENS])
def test_gradient_past_2_31_elements(lane, times):
    rows, cols = 2**21 + 5, 1024
    if torch.get_device_module(torch.device(lane.device).type).mem_get_info()[0] < 2**34:
        pytest.skip("needs 16 GiB of device memory")
    indices = torch.tensor([rows - 1, 5, rows - 1] * times, device=lane.device)
    found = embedding_bwd(torch.ones(len(indices), cols, dtype=torch.bfloat16, device=lane.device), indices, rows, -1)
    assert found.any(1).nonzero().flatten().tolist() == [5, rows - 1]
    assert (found[5] == times).all() and (found[-1] == 2 * times).all()


WORDS = 2**31 // CHUNK  # a table of two rows less than this has words that do not fit
SORTED = {  # rows of the table, indices
    "one": (19, [3]),
    "a chunk and one more": (CHUNK + 1, torch.arange(CHUNK + 1).flip(0).tolist()),
    "one row over three chunks": (19, [4] * (2 * CHUNK + 5)),
    "rows in every chunk, some outside the table": (19, [(i * i) % 23 - 2 for i in range(3 * CHUNK - 7)]),
    "the only chunk, full": (19, [i % 7 for i in range(SINGLE_CHUNK)]),
    "a larger table than of one chunk": (2**31 // SINGLE_CHUNK - 2, [9, 2**31 // SINGLE_CHUNK - 3] * (CHUNK - 9)),
    "full chunks": (19, [i % 7 for i in range(3 * CHUNK)]),
    "a table as large as words allow": (WORDS - 3, [WORDS, WORDS - 4, WORDS] * CHUNK),
    "a larger table": (WORDS - 2, [WORDS - 2, WORDS - 3, WORDS - 2] * CHUNK),
}


# Indices of 32 bits are loaded by the same kernel; test_batches takes both.
@pytest.mark.daily("interpret", dtype="int64", given=tuple(list(SORTED)[:5]))
@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("given", SORTED)
def test_sort_is_stable(lane, given, dtype):
    """The same as torch's, which does the sorting where there are no kernels and for more tokens than MAX_TOKENS."""
    rows, indices = SORTED[given]
    indices = torch.tensor(indices, dtype=dtype, device=lane.device)
    places, order = sort_indices(indices, rows)
    expected, at = sort_indices(indices.clamp(-1, rows), rows, plain=True)
    assert places.tolist() == expected.tolist() and order.tolist() == at.tolist()
    assert places.dtype == torch.int32 and order.dtype == torch.int64


@pytest.mark.cpu
def test_module_is_torchs(generator):
    ours, theirs = LigerEmbedding(7, 4, padding_idx=-1), torch.nn.Embedding(7, 4, padding_idx=-1)
    assert ours.padding_idx == theirs.padding_idx and not ours.weight[-1].any()
    theirs.load_state_dict(ours.state_dict())
    indices = torch.tensor([[0, 6], [2, 2]])
    grad = torch.randn(2, 2, 4, generator=generator)
    for module in (ours, theirs):
        module(indices).backward(grad)
    torch.testing.assert_close(ours(indices), theirs(indices))
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


@pytest.mark.cpu
def test_a_padding_row_outside_the_table_is_refused():
    for padding_idx in (7, "1"):
        with pytest.raises(ValueError, match="liger_embedding: padding_idx must lie in"):
            liger_embedding(torch.zeros(7, 4), torch.tensor([1]), padding_idx)
    with pytest.raises(ValueError, match="padding_idx"):
        LigerEmbedding(7, 4, padding_idx=7)
