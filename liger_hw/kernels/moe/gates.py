"""The gate of fused_moe, which runs between its two matrix products, and the gate's backward.

    gate       adds the bias to the pre-activations z = (g, u) of a row, in place; a = act(g) * (u + up_offset)
    gate_bwd   dz from da, and the gradient of the row's routing weight, da . a

Arithmetic is fp32, rounded once. For rows without an expert only z is written, with zeros, because the operator returns
z, and the gradient of their routing weight, 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...registry import Key, LaunchConfig, Target, next_power_of_2, tile_space
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton
from ..pointwise.elementwise import activation
from .reference import Gate
from .routing import Routing, moe_tunable


@triton.jit
def _gated(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """(act(gate) * (up + UP_OFFSET), its derivatives by gate and by up) in fp32. The compiler drops unused results."""
    by_gate = tl.full(gate.shape, 1.0, tl.float32)
    by_up = by_gate
    if LIMIT > 0.0:
        by_gate = tl.where(gate > LIMIT, 0.0, 1.0)
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        if HAS_GATE:
            by_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, 1.0)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "relu":
        value = tl.where(gate <= 0.0, 0.0, gate)
        slope = tl.where(gate <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        value, slope = activation(gate, "relu_squared")
        slope = tl.where(gate <= 0.0, 0.0, slope)
    elif ALPHA == 1.0:
        value, slope = activation(gate, ACTIVATION)
    else:
        value, slope = activation(gate * ALPHA, ACTIVATION)
        value = value * (1.0 / ALPHA)
    if HAS_GATE:
        up = up + UP_OFFSET
        return value * up, slope * up * by_gate, value * by_up
    return value, slope * by_gate, by_up


@triton.jit
def _biased(Z_ptr, Bias_ptr, cols, mask):
    """Add the bias to a row's pre-activations at these columns, in place, and return them."""
    z = tl.load(Z_ptr + cols, mask=mask, other=0.0)
    if Bias_ptr is not None:
        z = (z.to(tl.float32) + tl.load(Bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)).to(z.dtype)
        tl.store(Z_ptr + cols, z, mask=mask)
    return z


