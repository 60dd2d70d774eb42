"""What the memory-bound ops promise beyond the conformance tests: hard rows, kept rows, shared groups, clear errors."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness import make, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig
from liger_hw.kernels.attention import multi_token_attention
from liger_hw.kernels.norms import group_norm
from liger_hw.kernels.rows.blocks import blocks_key, row_blocks

COLUMN_TILES = LaunchConfig({"BLOCK_SIZE": 16, "ROWS": 2}, 1)


def _hard_rows(device: str) -> torch.Tensor:
    """Rows: plain, with a NaN, with +inf, only -inf, -inf in front, one huge value."""
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(device)
    x[1, 3], x[2, 4], x[3], x[4, :20], x[5, 7] = float("nan"), float("inf"), -float("inf"), -float("inf"), 1e30
    return x


@pytest.mark.parametrize("tiles", [False, True], ids=["whole rows", "column tiles"])
@pytest.mark.lanes("cpu", "interpret", "gpu")
def test_sparsemax_of_hard_rows(lane, tiles):
    """A row that holds a NaN or +inf, or nothing but -inf, is NaN and no other row is."""
    op, x = registry.get_op("sparsemax"), _hard_rows(lane.device)
    with registry.override("sparsemax.fwd", COLUMN_TILES) if tiles else contextlib.nullcontext():
        y = op.function(x)
    assert y.isnan().all(-1).tolist() == [False, True, True, True, False, False] and y.isnan().sum() == 3 * 50
    torch.testing.assert_close(y[[0, 4, 5]].sum(-1), torch.ones(3, device=x.device))
    assert y[4, :20].eq(0).all() and y[5, 7] == 1


@pytest.mark.daily("interpret", tiles="False")
@pytest.mark.parametrize("tiles", [False, True], ids=["whole rows", "column tiles"])
@pytest.mark.lanes("interpret", "gpu")
def test_sparsemax_of_ties(lane, tiles, generator):
    """What equals the threshold is outside the support, whose gradients are a mean: a division that is off by an ulp
    would take it in. In bf16 one row in 24 of 1024 columns has such a value."""
    op = registry.get_op("sparsemax")
    rows = 100 if lane.name == "interpret" else 4000
    x = torch.randn(rows, 1024, generator=generator).to(lane.device, torch.bfloat16)
    if lane.name == "interpret":  # which takes no bf16: its values in fp32
        x = x.float()
    exact = op.reference(x.double())
    x_above = x.double() - x.double().amax(-1, keepdim=True)
    threshold = (torch.where(exact > 0, x_above, 0).sum(-1, keepdim=True) - 1) / (exact > 0).sum(-1, keepdim=True)
    assert (x_above == threshold).any()
    config = LaunchConfig({"BLOCK_SIZE": 256 if tiles else 1024, "ROWS": 2}, 4)
    with registry.override("sparsemax.fwd", config):
        y = op.function(x)
    assert torch.equal(y > 0, exact > 0)


@pytest.mark.parametrize("tiles", [False, True], ids=["whole rows", "column tiles"])
@pytest.mark.lanes("interpret", "gpu")
def test_softmax_of_hard_rows(lane, tiles):
    """The largest and the smallest finite numbers too: a row masked with them is no row of NaN."""
    op, x = registry.get_op("softmax"), _hard_rows(lane.device)
    most = torch.finfo(x.dtype).max
    x = torch.cat((x, torch.full_like(x[:3], -most)))
    x[7, 20:30], x[8, :40] = most, x[0, :40]
    config = COLUMN_TILES if tiles else LaunchConfig({"BLOCK_SIZE": 64, "ROWS": 2}, 1)
    with registry.override("softmax.fwd", config):
        torch.testing.assert_close(op.function(x), torch.softmax(x, -1), equal_nan=True)


@pytest.mark.lanes("gpu")
def test_softmax_of_hard_rows_kept_narrow(lane):
    """As above in bf16, at a width where the row stays in it; the interpreter multiplies bf16 as integers."""
    most = torch.finfo(torch.bfloat16).max
    x = torch.randn(6, 20011, device=lane.device).to(torch.bfloat16)
    x[0] *= 2.0**30
    x[1], x[1, 7] = -most, 1.5
    x[2], x[3, 5], x[4, 0], x[5] = most, most, float("nan"), -float("inf")
    with registry.override("softmax.fwd", LaunchConfig({"BLOCK_SIZE": 32768, "ROWS": 1}, 32)):
        y = registry.get_op("softmax").function(x)
    exact = torch.softmax(x.double(), -1)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dim", [2, -3, 1.0])
@pytest.mark.cpu
def test_sparsemax_refuses_what_is_no_dimension(dim):
    with pytest.raises(ValueError, match=f"dim must be a dimension of the 2-D input, got {dim}"):
        registry.get_op("sparsemax").function(torch.zeros(3, 4), dim)


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "layer_norm", "softmax"])
@pytest.mark.lanes("interpret", "gpu")
def test_rows_kept_in_their_own_dtype(lane, name, seed):
    """Half-precision rows of more than 16384 columns stay narrow across the sums."""
    sizes = (3, 20011)
    with registry.override(f"{name}.fwd", LaunchConfig({"BLOCK_SIZE": 32768, "ROWS": 1}, 16)):
        op = registry.get_op(name)
        verify(op, make(op, sizes, torch.float16, lane.device, seed), seed)


@pytest.mark.parametrize("channels, block", [(1, 16), (2, 64), (4, 8)])
@pytest.mark.lanes("interpret", "gpu")
def test_groups_shared_by_programs(lane, channels, block, seed, monkeypatch):
    """Several programs a group, parts of a channel or several channels each, with values far from zero."""
    op = registry.get_op("group_norm")
    config = LaunchConfig({"BLOCK_SIZE": block, "CHANNELS": channels}, 1, 2, 12)
    for tunable in op.tunables[:2]:
        monkeypatch.setattr(tunable, "heuristic", lambda target, key: config)
    registry.invalidate()
    sample = make(op, (1, 2, 100, 6), torch.float32, lane.device, seed)
    with torch.no_grad():
        sample.args[0].add_(300.0)
    verify(op, sample, seed)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(2, 9, 8), (1, 21, 24)], ids=str)
@pytest.mark.lanes("interpret", "gpu")
def test_attention_convolved_channels_last(lane, sizes, bias, seed, monkeypatch):
    """Between softmax and convolution: what goes in and comes out is contiguous either way, and P is where it can
    be."""
    op = registry.get_op("multi_token_attention")
    monkeypatch.setattr(registry.backend_of(torch.device(lane.device)), "convolves_channels_last", True)
    with contextlib.ExitStack() as stack:
        for variant in ("fwd", "bwd", "fill"):
            config = LaunchConfig({"BLOCK_SIZE": 32, "CHANNELS": 16}, 1)
            stack.enter_context(registry.override(f"multi_token_attention.channels_{variant}", config))
        sample = make(op, sizes, torch.float16, lane.device, seed, {"bias": bias})
        verify(op, sample, seed)
        scores, weight, shift = (None if t is None else t.detach() for t in sample.args)
        how = [1, 1], [1, 1], [1, 1], 1, False
        y, p = multi_token_attention._fwd(scores, weight, shift, *how)
        assert y.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
        dx, dw, _ = multi_token_attention._bwd(y, p, weight, [True] * 3, *how)
        assert dx.is_contiguous() and dw.is_contiguous()


@pytest.mark.cpu
def test_a_channel_longer_than_32_bits_is_refused():
    x = torch.empty((1, 2, 2**31), device="meta")
    with pytest.raises(ValueError, match="liger_group_norm: a channel may have 2147418112 values"):
        group_norm._fwd(x, None, None, 1, 1e-6)


@pytest.mark.daily("interpret", n_cols="1025")
@pytest.mark.parametrize("n_cols", [1025, 1536])
@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "layer_norm", "dyt", "modulated_rms_norm"])
@pytest.mark.lanes("interpret", "gpu")
def test_rows_in_two_pieces(lane, name, n_cols, dtype, seed):
    """Second blocks with one column and with all, rows that begin anywhere, more row tiles than programs, gaps."""
    op = registry.get_op(name)
    sizes = (2, 14, n_cols) if name == "modulated_rms_norm" else (19, n_cols)
    for options in op.options:
        verify(op, make(op, sizes, dtype, lane.device, seed, options), seed)
    wide = torch.randn(5, n_cols + 3, generator=torch.Generator().manual_seed(seed)).to(lane.device, dtype)
    rows, args = wide[:, :n_cols], make(op, (1, 5, n_cols)[-len(sizes) :], dtype, lane.device, seed).args
    args = (rows, *(rows if torch.is_tensor(a) and a.shape == rows.shape else a for a in args[1:]))
    with torch.no_grad():
        apart = op.function(*args)
        dense = op.function(*(a.contiguous() if torch.is_tensor(a) else a for a in args))
    exact = {} if n_cols % 16 else {"rtol": 0, "atol": 0}  # dense rows that begin anywhere are summed in another order
    torch.testing.assert_close(apart, dense, **exact)


@pytest.mark.cpu
def test_pieces_of_a_row():
    """Two pieces where they are narrower than the next power of two, the second at least an eighth of the first; the
    key is that of the first piece with a last 1. That of a row in one piece that begins anywhere has a last 0."""
    tails = {2304: 256, 5120: 1024, 2049: 256, 3072: 1024, 6144: 2048, 12288: 4096, 1152: 128}
    for n_cols, tail in tails.items():
        first = 1 << n_cols.bit_length() - 1
        assert row_blocks(n_cols, first) == (True, tail) and row_blocks(n_cols, 2 * first) == (True, 0)
        assert blocks_key(8192, n_cols, 2) == (first, 13, 2, 1)
    for n_cols in (1, 3, 96, 768, 1000, 2048, 3073, 3584, 3840, 16384, 20000, 65536):
        begins_anywhere = (0,) if n_cols % 16 else ()
        assert blocks_key(8192, n_cols, 2) == registry.row_key(8192, n_cols, 2) + begins_anywhere
    assert row_blocks(5120, 2048) == (False, 0) and row_blocks(20000, 16384) == (False, 0)
