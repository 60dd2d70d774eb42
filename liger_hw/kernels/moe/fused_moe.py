"""Mixture of experts: every token goes through a few of many gated MLPs, and their weighted results are summed.

    z = x[t] @ gate_up_proj[e]^T + gate_up_bias[e]          for each of token t's top_k experts e, with weight w
    out[t] = sum over these e of w * (gate(z) @ down_proj[e]^T + down_bias[e])

The gate is `reference.Gate`. Sums are fp32, and z, gate(z) and the experts' results are rounded to x's dtype.

The T * K slots (token, choice) are sorted by expert (`routing.py`). The first product gathers rows of x
(`products.py`), a kernel over rows applies the gate (`gates.py`), the second product writes a row for each slot, and a
token's rows are added in the order of its choices (`sums.py`). No host synchronisation, no atomics: reproducible.
Saved for backward: the inputs, the routing and z. Backward, with da = dout[t] @ down_proj[e]:

    dz = w * da * gate'(z)        dw = da . gate(z) + dout[t] . down_bias[e]
    ddown_proj[e] = dout[t]^T @ (w * gate(z))             dgate_up_proj[e] = dz^T @ x[t]        over the rows of e
    dx[t] = sum over its slots of dz @ gate_up_proj[e]

Source: Gale et al., "MegaBlocks", https://arxiv.org/abs/2211.15841; Guo et al., "SonicMoE",
https://arxiv.org/abs/2512.14080 (computes dw from da, so that the experts' results are not saved).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ... import registry
from ...registry import Sample
from ...runtime.operator import (
    OperatorFunction,
    autocast_dtype,
    check_flags,
    check_tensors,
    define,
    dense,
    no_weight,
    row_major,
)
from . import gates, products, routing, sums
from .reference import ExpertOptions, Gate, check_index, experts_reference
from .routing import Routing


def fused_moe_reference(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    is_transposed: bool = False,
    rounded: torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor:
    """The specification in plain torch, expert by expert.

    rounded: a dtype to which the pre-activations are rounded, or None. A wide reference of a narrow computation needs
        it if there is a limit, at which the gradient jumps: rounding may move a number to the other side.
    """
    gate = Gate.checked("fused_moe_reference", **options)
    tensors = x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias
    return experts_reference(*tensors, ExpertOptions(gate, is_transposed), rounded)[0]


# -- launchers -------------------------------------------------------------------------------------------------------


def _key(x, down_proj, top_k_index, options: ExpertOptions) -> registry.Key:
    inner = down_proj.shape[1 if options.is_transposed else 2]
    return products.product_key(*x.shape, inner, down_proj.shape[0], top_k_index.shape[1], x.itemsize)


def _fwd(x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias, options):
    if x.dtype is torch.float64:  # only in the interpreter, whose tl.dot would add bits of float64 to an fp32 sum
        raise NotImplementedError(
            "fused_moe: its kernels do not multiply float64; use float32 or float16, or a process without "
            "LIGER_HW_INTERPRET=1 and TRITON_INTERPRET=1"
        )
    x, top_k_index, top_k_weights = row_major(x), top_k_index.contiguous(), top_k_weights.contiguous()
    n_experts, axis = down_proj.shape[0], 1 if options.is_transposed else 2
    check_index(top_k_index, n_experts)
    routes = routing.route(top_k_index, n_experts)
    if not top_k_index.numel():
        return torch.zeros_like(x), x.new_empty((0, gate_up_proj.shape[3 - axis])), *routes
    key = _key(x, down_proj, top_k_index, options)
    z = products.rows_product(products.UP, key, x, gate_up_proj, axis, True, routes)
    act = gates.gated(z, dense(gate_up_bias), None, top_k_index, options.gate, routes, n_experts)
    y = products.rows_product(products.DOWN, key, act, down_proj, axis, False, routes)
    del act
    return sums.combine(y, top_k_weights, dense(down_bias), top_k_index, routes), z, *routes


def _bwd(
    dout, x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias, z,
    order, token, row, offsets, largest, needed, options,
):  # fmt: skip
    """Beside z, at most three tensors of T * K rows exist at a time; cheap ones are recomputed."""
    if not top_k_index.numel():
        tensors = x, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias
        return tuple([t.new_zeros(t.shape) if is_needed else no_weight(x) for t, is_needed in zip(tensors, needed)])
    dout, x = row_major(dout), row_major(x)
    top_k_index, top_k_weights = top_k_index.contiguous(), top_k_weights.contiguous()
    routes, key = Routing(order, token, row, offsets, largest), _key(x, down_proj, top_k_index, options)
    gating = top_k_index, options.gate, routes, down_proj.shape[0]
    axis = 2 if options.is_transposed else 1
    needs_x, needs_up, needs_down, needs_weights, needs_up_bias, needs_down_bias = needed
    dx = dup = ddown = dweights = dup_bias = ddown_bias = None
    if needs_x or needs_up or needs_weights or needs_up_bias:
        da = products.rows_product(products.DOWN_BWD, key, dout, down_proj, axis, True, routes)
        dz, by_weights = gates.gated_bwd(da, z, top_k_weights, dout, dense(down_bias), *gating)
        del da
        if needs_weights:
            dweights = by_weights
        if needs_up_bias:
            dup_bias = sums.bias_gradient(dz, None, top_k_index, routes)
        if needs_up:  # [E, 2 I, H], or transposed [E, H, 2 I]; the rows of x are gathered
            p, q, gathered = (x, dz, (True, False)) if options.is_transposed else (dz, x, (False, True))
            dup = products.weights_product(products.UP_WEIGHTS, key, p, q, gathered, routes)
            del p, q
        if needs_x:
            rows = products.rows_product(products.UP_BWD, key, dz, gate_up_proj, axis, False, routes)
            dx = sums.combine(rows, None, None, top_k_index, routes)
            del rows
        del dz
    if needs_down_bias:
        ddown_bias = sums.bias_gradient(dout, top_k_weights, top_k_index, routes)
    if needs_down:  # [E, H, I], or transposed [E, I, H]; the rows of dout are gathered
        act = gates.gated(z, None, top_k_weights, *gating)
        p, q, gathered = (act, dout, (False, True)) if options.is_transposed else (dout, act, (True, False))
        ddown = products.weights_product(products.DOWN_WEIGHTS, key, p, q, gathered, routes)
    gradients = dx, dup, ddown, dweights, dup_bias, ddown_bias
    return tuple([no_weight(x) if gradient is None else gradient for gradient in gradients])


_INPUTS = (
    "Tensor x, Tensor gate_up_proj, Tensor down_proj, Tensor top_k_index, Tensor top_k_weights, Tensor? gate_up_bias,"
    " Tensor? down_bias"
)
_SHAPES = (
    "T x [tokens, hidden]; T gate_up_proj, down_proj [experts, ., .]; int top_k_index [tokens, k]; "
    "top_k_weights [tokens, k]; T gate_up_bias [experts, .]; T down_bias [experts, hidden]"
)


def _fwd_fake(x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias, options):
    n_rows, n_experts = top_k_index.shape[0] * top_k_index.shape[1], down_proj.shape[0]
    z = x.new_empty((n_rows, gate_up_proj.shape[2 if options.is_transposed else 1]))
    numbers = [x.new_empty(n, dtype=torch.int32) for n in (n_rows, n_rows, n_rows, n_experts + 1, n_experts)]
    return x.new_empty(x.shape), z, *numbers


def _misfit(
    x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias, options, z=None, offsets=None
) -> str:
    experts, hidden, inner = down_proj.shape[0], x.shape[1], down_proj.shape[1 if options.is_transposed else 2]
    if not experts:
        return f"down_proj must have at least one expert, got {tuple(down_proj.shape)}"
    columns = 2 * inner if options.gate.has_gate else inner
    down, up = (hidden, inner), (columns, hidden)
    if options.is_transposed:
        down, up = down[::-1], up[::-1]
    shapes = {
        "down_proj": (down_proj, (experts, *down)),
        "gate_up_proj": (gate_up_proj, (experts, *up)),
        "gate_up_bias": (gate_up_bias, (experts, columns)),
        "z": (z, (top_k_index.numel(), columns)),
        "offsets": (offsets, (experts + 1,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            return f"{name} must be {list(shape)} for x {tuple(x.shape)}, got {list(tensor.shape)}"
    return ""


class FusedMoEFunction(OperatorFunction):
    compiles_ahead = True  # 16 kernels, forward and backward
    fwd = define(
        f"fused_moe_fwd({_INPUTS}) -> (Tensor out, Tensor z, Tensor order, Tensor token, Tensor row, Tensor offsets,"
        " Tensor largest)",
        shapes=_SHAPES,
        misfit=_misfit,
        launcher=_fwd,
        reference=experts_reference,
        fake=_fwd_fake,
        numbers=ExpertOptions,
        recorded=False,
    )
    bwd = define(
        f"fused_moe_bwd(Tensor dout, {_INPUTS}, Tensor z, Tensor order, Tensor token, Tensor row, Tensor offsets,"
        " Tensor largest, bool[] needed) -> (Tensor dx, Tensor dgate_up_proj, Tensor ddown_proj, Tensor dtop_k_weights,"
        " Tensor dgate_up_bias, Tensor ddown_bias)",
        shapes=f"{_SHAPES}; dout [tokens, hidden]; T z [n_rows, columns]; int order, token, row [n_rows]; int offsets; "
        "int largest [experts]",
        misfit=lambda dout, *args: _misfit(*args[:7], args[-1], z=args[7], offsets=args[11]),
        launcher=_bwd,
        derivative_of=fwd,
        reference=lambda dout, *args: experts_reference(*args[:7], args[-1], rounded=args[7].dtype),
        numbers=ExpertOptions,
        recorded=False,
    )


def liger_fused_moe(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    has_gate: bool = True,
    is_transposed: bool = False,
    is_concatenated: bool = True,
) -> torch.Tensor:
    """The experts of a mixture-of-experts layer, after its router.

    x: [T, H] in fp32, fp16 or bf16 (fp64 too on the CPU); weights and biases have the same dtype, or any under
        autocast, which casts all of them to its dtype
    gate_up_proj: [E, 2 I, H], or [E, H, 2 I] if is_transposed; I in place of 2 I if has_gate is False
    down_proj: [E, H, I], or [E, I, H] if is_transposed
    top_k_index: [T, K] int32 or int64, each token's experts; repeats are allowed. An index outside [0, E), such as a
        sentinel of expert parallelism, contributes zero. With LIGER_HW_CHECK_TARGETS=1 an index below 0 or above E
        raises `IndexError`.
    top_k_weights: [T, K] in any floating dtype
    activation: silu, gelu (exact), gelu_tanh, relu or relu2 (squared)
    gate_up_bias: [E, 2 I] ([E, I] if has_gate is False) or None; down_bias: [E, H] or None
    alpha: silu is g * sigmoid(alpha * g), alpha not 0; limit: g is first clamped to at most limit, u to [-limit,
        limit]; up_offset: the gate is act(g) * (u + up_offset), up_offset 0 if has_gate is False. gpt-oss has
        alpha=1.702, limit=7.0, up_offset=1.0.
    has_gate: False: the gate is act(g), g = x @ gate_up_proj[e]^T
    is_concatenated: g is the first half of the 2 I columns and u the second; False: they alternate, g first

    Returns [T, H] in x's dtype. Differentiable in x, both weights, both biases and top_k_weights. Raises `ValueError`
    for shapes, dtypes, devices or options that do not fit, `TypeError` for other types.
    """
    op = "liger_fused_moe"
    check_flags(op, has_gate=has_gate, is_transposed=is_transposed, is_concatenated=is_concatenated)
    gate = Gate.checked(op, activation, alpha, limit, up_offset, has_gate, is_concatenated)
    check_tensors(op, x=x, gate_up_proj=gate_up_proj, down_proj=down_proj)
    out_dtype, dtype = x.dtype, autocast_dtype(x.device.type)
    if dtype is not None and torch.float64 not in (x.dtype, down_proj.dtype):
        x, gate_up_proj, down_proj = x.to(dtype), gate_up_proj.to(dtype), down_proj.to(dtype)
        gate_up_bias, down_bias = (b if b is None else b.to(dtype) for b in (gate_up_bias, down_bias))
    tensors = x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias
    return FusedMoEFunction.apply(*tensors, ExpertOptions(gate, bool(is_transposed))).to(out_dtype)


class LigerExperts(torch.nn.Module):
    """The experts of Mixtral, Qwen3-MoE and similar models in transformers 5, with the same parameters.

    config: has hidden_size; num_experts, num_local_experts or n_routed_experts; moe_intermediate_size or
    intermediate_size; and hidden_act, silu or swish. Raises `ValueError` for another hidden_act, or if config has no
    number of experts.
    """

    def __init__(self, config) -> None:
        super().__init__()
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(f"LigerExperts: hidden_act must be silu or swish, got {config.hidden_act!r}")
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        numbers = [getattr(config, name) for name in names if hasattr(config, name)]
        if not numbers:
            raise ValueError(f"LigerExperts: config must have {', '.join(names[:-1])} or {names[-1]}, but has none")
        self.num_experts = numbers[0]
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        up_shape = self.num_experts, 2 * self.intermediate_dim, self.hidden_dim
        self.gate_up_proj = torch.nn.Parameter(torch.empty(up_shape))
        self.down_proj = torch.nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [..., hidden], top_k_index and top_k_weights [..., K] -> like hidden_states."""
        x = hidden_states.reshape(-1, self.hidden_dim)
        index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
        return liger_fused_moe(x, self.gate_up_proj, self.down_proj, index, weights).view(hidden_states.shape)