@triton.jit
def _pre_activations(
    Z_ptr, Bias_ptr, start, inner, HAS_GATE: tl.constexpr, CONCATENATED: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """(g, u) of BLOCK_SIZE columns of a row, in fp32; without HAS_GATE both are g."""
    cols = start + tl.arange(0, BLOCK_SIZE)
    if HAS_GATE and not CONCATENATED:
        wide = 2 * start + tl.arange(0, 2 * BLOCK_SIZE)
        gate, up = tl.split(tl.reshape(_biased(Z_ptr, Bias_ptr, wide, wide < 2 * inner), [BLOCK_SIZE, 2]))
    else:
        gate = _biased(Z_ptr, Bias_ptr, cols, cols < inner)
        up = gate
        if HAS_GATE:
            up = _biased(Z_ptr, Bias_ptr, inner + cols, cols < inner)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _fused_moe_gate_kernel(
    Z_ptr,
    Bias_ptr,
    Weights_ptr,
    Index_ptr,
    Order_ptr,
    Act_ptr,
    n_experts,
    inner,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HAS_GATE: tl.constexpr,
    CONCATENATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Z[row] += Bias[expert], then Act[row] = the gate of Z[row].

    Weights_ptr: in backward the slots' weights, factors of Act; in forward None, and rows of Z without an expert become
    zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(Order_ptr + row)
    expert = tl.load(Index_ptr + slot).to(tl.int64)
    n_z = 2 * inner if HAS_GATE else inner
    Z_ptr += row * n_z
    start = tl.program_id(1) * BLOCK_SIZE
    if (expert < 0) | (expert >= n_experts):
        if Weights_ptr is None:
            cols = start + tl.arange(0, BLOCK_SIZE)
            if HAS_GATE:
                cols = 2 * start + tl.arange(0, 2 * BLOCK_SIZE)
            tl.store(Z_ptr + cols, tl.zeros(cols.shape, dtype=Z_ptr.dtype.element_ty), mask=cols < n_z)
        return
    if Bias_ptr is not None:
        Bias_ptr += expert * n_z
    gate, up = _pre_activations(Z_ptr, Bias_ptr, start, inner, HAS_GATE, CONCATENATED, BLOCK_SIZE)
    act, _, _ = _gated(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, HAS_GATE)
    if Weights_ptr is not None:
        act = act.to(Act_ptr.dtype.element_ty).to(tl.float32) * tl.load(Weights_ptr + slot).to(tl.float32)
    cols = start + tl.arange(0, BLOCK_SIZE)
    tl.store(Act_ptr + row * inner + cols, act.to(Act_ptr.dtype.element_ty), mask=cols < inner)


@triton.jit
def _fused_moe_gate_bwd_kernel(
    DA_ptr,
    Z_ptr,
    Weights_ptr,
    DOut_ptr,
    Bias_ptr,
    Index_ptr,
    Order_ptr,
    DZ_ptr,
    DWeights_ptr,
    DOut_row_stride,
    n_experts,
    inner,
    hidden,
    top_k,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HAS_GATE: tl.constexpr,
    CONCATENATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """DZ[row] from DA[row] and Z[row]; DWeights[slot] = DA[row] . Act[row] (+ DOut[token] . Bias[expert])."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(Order_ptr + row)
    expert = tl.load(Index_ptr + slot).to(tl.int64)
    if (expert < 0) | (expert >= n_experts):
        tl.store(DWeights_ptr + slot, 0.0)
        return
    n_z = 2 * inner if HAS_GATE else inner
    Z_ptr += row * n_z
    DZ_ptr += row * n_z
    DA_ptr += row * inner
    weight = tl.load(Weights_ptr + slot).to(tl.float32)
    dtype = DZ_ptr.dtype.element_ty
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, inner, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        da = tl.load(DA_ptr + cols, mask=cols < inner, other=0.0).to(tl.float32)
        gate, up = _pre_activations(Z_ptr, None, start, inner, HAS_GATE, CONCATENATED, BLOCK_SIZE)
        act, by_gate, by_up = _gated(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, HAS_GATE)
        total += da * act.to(dtype).to(tl.float32)
        da = da * weight
        dgate = (da * by_gate).to(dtype)
        if HAS_GATE and not CONCATENATED:
            wide = 2 * start + tl.arange(0, 2 * BLOCK_SIZE)
            dz = tl.reshape(tl.join(dgate, (da * by_up).to(dtype)), [2 * BLOCK_SIZE])
            tl.store(DZ_ptr + wide, dz, mask=wide < n_z)
        else:
            tl.store(DZ_ptr + cols, dgate, mask=cols < inner)
            if HAS_GATE:
                tl.store(DZ_ptr + inner + cols, (da * by_up).to(dtype), mask=cols < inner)
    if Bias_ptr is not None:
        DOut_ptr += (slot // top_k).to(tl.int64) * DOut_row_stride
        Bias_ptr += expert * hidden
        for start in range(0, hidden, BLOCK_SIZE):
            cols = start + tl.arange(0, BLOCK_SIZE)
            dout = tl.load(DOut_ptr + cols, mask=cols < hidden, other=0.0).to(tl.float32)
            total += dout * tl.load(Bias_ptr + cols, mask=cols < hidden, other=0.0).to(tl.float32)
    tl.store(DWeights_ptr + slot, tl.sum(total, axis=0).to(DWeights_ptr.dtype.element_ty))


def _key(n_tokens: int, hidden: int, inner: int, n_experts: int, top_k: int, itemsize: int) -> Key:
    return next_power_of_2(inner), (max(1, n_tokens * top_k) - 1).bit_length(), itemsize


def _heuristic(target: Target, key: Key) -> LaunchConfig:
    """16 bytes a thread, at most 1024 columns."""
    block = max(16, min(key[0], 1024))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 16 // key[2], 8))


def _gate_heuristic(target: Target, key: Key) -> LaunchConfig:
    """`_heuristic`, but 32 bytes a thread above 512 columns: this kernel reads each column once."""
    config = _heuristic(target, key)
    block = config.blocks["BLOCK_SIZE"]
    return config if block <= 512 else replace(config, num_warps=target.warps(block, 32 // key[2], 8))


def _space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = [{"BLOCK_SIZE": block} for block in sorted({max(16, min(key[0], n)) for n in (256, 512, 1024, 2048)})]
    return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 16))


_NEUTRAL = "num_stages", "BLOCK_SIZE", "num_warps"
GATE = moe_tunable("gate", _fused_moe_gate_kernel, _key, _gate_heuristic, _space, *_NEUTRAL)
GATE_BWD = moe_tunable("gate_bwd", _fused_moe_gate_bwd_kernel, _key, _heuristic, _space, "num_stages")
TUNABLES = (GATE, GATE_BWD)


def gated(z, bias, weights, top_k_index, gate: Gate, routes: Routing, n_experts: int) -> torch.Tensor:
    """[T * K, inner]: the gate of z [T * K, 2 inner], after the bias [E, 2 inner] is added to z in place.

    weights: in backward [T, K], factors of the result; in forward None, and rows of z without an expert become zeros
    """
    (n_rows, n_z), (n_tokens, top_k) = z.shape, top_k_index.shape
    inner = n_z // 2 if gate.has_gate else n_z
    act = torch.empty((n_rows, inner), dtype=z.dtype, device=z.device)
    plan = GATE.plan(z.device, _key(n_tokens, 0, inner, 0, top_k, z.itemsize))
    grid = n_rows, cdiv(inner, plan.config.blocks["BLOCK_SIZE"])
    args = (z, bias, weights, top_k_index, routes.order, act, n_experts, inner)
    launch(plan, _fused_moe_gate_kernel, grid, args, tuple(gate))
    return act


def gated_bwd(
    da, z, weights, dout, down_bias, top_k_index, gate: Gate, routes: Routing, n_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dz, gradient of weights [T, K]) from da [T * K, inner]; dout [T, H] is only read for down_bias [E, H]."""
    (n_tokens, top_k), inner = weights.shape, da.shape[1]
    dz, dweights = torch.empty_like(z), torch.empty_like(weights)
    plan = GATE_BWD.plan(z.device, _key(n_tokens, 0, inner, 0, top_k, z.itemsize))
    args = (da, z, weights, dout, down_bias, top_k_index, routes.order, dz, dweights, dout.stride(0), n_experts)
    launch(plan, _fused_moe_gate_bwd_kernel, (z.shape[0],), (*args, inner, dout.shape[1], top_k), tuple(gate))
    return dz, dweights
