"""int8 times packed 2-bit weights: the packing, and exact products at odd sizes."""

from __future__ import annotations

import pytest
import torch

from liger_hw.kernels.heads.mm_int8int2 import _EXACT_SUM_LENGTH, matmul, pack_weights, unpack_weights


@pytest.mark.cpu
def test_packing():
    """Rows p, P + p, 2P + p and 3P + p share byte p, low bits first; -1 is zero."""
    weights = torch.tensor([[1, 0, 1, 2, -1, 2, 0, 0]]).t()
    assert pack_weights(weights).flatten().tolist() == [0b01001010, 0b01111101]
    assert torch.equal(unpack_weights(pack_weights(weights)), weights.int())
    odd = torch.tensor([2, 0, 1, 1, 0, 2])
    assert unpack_weights(pack_weights(odd)).tolist() == [2, 0, 1, 1, 0, 2, -1, -1]


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("m, k, n", [(1, 4, 1), (17, 20, 9), (33, 128, 24), (3, 4 * _EXACT_SUM_LENGTH, 2), (0, 8, 3)])
def test_products(lane, generator, m, k, n):
    a = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
    weights = torch.randint(-1, 3, (k, n), generator=generator, dtype=torch.int8)
    found = matmul(a.to(lane.device), pack_weights(weights).to(lane.device))
    assert found.dtype is torch.int32
    assert torch.equal(found.cpu().long(), (a.double() @ weights.double()).long())


@pytest.mark.cpu
def test_what_does_not_fit_is_refused():
    a, b = torch.zeros(2, 8, dtype=torch.int8), torch.zeros(2, 3, dtype=torch.uint8)
    for args, words in [((a.int(), b), "int8"), ((a, b.int()), "uint8"), ((a[:, :4], b), "K=4")]:
        with pytest.raises(ValueError, match=f"matmul: .*{words}"):
            matmul(*args)
    with pytest.raises(ValueError, match="bits must be 2"):
        pack_weights(a, 4)
