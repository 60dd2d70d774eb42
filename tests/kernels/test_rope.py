"""Rope and vision_rope with all kinds of cos and sin: halves that differ or are shared, per batch, other dtypes."""

from __future__ import annotations

import pytest
import torch
from harness import verify

from liger_hw.backends import known_target
from liger_hw.registry import Sample, get_op


def _random(generator, lane, *shape, grad=False):
    t = torch.randn(shape, generator=generator).to(lane.device)
    return t.requires_grad_() if grad else t


def _verify(lane, generator, seed, cos, sin, batch=2, seq_len=5, width=8, **kwargs):
    q = _random(generator, lane, batch, 3, seq_len, width, grad=True)
    k = _random(generator, lane, batch, 1, seq_len, width, grad=True)
    verify(get_op("rope"), Sample((q, k, cos, sin), kwargs, 2, 2), seed)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rotary", [8, 6])
def test_halves_that_differ(lane, generator, seed, batch, rotary):
    """Forward and backward read all of cos and sin."""
    cos, sin = (_random(generator, lane, batch, 5, rotary) for _ in range(2))
    _verify(lane, generator, seed, cos, sin)


@pytest.mark.parametrize("batch", [1, 2])
def test_angles_of_half_the_width(lane, generator, seed, batch):
    """Both halves of a head share them; position_ids are not read."""
    cos, sin = (_random(generator, lane, batch, 5, 4) for _ in range(2))
    _verify(lane, generator, seed, cos, sin, position_ids=torch.arange(5), rotary_dim=8)


def test_shared_halves_are_not_read(lane, generator, seed):
    cos, sin = (_random(generator, lane, 1, 5, 4) for _ in range(2))
    whole = [torch.cat((t, torch.full_like(t, float("nan"))), -1) for t in (cos, sin)]
    _verify(lane, generator, seed, *whole, shared_halves=True)


def test_angles_of_another_dtype(lane, generator, seed):
    """fp16 states with fp32 cos and sin, which are not rounded."""
    cos, sin = (_random(generator, lane, 1, 5, 8) for _ in range(2))
    q = torch.randn(2, 3, 5, 8, generator=generator).to(lane.device, torch.float16).requires_grad_()
    k = torch.randn(2, 1, 5, 8, generator=generator).to(lane.device, torch.float16).requires_grad_()
    result = verify(get_op("rope"), Sample((q, k, cos, sin), {}, 2, 2), seed)
    assert [o.dtype for o in result.outputs] == [torch.float16, torch.float16]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (2, 3), (1, 5)])
@pytest.mark.parametrize("rotary", [12, 8, 10])
def test_vision_heads_of_a_width_that_is_no_power_of_two(lane, generator, seed, heads, rotary):
    """Flat tiles: halves that differ, part of the width, different numbers of heads, a tile's end inside a token."""
    cos, sin = (_random(generator, lane, 29, rotary) for _ in range(2))
    q, k = (_random(generator, lane, 29, n, 12, grad=True) for n in heads)
    verify(get_op("vision_rope"), Sample((q, k, cos, sin), {}, 2, 2), seed)


@pytest.mark.parametrize("heads, tile, warps", [((28, 4), 8, 1), ((32, 2), 16, 2), ((32, 8), 4, 1), ((32, 32), 4, 1)])
def test_heads_that_share_one_of_k_are_of_one_program(heads, tile, warps):
    tunable = get_op("rope").tunables[0]
    config = tunable.heuristic(known_target("h200"), tunable.key(4, 4096, *heads, 128, 2))
    assert (config.blocks, config.num_warps) == ({"BLOCK_T": 1, "BLOCK_H": tile}, warps)


@pytest.mark.parametrize("width, rotary", [(12, 12), (12, 10), (8, 8), (8, 6)])
def test_vision_halves_shared_are_not_read(lane, generator, seed, width, rotary):
    """In flat tiles and others."""
    cos, sin = (_random(generator, lane, 29, rotary // 2) for _ in range(2))
    cos, sin = (torch.cat((t, torch.full_like(t, float("nan"))), -1) for t in (cos, sin))
    q, k = (_random(generator, lane, 29, n, width, grad=True) for n in (4, 2))
    verify(get_op("vision_rope"), Sample((q, k, cos, sin), {"shared_halves": True}, 2, 2), seed)


def test_one_gradient_alone_through_a_flat_tile(lane, generator):
    """k's, a slice of a wider tensor that is read without a copy; q has no incoming gradient."""
    op = get_op("vision_rope")
    cos, sin = (_random(generator, lane, 5, 6) for _ in range(2))
    q, k = (_random(generator, lane, 5, 2, 6, grad=True) for _ in range(2))
    given = _random(generator, lane, 5, 4, 6)[:, 2:]
    found, wanted = (torch.autograd.grad(f(q, k, cos, sin)[1], k, given)[0] for f in (op.function, op.reference))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