WORKLOADS = {
    "qwen3_30b_a3b": (32768, 2048, 768, 128, 8),
    "qwen3_30b_a3b_8k": (8192, 2048, 768, 128, 8),
    "qwen3_next": (16384, 2048, 512, 512, 10),
    "gpt_oss_20b": (16384, 2880, 2880, 32, 4),
    "deepseek_v3_quarter": (16384, 7168, 2048, 64, 8),
    "mixtral_8x7b": (16384, 4096, 14336, 8, 2),
}
"""Sizes (n_tokens, hidden, inner, n_experts, top_k) of real models; of DeepSeek-V3 with a quarter of its experts."""


def sample(sizes, dtype, device, generator, *, biased=False, sentinels=False, **options) -> Sample:
    n_tokens, hidden, inner, n_experts, top_k = sizes
    n_z = 2 * inner if options.get("has_gate", True) else inner
    has_limit = bool(options.get("limit"))

    def random(*shape: int, scale: float = 1.0, few_bits: bool = False) -> torch.Tensor:
        weight = torch.randn(shape, generator=generator, dtype=torch.float32, device=device) * scale
        if few_bits:
            step = 2.0 ** math.floor(math.log2(scale / 8))
            weight = (weight / step).round() * step
        return weight.to(dtype).requires_grad_()

    def weight(columns: int, rows: int, few_bits: bool = False) -> torch.Tensor:
        shape = (rows, columns) if options.get("is_transposed") else (columns, rows)
        return random(n_experts, *shape, scale=rows**-0.5, few_bits=few_bits)

    high = n_experts + 1 if sentinels else n_experts
    index = torch.randint(-1 if sentinels else 0, high, (n_tokens, top_k), generator=generator, device=device)
    weights = torch.rand(n_tokens, top_k, generator=generator, device=device).to(dtype).requires_grad_()
    if biased:
        options |= {"gate_up_bias": random(n_experts, n_z), "down_bias": random(n_experts, hidden)}
    products = n_tokens * top_k * (3 * hidden + 6 * inner) + 2 * n_experts * hidden * (inner + n_z)
    # The gradient jumps at a limit. With few bits fp32 sums are exact: z is on the same side in every implementation.
    x, up = random(n_tokens, hidden, few_bits=has_limit), weight(n_z, hidden, few_bits=has_limit)
    return Sample(
        args=(x, up, weight(hidden, inner), index, weights),
        kwargs=options,
        reduction=max(hidden, inner) + top_k,
        grad_reduction=max(hidden, inner, n_tokens * top_k),
        moved=products * dtype.itemsize,
        exact={"rounded": dtype} if has_limit else {},
    )


OP = registry.register_file(
    __name__,
    tunables=(*products.TUNABLES, *gates.TUNABLES, *sums.TUNABLES, *routing.TUNABLES),
    options=(
        {},
        {
            "biased": True,
            "alpha": 1.702,
            "limit": 2.5,
            "up_offset": 1.0,
            "is_transposed": True,
            "is_concatenated": False,
        },
        {"activation": "relu2", "has_gate": False, "sentinels": True},
    ),
    small=((19, 24, 17, 5, 3), (1, 17, 8, 3, 1), (130, 32, 48, 4, 2)),
)
