"""Rotary position embedding, half-split as in Llama: the first and second half of the rotary width form the pairs.

    q'[:h] = q[:h] * cos[:h] - q[h:2h] * sin[:h]        h = rotary_dim // 2
    q'[h:2h] = q[h:2h] * cos[h:] + q[:h] * sin[h:]      dimensions from rotary_dim on pass through; k likewise

Shapes: q [B, n_q_heads, T, D], k [B, n_k_heads, T, D] (unsqueeze_dim=1), or both [B, T, heads, D] (unsqueeze_dim=2), of
any strides (read in place while the last dimension is contiguous). cos, sin [1 or B, T, width], or a table
[positions, width] of which token t takes row position_ids[b, t], or row t without position_ids. width is either
rotary_dim, as Hugging Face passes it (both halves are read, nothing is assumed about them), or rotary_dim // 2 when
rotary_dim is given: then both halves share it, which spares half the reading of cos and sin.
Dtypes: fp32, fp16 or bf16; cos and sin may differ from q and k. Arithmetic in fp32, rounded once to q's (k's) dtype.
Output: new tensors, dense, with heads and tokens in memory in the input's order, so that what follows sees the layout
it knows. Gradients of q and k get that order too, in whatever strides their own gradients arrive.
Saved for backward: cos and sin. They get no gradient. Backward is the transposed rotation.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ... import registry
from ...recompute.recipes import offer
from ...registry import LaunchConfig, Op, Sample, Target, Tunable, next_power_of_2
from ...runtime.dependent_launch import begin
from ...runtime.operator import (
    Function,
    check,
    check_flags,
    check_tensors,
    define,
    first_order,
    launch,
    remembered,
)
from .rope_kernels import _angles, _load, _offsets, _rope_kernel, _rotate, few_tokens, program_of, tiled

# -- reference -------------------------------------------------------------------------------------------------------


def rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    shared_halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification in plain torch; computes in fp32, or in fp64 when `q` is fp64."""
    cos, sin = _per_token(cos, sin, position_ids, q.shape[3 - unsqueeze_dim])
    width = cos.shape[-1] if rotary_dim is None else rotary_dim
    return _turned(q, cos, sin, width, unsqueeze_dim), _turned(k, cos, sin, width, unsqueeze_dim)


def _per_token(cos, sin, position_ids, seq_len):
    """cos and sin as [1 or B, T, width]: a table is indexed by position, anything else is already per token."""
    if cos.dim() == 3:
        return cos, sin
    if position_ids is None:
        return cos[None, :seq_len], sin[None, :seq_len]
    positions = position_ids if position_ids.dim() == 2 else position_ids[None]
    return cos[positions], sin[positions]


def _turned(x, cos, sin, rotary_dim, head_axis, backward=False):
    """x * cos + rotate_half(x) * sin over the first `rotary_dim` dimensions, or its transpose."""
    half = rotary_dim // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    if cos.shape[-1] == half:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    cos, sin = cos.to(wide).unsqueeze(head_axis), sin.to(wide).unsqueeze(head_axis)
    head = x[..., :rotary_dim].to(wide)
    if backward:
        by_sin = head * sin
        other = torch.cat((by_sin[..., half:], -by_sin[..., :half]), -1)
    else:
        other = torch.cat((-head[..., half:], head[..., :half]), -1) * sin
    return torch.cat(((head * cos + other).to(x.dtype), x[..., rotary_dim:]), -1)


# -- tunables --------------------------------------------------------------------------------------------------------

_DIMS = ("batch", "seq_len", "n_q_heads", "n_k_heads", "head_dim")


def _key(batch: int, seq_len: int, n_q_heads: int, n_k_heads: int, head_dim: int, itemsize: int) -> registry.Key:
    """Heads of q and k rounded up to powers of two, head width, log2 bucket of the tokens, bytes an element."""
    sizes = next_power_of_2(n_q_heads), next_power_of_2(n_k_heads), head_dim
    return *sizes, (batch * seq_len - 1).bit_length() if batch * seq_len > 1 else 0, itemsize


