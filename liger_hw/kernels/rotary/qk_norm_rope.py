"""QK normalisation and rotary embedding in one pass: y = rope(rms_norm(x)) for each head of q and k.

    h = x / sqrt(mean(x^2) + eps) * (offset + w)        over the D dimensions of a head; w is q_weight or k_weight
    y[:r/2] = h[:r/2] * cos[:r/2] - h[r/2:r] * sin[:r/2]        r = rotary_dim
    y[r/2:r] = h[r/2:r] * cos[r/2:] + h[:r/2] * sin[r/2:]       dimensions from r on are normalised only

Arithmetic is fp32, rounded once; with casting_mode llama (Qwen3, OLMo) the normalised x is also rounded to x's dtype
before the weight. Hugging Face models round more often: after the norm and within rope. Layouts and output: see
rotary.py. Saved for backward: the inputs. Backward, with g the gradient rotated back, m = g * (offset + w), rms =
sqrt(mean(x^2) + eps) and n = x / rms:  dx = (m - n * mean(m * n)) / rms,  dw = sum over tokens and heads of g * n

Source: Henry et al., "Query-Key Normalization for Transformers", https://arxiv.org/abs/2010.04245; Su et al.,
"RoFormer", https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ... import registry
from ...registry import LaunchConfig, Plan, Sample, Target, Tunable, next_power_of_2, normal, tile_space
from ...runtime.operator import OperatorFunction, cdiv, check, check_floats, define, dense, launch, no_weight
from ...runtime.sharding import RotaryRule
from ..norms.rms_norm import CASTING_MODES, casting_code
from ..rows.reduce import column_sum, column_sum_tunable
from ..rows.tuning import persistent_misfit
from . import rope, rotary
from .qk_norm_rope_kernels import BackwardStrides, ForwardStrides, _qk_norm_rope_bwd_kernel, _qk_norm_rope_fwd_kernel
from .rope import check_rope, rope_angles

MODES = {name: CASTING_MODES[name] for name in ("llama", "gemma")}


def qk_norm_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    shared_halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    rotary_dim, angles = rope_angles(cos, rotary_dim, shared_halves)
    options = cos, sin, eps, offset, MODES[casting_mode], rotary_dim, unsqueeze_dim, angles
    return _normed_and_rotated(q, q_weight, *options), _normed_and_rotated(k, k_weight, *options)


def _normed_and_rotated(x, w, cos, sin, eps, offset, casting, rotary_dim, head_axis, angles):
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if casting == MODES["llama"]:
        h = h.to(x.dtype).to(wide)
    h = h * (w.to(wide) + offset)
    return rotary.rotated(h, cos, sin, rotary_dim, head_axis, rotary.Form(angles=angles)).to(x.dtype)


# -- tunables --------------------------------------------------------------------------------------------------------


def _tokens(target: Target, key: registry.Key) -> int:
    """The tokens of half a head that a warp reads in 16-byte loads: threads then have equal columns of all heads."""
    _, _, width, tokens_bucket, itemsize = key
    threads = max(1, next_power_of_2(width) // 2 * itemsize // 16)  # of one token
    return max(1, min(target.warp_size // threads, 1 << tokens_bucket))


def _fwd_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """One warp a program, which takes 4 heads, one after another, if there are many tokens."""
    heads = 4 if 1 << key[3] >= target.multiprocessors else 1
    return LaunchConfig({"BLOCK_T": _tokens(target, key), "BLOCK_H": 1, "HEADS": min(heads, key[0])}, 1)


def _bwd_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """One warp a program, one head at a time, with the loads of the next two in flight."""
    return LaunchConfig({"BLOCK_T": _tokens(target, key), "BLOCK_H": 1}, 1, 3, 8)


def _tiles(key: registry.Key) -> list[dict[str, int]]:
    blocks = (1, 2, 4, 8, 16, 32)
    return [{"BLOCK_T": block_t, "BLOCK_H": block_h} for block_t in blocks for block_h in blocks if block_h <= key[0]]


def _fwd_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    hints = ("none", "stream")
    return [
        replace(config, blocks={**config.blocks, "HEADS": steps * config.blocks["BLOCK_H"]})
        for config in tile_space(target, _tiles(key), (1, 2, 4, 8), per_thread=(16, 64), hints=hints, width=key[2])
        for steps in (1, 2, 4, 8, 16)
        if steps * config.blocks["BLOCK_H"] <= key[0]
    ]


def _bwd_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    options = {"per_thread": (16, 64), "hints": ("none", "stream"), "width": key[2], "staged_bytes": 2 * key[4]}
    return [
        config
        for stages, ctas in (((1,), (3, 5, 10, 20)), ((2, 3), (2, 4, 8)))
        for config in tile_space(target, _tiles(key), (1, 2, 4, 8), stages=stages, ctas=ctas, **options)
    ]


FWD = Tunable(
    "qk_norm_rope",
    "fwd",
    kernels=(_qk_norm_rope_fwd_kernel,),
    key=rotary.rotary_key,
    dims=rotary.DIMS,
    heuristic=_fwd_heuristic,
    safe=lambda target, key: LaunchConfig({"BLOCK_T": 1, "BLOCK_H": 1, "HEADS": 1}, 1),
    space=_fwd_space,
    valid=lambda config, key: f"ctas_per_mp must be 0, got {config.ctas_per_mp}" if config.ctas_per_mp else None,
)
BWD = Tunable(
    "qk_norm_rope",
    "bwd",
    kernels=(_qk_norm_rope_bwd_kernel,),
    key=rotary.rotary_key,
    dims=rotary.DIMS,
    heuristic=_bwd_heuristic,
    safe=lambda target, key: LaunchConfig({"BLOCK_T": 1, "BLOCK_H": 1}, 1, 1, 1),
    space=_bwd_space,
    valid=persistent_misfit,
)
DW = column_sum_tunable("qk_norm_rope", rotary.DIMS, lambda *sizes: 2 * sizes[-1])

# -- launchers -------------------------------------------------------------------------------------------------------


def _grid(tunable, q, k, cos, rotary_dim, head_axis, *inside) -> tuple[Plan, rotary.Geometry, int, int]:
    """(plan, geometry, programs for q, programs for k) of a launch."""
    any_heads = 1 << 30  # programs have few heads, so that cos and sin are a large part of their loads
    geometry = rotary.geometry_of(q, k, cos, rotary_dim, head_axis, inside, by_position=any_heads)
    plan = tunable.plan(q.device, geometry.key)
    blocks = plan.config.blocks
    heads = blocks.get("HEADS", blocks["BLOCK_H"])
    token_tiles = cdiv(geometry.tokens, blocks["BLOCK_T"])
    q_programs, k_programs = (token_tiles * cdiv(n_heads, heads) for n_heads in geometry.n_heads)
    if 0 < plan.programs < q_programs + k_programs:
        q_programs = max(1, min(plan.programs - 1, plan.programs * q_programs // (q_programs + k_programs)))
        k_programs = max(1, plan.programs - q_programs)
    return plan, geometry, q_programs, k_programs


def _fwd(q, k, wq, wk, cos, sin, eps, offset, casting, rotary_dim, head_axis, q_inside, k_inside, angles):
    q, k, wq, wk = rotary.unit_stride(q), rotary.unit_stride(k), dense(wq), dense(wk)
    cos, sin = rotary.unit_stride_angles(cos, sin, angles)
    out_q, out_k = rotary.dense_like(q, head_axis, q_inside), rotary.dense_like(k, head_axis, k_inside)
    if q.numel():
        plan, geometry, q_programs, k_programs = _grid(FWD, q, k, cos, rotary_dim, head_axis, q_inside, k_inside)
        strides = geometry.strides
        kernel_strides = ForwardStrides(strides[:2], strides[2:], geometry.angles)
        args = (q, k, wq, wk, cos, sin, out_q, out_k, kernel_strides)
        args += (geometry.tokens, geometry.seq_len, geometry.n_heads, q_programs, eps, offset)
        flags = rotary.with_alignment(geometry.head, *strides, geometry.angles), angles, casting
        launch(plan, _qk_norm_rope_fwd_kernel, (q_programs + k_programs,), args, flags)
    return out_q, out_k


def _bwd(
    dq, dk, q, k, wq, wk, cos, sin, eps, offset, casting, rotary_dim, head_axis, q_inside, k_inside, angles, needs_dw
):
    dq, dk, q, k, wq, wk = *map(rotary.unit_stride, (dq, dk, q, k)), dense(wq), dense(wk)
    cos, sin = rotary.unit_stride_angles(cos, sin, angles)
    out_q, out_k = rotary.dense_like(q, head_axis, q_inside), rotary.dense_like(k, head_axis, k_inside)
    width = 2 * q.shape[3]
    if not q.numel():
        return out_q, out_k, wq.new_zeros(width) if needs_dw else no_weight(wq)
    plan, geometry, q_programs, k_programs = _grid(BWD, q, k, cos, rotary_dim, head_axis, q_inside, k_inside)
    strides = geometry.strides
    dy_strides = tuple([rotary.Strides(*[t.stride(axis) for axis in geometry.axes]) for t in (dq, dk)])
    kernel_strides = BackwardStrides(dy_strides, strides[:2], strides[2:], geometry.angles)
    partial = q.new_empty((max(q_programs, k_programs), width), dtype=torch.float32) if needs_dw else None
    args = (dq, dk, q, k, wq, wk, cos, sin, out_q, out_k, partial, kernel_strides)
    args += (geometry.tokens, geometry.seq_len, geometry.n_heads, q_programs, eps, offset)
    flags = rotary.with_alignment(geometry.head, *dy_strides, *strides, geometry.angles), angles, casting
    launch(plan, _qk_norm_rope_bwd_kernel, (q_programs + k_programs,), args, flags)
    return out_q, out_k, column_sum(DW, partial, wq.dtype) if needs_dw else no_weight(wq)


def _fwd_reference(q, k, wq, wk, cos, sin, eps, offset, casting, rotary_dim, head_axis, q_inside, k_inside, angles):
    options = cos, sin, eps, offset, casting, rotary_dim, head_axis, angles
    y_q, y_k = _normed_and_rotated(q, wq, *options), _normed_and_rotated(k, wk, *options)
    return rotary.dense_like(q, head_axis, q_inside).copy_(y_q), rotary.dense_like(k, head_axis, k_inside).copy_(y_k)


def _fwd_fake(q, k, wq, wk, cos, sin, eps, offset, casting, rotary_dim, head_axis, q_inside, k_inside, angles):
    return rotary.dense_like(q, head_axis, q_inside), rotary.dense_like(k, head_axis, k_inside)


def _bwd_fake(
    dq, dk, q, k, wq, wk, cos, sin, eps, offset, casting, rotary_dim, head_axis, q_inside, k_inside, angles, needs_dw
):
    outputs = rotary.dense_like(q, head_axis, q_inside), rotary.dense_like(k, head_axis, k_inside)
    return *outputs, wq.new_empty(2 * q.shape[3]) if needs_dw else no_weight(wq)


_INPUTS = (
    "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps, float offset,"
    " int casting, int rotary_dim, int unsqueeze_dim, bool q_inside, bool k_inside, int angles"
)
_SHAPES = "T q, k [batch, ., ., width]; W q_weight, k_weight [width]; cos; sin"


def _misfit(q, k, wq, wk, cos, sin, eps, offset, casting, rotary_dim, head_axis, q_inside, k_inside, angles) -> str:
    return rotary.rotary_misfit(q, k, cos, sin, rotary_dim, head_axis, rotary.Form(angles=angles))


def _bwd_misfit(dq, dk, q, k, *others) -> str:
    for name, gradient, x in (("dout_q", dq, q), ("dout_k", dk, k)):
        if gradient.shape != x.shape:
            return f"{name} must have shape {tuple(x.shape)}, got {tuple(gradient.shape)}"
    return _misfit(q, k, *others[:-1])


class QKNormRopeFunction(OperatorFunction):
    sharding, is_cheap, params = RotaryRule(weights=("q_weight", "k_weight")), True, ("q_weight", "k_weight")
    fwd = define(
        f"qk_norm_rope_fwd({_INPUTS}) -> (Tensor out_q, Tensor out_k)",
        shapes=_SHAPES,
        misfit=_misfit,
        launcher=_fwd,
        reference=_fwd_reference,
        fake=_fwd_fake,
    )
    bwd = define(
        f"qk_norm_rope_bwd(Tensor dout_q, Tensor dout_k, {_INPUTS}, bool needs_params)"
        " -> (Tensor dq, Tensor dk, Tensor dq_weight_dk_weight)",
        shapes=f"{_SHAPES}; dout_q, dout_k [batch, ., ., width]",
        misfit=_bwd_misfit,
        launcher=_bwd,
        derivative_of=fwd,
        fake=_bwd_fake,
    )


def liger_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    shared_halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rope(rms_norm(q, q_weight)) and rope(rms_norm(k, k_weight)), as in every layer of Qwen3 and Gemma 3.

    q: [B, n_q_heads, T, D], k: [B, n_k_heads, T, D]; with unsqueeze_dim=2 [B, T, heads, D]; any strides. fp32, fp16 or
    bf16. q_weight, k_weight: [D], of one dtype. cos, sin, position_ids, rotary_dim, shared_halves: as for `liger_rope`.
    eps, offset, casting_mode (`llama` or `gemma`): as for `liger_rms_norm`. The norm is over all D dimensions.
    Returns new tensors of q's and k's shapes and dtypes, laid out as by `liger_rope`. Raises `ValueError` for shapes,
    dtypes, devices or a casting mode that do not fit, and for angles that require a gradient.
    """
    check_rope("liger_qk_norm_rope", q, k, cos, sin, unsqueeze_dim, rotary_dim, shared_halves=shared_halves)
    casting = casting_code("liger_qk_norm_rope", casting_mode, MODES)
    check_floats("liger_qk_norm_rope", eps=eps, offset=offset)
    rotary_dim, angles = rope_angles(cos, rotary_dim, shared_halves)
    inside = rotary.heads_inside(q, unsqueeze_dim), rotary.heads_inside(k, unsqueeze_dim)
    options = eps, offset, casting, rotary_dim, unsqueeze_dim, *inside, angles
    return QKNormRopeFunction.apply(q, k, q_weight, k_weight, cos, sin, *options)