def _heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """One warp and 32 bytes of q a thread, of at least the heads that share one of k: few registers, many programs.

    Few tokens are 16 bytes a thread, in four warps or, of a handful, one. Tiles that the head width does not fill are of
    twice that: 96 wide 40 us by 32 bytes and 33 by 64, of 3 x 5000 x 16 + 4 heads. Where twice as many heads share one of k as
    a warp takes (8 of 128, of 2 bytes; with 16 it lost 4%), and more than two such groups are there (16 + 2 heads lost 0.5%),
    two groups in four warps: there and back of 4 x 4096 x 28 + 4 x 128 133.0 us for 133.9, of 2 x 4096 x 64 + 8 148.4 for 149.3.
    """
    q_heads, k_heads, head_dim, tokens_bucket, itemsize = key
    width = next_power_of_2(head_dim)
    elements = q_heads * width << tokens_bucket
    place = target.warp_size // itemsize  # elements of one byte a thread
    if elements <= 2048 * target.multiprocessors:
        warps = 4 if elements > 128 * target.multiprocessors else 1
        return LaunchConfig({"BLOCK_T": 1, "BLOCK_H": min(q_heads, max(1, warps * 16 * place // width))}, warps)
    wanted = (32 if width == head_dim else 64) * place
    together = min(q_heads // max(1, k_heads), max(1, 128 * place // width))
    per_thread = 64 // itemsize
    if itemsize == 2 and head_dim == 128 and wanted < together * width <= 2 * wanted and 2 * together < q_heads:
        wanted, together, per_thread = 2 * together * width, 2 * together, per_thread // 2
    block_h = min(q_heads, max(1, wanted // width, together))
    block_t = min(8, max(1, wanted // (block_h * width)))
    return LaunchConfig(
        {"BLOCK_T": block_t, "BLOCK_H": block_h}, target.warps(block_t * block_h * width, per_thread, 8)
    )


def _safe(target: Target, key: registry.Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_T": 1, "BLOCK_H": 1}, 1)


def _space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    heads, _, width, _, _ = key
    width = next_power_of_2(width)
    return [
        LaunchConfig({"BLOCK_T": block_t, "BLOCK_H": block_h}, warps, hint=hint)
        for block_t in (1, 2, 4, 8, 16)
        for block_h in (1, 2, 4, 8, 16, 32, 64, 128)
        for warps in (1, 2, 4, 8)
        for hint in ("none", "stream")
        if block_h <= heads and 8 <= block_t * block_h * width // (warps * target.warp_size) <= 128
    ]


def _valid(config: LaunchConfig, key: registry.Key) -> str | None:
    expected = {"BLOCK_T", "BLOCK_H"}
    return None if set(config.blocks) == expected else f"blocks must be {sorted(expected)}, got {dict(config.blocks)}"


def _tunable(variant: str) -> Tunable:
    return Tunable(
        "rope",
        variant,
        kernels=(_rope_kernel, program_of, begin, _angles, _rotate, _offsets, _load),
        key=_key,
        dims=_DIMS,
        heuristic=_heuristic,
        safe=_safe,
        space=_space,
        neutral=frozenset({"num_stages", "hint", "num_warps", "BLOCK_T", "BLOCK_H"}),
        valid=_valid,
        ahead=few_tokens,
    )


FWD = _tunable("fwd")
BWD = _tunable("bwd")

# -- launchers -------------------------------------------------------------------------------------------------------


def _dense_strides(shape: tuple[int, ...], head_axis: int, heads_inside: bool) -> tuple[int, ...]:
    """Strides of a dense tensor; in memory, heads lie inside tokens or tokens inside heads."""
    _, second, third, width = shape
    if heads_inside == (head_axis == 2):
        return second * third * width, third * width, width, 1
    return second * third * width, width, second * width, 1


def _dense(x: torch.Tensor, head_axis: int, heads_inside: bool) -> torch.Tensor:
    """An empty dense tensor like `x`, laid out as `_dense_strides` says."""
    strides = _dense_strides(x.shape, head_axis, heads_inside)
    if x.stride() == strides:
        return torch.empty_like(x)  # the cheapest call that makes one
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def _heads_inside(x: torch.Tensor, head_axis: int) -> bool:
    """Whether one token's heads lie closer in memory than one head's tokens."""
    strides = x.stride()
    return strides[head_axis] <= strides[3 - head_axis]


_CROSSED_HEADS = 16
"""`_geometry`'s for rope. cos and sin are 1 / heads of the bytes, and sequences side by side jump in memory: at 8 + 4
heads on an H200 51.7 us against 53.5, at 28 + 4 already 69.4 against 68.8, at 32 + 8 84.0 against 83.5."""


class _Geometry(NamedTuple):
    """What a launch is told that follows from shapes and strides alone."""

    tokens: int
    key: tuple[int, ...]  # of `_key`, less the bytes an element
    axes: tuple[int, int, int]  # in which a tensor's strides are handed over: see `_geometry`
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    q_strides: tuple[int, ...] | None  # of the outputs, where they are not the inputs'
    k_strides: tuple[int, ...] | None
    launches: dict  # (plan, shared, backward) -> (grid, flags, numbers) that the launch takes


@lru_cache(maxsize=1024)
def _geometry(
    q_shape, q_strides, k_shape, k_strides, cos_shape, cos_strides, rotary_dim, head_axis, inside, crossed_heads
) -> _Geometry:
    """Working this out takes longer than the rest of a launch, so it is kept.

    Where sequences share their angles, and a token has at most `crossed_heads` heads of q and k, batch and tokens
    change places: the kernels then meet one position of every sequence, then the next, and cos and sin of a position
    come from memory once. In the usual order they come for every sequence, since what lies between evicts them.
    """
    token_axis = 3 - head_axis
    n_heads = q_shape[head_axis] + (0 if k_shape is None else k_shape[head_axis])
    together = n_heads <= crossed_heads and q_shape[0] > 1 and (cos_shape[0] == 1 or cos_strides[0] == 0)
    axes = (token_axis, head_axis, 0) if together else (0, head_axis, token_axis)

    def three(strides):
        return tuple(strides[axis] for axis in axes)

    batch, seq_len, n_q_heads, head_dim = q_shape[0], q_shape[token_axis], q_shape[head_axis], q_shape[3]
    n_k_heads = 0 if k_shape is None else k_shape[head_axis]
    no_k = (0, 0, 0)
    dense_q = _dense_strides(q_shape, head_axis, inside[0])
    dense_k = None if k_shape is None else _dense_strides(k_shape, head_axis, inside[1])
    out_q, out_k = three(dense_q), no_k if k_shape is None else three(dense_k)
    angles = (cos_strides[1], 0) if together else (0 if cos_shape[0] == 1 else cos_strides[0], cos_strides[1])
    return _Geometry(
        batch * seq_len,
        _key(batch, seq_len, n_q_heads, n_k_heads, head_dim, 0)[:-1],
        axes,
        (*three(q_strides), *(no_k if k_shape is None else three(k_strides)), *out_q, *out_k, *angles),
        (batch * seq_len, batch if together else seq_len, n_q_heads, n_k_heads),
        (rotary_dim // 2, head_dim - rotary_dim)
        + (next_power_of_2(rotary_dim // 2), next_power_of_2(head_dim - rotary_dim)),
        None if dense_q == q_strides else dense_q,
        None if dense_k == k_strides else dense_k,
        {},
    )


def _readable(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """`x` and its strides; a contiguous copy where the elements of a row are not side by side."""
    strides = x.stride()
    if strides[-1] == 1:
        return x, strides
    x = x.contiguous()
    return x, x.stride()


def _rope(q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, shared, backward):
    q, q_strides = _readable(q)
    k_shape = k_strides = out_k = None
    if k is not None:
        k, k_strides = _readable(k)
        k_shape = k.shape
    cos_strides = cos.stride()
    if cos_strides[2] != 1 or cos_strides != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
        cos_strides = cos.stride()
    inside = q_inside, k_inside
    layouts = q.shape, q_strides, k_shape, k_strides, cos.shape, cos_strides
    geometry = _geometry(*layouts, rotary_dim, head_axis, inside, _CROSSED_HEADS)
    out_q = _empty(q, geometry.q_strides)
    if k is not None:
        out_k = _empty(k, geometry.k_strides)
    if geometry.tokens:
        plan = (BWD if backward else FWD).plan(q.device, (*geometry.key, q.itemsize))
        known = geometry.launches.get((plan, shared, backward))
        if known is None:
            known = geometry.launches[plan, shared, backward] = _numbers(geometry, plan, shared, backward)
        grid, flags, numbers = known
        launch(plan, _rope_kernel, grid, (q, k, cos, sin, out_q, out_k, *numbers), flags)
    return out_q, q.new_empty(0) if k is None else out_k


def _empty(x: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    return torch.empty_like(x) if strides is None else x.new_empty_strided(x.shape, strides)


def _numbers(geometry: _Geometry, plan: registry.Plan, shared: bool, backward: bool) -> tuple[tuple, tuple, tuple]:
    """Grid, flags and runtime numbers of a launch."""
    grid, tiles, sizes = tiled(geometry.sizes, plan, geometry.widths)
    return grid, (*geometry.widths, *tiles, shared, backward), (*geometry.strides, *sizes)


# -- the operator ----------------------------------------------------------------------------------------------------


def _rope_reference(q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, shared, backward):
    half = rotary_dim // 2
    if shared:
        cos, sin = cos[..., :half], sin[..., :half]
    out_q = _dense(q, head_axis, q_inside).copy_(_turned(q, cos, sin, rotary_dim, head_axis, backward))
    if k is None:
        return out_q, q.new_empty(0)
    return out_q, _dense(k, head_axis, k_inside).copy_(_turned(k, cos, sin, rotary_dim, head_axis, backward))


def _rope_fake(q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, shared, backward):
    return _dense(q, head_axis, q_inside), q.new_empty(0) if k is None else _dense(k, head_axis, k_inside)


rope = define(
    "rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, int rotary_dim, int head_axis, bool q_inside, bool k_inside,"
    " bool shared, bool backward) -> (Tensor, Tensor)",
    launcher=_rope,
    reference=_rope_reference,
    fake=_rope_fake,
)


class LigerRopeFunction(Function):
    """Autograd for rope: saves cos and sin."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False):
        cos, sin = _per_token(cos, sin, position_ids, q.shape[3 - unsqueeze_dim])
        width = cos.shape[-1]
        rotary_dim = width if rotary_dim is None else rotary_dim
        layout = rotary_dim, unsqueeze_dim, _heads_inside(q, unsqueeze_dim), _heads_inside(k, unsqueeze_dim)
        shared = shared_halves or width < rotary_dim
        ctx.layout, ctx.shared = layout, shared
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)  # an unused q or k costs no tensor of zeros
        turned = rope(q, k, cos, sin, *layout, shared, False)
        for i, x in enumerate((q, k)):  # after a QK norm, whose output is had again as well
            args = (x, None, cos, sin, *layout[:2], layout[2 + i], layout[2 + i], shared, False)
            offer(ctx, turned[i], rope, args, 0, unsaved=x, number=i)
        return turned

    @staticmethod
    @first_order
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        rotary_dim, head_axis, q_inside, k_inside = ctx.layout
        if dq is None or dk is None:
            alone, inside = (dk, k_inside) if dq is None else (dq, q_inside)
            if alone is not None:
                alone = rope(alone, None, cos, sin, rotary_dim, head_axis, inside, inside, ctx.shared, True)[0]
            dq, dk = (None, alone) if dq is None else (alone, None)
        else:
            dq, dk = rope(dq, dk, cos, sin, *ctx.layout, ctx.shared, True)
        return dq, dk, None, None, None, None, None, None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    shared_halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by their tokens' angles: q * cos + rotate_half(q) * sin, as `apply_rotary_pos_emb` of Llama.

    q: [B, n_q_heads, T, D], k: [B, n_k_heads, T, D]; with unsqueeze_dim=2 [B, T, heads, D]. fp32, fp16 or bf16.
    cos, sin: [1 or B, T, width], or a table [positions, width] indexed by position_ids ([T], [1, T] or [B, T]; without
    them token t takes row t). position_ids is ignored for the first form, which is per token already. No gradients.
    rotary_dim: how many of the D dimensions rotate (even, default: the width of cos); the others pass through. A width
    of rotary_dim // 2 is taken as shared by both halves.
    shared_halves: the caller knows that both halves of cos and of sin are equal, as in most models: only the first is
    read (5% less to read at 32 + 8 heads).
    Returns new tensors of q's and k's shapes and dtypes; see the top of this file for their layout.
    Raises `ValueError` for shapes, dtypes or devices that do not fit, and for cos or sin that require a gradient.
    """
    check_tensors("liger_rope", q=q, k=k, cos=cos, sin=sin)
    if reason := _misfit(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim):
        check(False, "liger_rope", reason)
    check_flags("liger_rope", shared_halves=shared_halves)
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, shared_halves)


def _misfit(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim) -> str:
    """What is wrong with the arguments and what was expected, or nothing."""
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        return "cos and sin get no gradient; pass cos.detach() and sin.detach()"
    if position_ids is not None and not isinstance(position_ids, torch.Tensor):
        return f"position_ids must be a tensor, got {type(position_ids).__name__}"
    positions = None if position_ids is None else (position_ids.dtype, position_ids.shape)
    told = q.shape, k.shape, cos.shape, sin.shape, positions, unsqueeze_dim, rotary_dim
    return _shapes_misfit(*told)


@remembered
def _shapes_misfit(q, k, cos, sin, positions, unsqueeze_dim, rotary_dim) -> str:
    """`_misfit` of shapes, and of the position_ids' (dtype, shape)."""
    if type(unsqueeze_dim) is not int or unsqueeze_dim not in (1, 2):
        return f"unsqueeze_dim must be 1 ([B, heads, T, D]) or 2 ([B, T, heads, D]), got {unsqueeze_dim!r}"
    token_axis = 3 - unsqueeze_dim
    if len(q) != 4 or len(k) != 4 or any(q[axis] != k[axis] for axis in (0, token_axis, 3)):
        return f"q and k must be 4-D and differ in heads only, got {tuple(q)} and {tuple(k)}"
    batch, seq_len, head_dim = q[0], q[token_axis], q[3]
    if not q[unsqueeze_dim] or not k[unsqueeze_dim]:
        return f"q and k need at least one head, got {tuple(q)} and {tuple(k)}"
    if cos != sin or len(cos) not in (2, 3):
        have = f"{tuple(cos)} and {tuple(sin)}"
        return f"cos and sin must both be [1 or B, T, width] or a table [positions, width], got {have}"
    width = cos[-1]
    rotary = width if rotary_dim is None else rotary_dim
    if not isinstance(rotary, (int, torch.SymInt)) or rotary < 2 or rotary % 2 or rotary > head_dim:
        return f"the rotary width (rotary_dim) must be even and at most the head width {head_dim}, got {rotary!r}"
    if width not in (rotary, rotary // 2):
        return f"cos and sin must be {rotary} (or {rotary // 2}) wide to rotate {rotary} dimensions, got {width}"
    if len(cos) == 3:
        if cos[0] not in (1, batch) or cos[1] != seq_len:
            return f"cos and sin must be [1 or {batch}, {seq_len}, {width}] to match q, got {tuple(cos)}"
    elif positions is None:
        if cos[0] < seq_len:
            return f"{seq_len} tokens need a table of as many positions (or position_ids), got {cos[0]}"
    elif positions[0].is_floating_point or positions[1] not in ((seq_len,), (1, seq_len), (batch, seq_len)):
        have = f"{positions[0]} of shape {tuple(positions[1])}"
        return f"position_ids must be integers of shape [{seq_len}] or [1 or {batch}, {seq_len}], got {have}"
    return ""


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "mistral_7b": (4, 4096, 32, 8, 128),
    "llama3_8b": (2, 8192, 32, 8, 128),
    "llama3_2_1b": (4, 4096, 32, 8, 64),
    "llama2_7b": (4, 4096, 32, 32, 128),
    "qwen2_7b": (4, 4096, 28, 4, 128),
    "gemma2_2b": (4, 4096, 8, 4, 256),
    "phi3_mini": (4, 4096, 32, 32, 96),
}
"""Sizes (batch, seq_len, n_q_heads, n_k_heads, head_dim) of real models; told of equal halves, as patched models do."""


def _sample(
    sizes, dtype, device, generator, *, unsqueeze_dim=1, transposed=True, partial=False, table=False, shared=True
):
    """transposed: q and k are views of the other layout, as Hugging Face passes them; partial: half the width rotates;
    table: cos and sin are half-width tables indexed by random positions."""
    batch, seq_len, n_q_heads, n_k_heads, head_dim = sizes

    def states(heads):
        middle = (seq_len, heads) if transposed == (unsqueeze_dim == 1) else (heads, seq_len)
        x = torch.randn(batch, *middle, head_dim, generator=generator, dtype=torch.float32, device=device).to(dtype)
        return (x.transpose(1, 2) if transposed else x).requires_grad_()

    rotary_dim = max(2, (head_dim // 2 if partial else head_dim) // 2 * 2)
    frequency = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim)
    rows = 2 * seq_len if table else seq_len
    angles = torch.arange(rows, device=device, dtype=torch.float32)[:, None] * frequency
    kwargs = {"unsqueeze_dim": unsqueeze_dim, "shared_halves": shared and not table}
    if table:
        kwargs |= {"rotary_dim": rotary_dim}
        kwargs |= {"position_ids": torch.randint(rows, (batch, seq_len), generator=generator, device=device)}
    else:
        angles = torch.cat((angles, angles), -1)[None]
    return Sample(
        args=(states(n_q_heads), states(n_k_heads), angles.cos().to(dtype), angles.sin().to(dtype)),
        kwargs=kwargs,
        reduction=2,
        grad_reduction=2,
        moved=4 * batch * seq_len * (n_q_heads + n_k_heads) * head_dim * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="rope",
        function=liger_rope,
        reference=rope_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"unsqueeze_dim": 2, "transposed": False},
            {"transposed": False},
            {"partial": True},
            {"table": True},
            {"shared": False},
        ),
    )
)