class LigerQKNormRope(torch.nn.Module):
    """The q_norm and k_norm of an attention layer together with its rotary embedding.

    head_dim: width of a head; eps, offset, casting_mode, init_fn (`ones` or `zeros`): as for `LigerRMSNorm`.
    """

    def __init__(
        self, head_dim: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama", init_fn: str = "ones"
    ) -> None:
        super().__init__()
        check(init_fn in ("ones", "zeros"), "LigerQKNormRope", f"init_fn must be ones or zeros, got {init_fn!r}")
        casting_code("LigerQKNormRope", casting_mode, MODES)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.q_weight = torch.nn.Parameter(getattr(torch, init_fn)(head_dim))
        self.k_weight = torch.nn.Parameter(getattr(torch, init_fn)(head_dim))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k: [batch, heads, length, head_dim]; cos, sin: [batch or 1, length, rotary_dim]. Returns q, k rotated."""
        norm = (self.variance_epsilon, self.offset, self.casting_mode)
        return liger_qk_norm_rope(q, k, self.q_weight, self.k_weight, cos, sin, *norm, position_ids, unsqueeze_dim)

    def extra_repr(self) -> str:
        options = f"eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode}"
        return f"{self.q_weight.shape[0]}, {options}"


WORKLOADS = {"qwen3_8b": (4, 4096, 32, 8, 128), "gemma3_4b": (4, 4096, 8, 4, 256)}


def sample(sizes, dtype, device, generator, *, casting_mode="llama", offset=0.0, **options) -> Sample:
    """The sample of rope, with weights and options of the norm."""
    batch, seq_len, n_q_heads, n_k_heads, head_dim = sizes
    sample = rope.sample(sizes, dtype, device, generator, **options)
    drawn = normal(dtype, device, generator)
    weights = drawn(head_dim), drawn(head_dim)
    q, k, cos, sin = sample.args
    heads = batch * seq_len * (n_q_heads + n_k_heads)
    return Sample(
        args=(q, k, *weights, cos, sin, 1e-6, offset, casting_mode),
        kwargs=sample.kwargs,
        reduction=head_dim,
        grad_reduction=max(batch * seq_len * n_q_heads, head_dim),
        moved=5 * heads * head_dim * dtype.itemsize,
    )


OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD, DW),
    small=rotary.SMALL,
    options=({}, {"shared": False}, {"casting_mode": "gemma", "offset": 1.0, "partial": True, "narrow": True}),
)
