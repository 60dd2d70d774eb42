"""What an expert computes between its two products, and the whole layer, in plain torch: specification and oracle."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import env
from ...runtime.operator import check, check_numbers, no_weight

ACTIVATIONS = "silu", "gelu", "gelu_tanh", "relu", "relu2"


class Gate(NamedTuple):
    """How the pre-activations of an expert become the input of its second product.

    activation: one of `ACTIVATIONS`; alpha: silu is g * sigmoid(alpha * g)
    limit: 0, or the bound of the pre-activations: min(g, limit) and u clamped to [-limit, limit]; ungated, g alone
    up_offset: added to u after the clamp
    has_gate: act(g) * (u + up_offset); else act(g) alone, and there is no u
    is_concatenated: g is the first half of a row and u the second; else g are the even columns and u the odd ones
    """

    activation: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    up_offset: float = 0.0
    has_gate: bool = True
    is_concatenated: bool = True

    @classmethod
    def checked(
        cls, op: str, activation="silu", alpha=1.0, limit=None, up_offset=0.0, has_gate=True, is_concatenated=True
    ) -> "Gate":
        """The gate of a public function's options; raises `ValueError` or `TypeError` for what no gate has."""
        check(activation in ACTIVATIONS, op, f"activation must be one of {ACTIVATIONS}, got {activation!r}")
        check_numbers(op, alpha=alpha, limit=1.0 if limit is None else limit, up_offset=up_offset)
        if limit is not None and not limit > 0:  # torch.compile puts no symbol into a text
            check(False, op, f"limit must be positive, or None for no limit, got {limit}")
        check(alpha != 0, op, "alpha must not be 0, for which silu is g / 2")
        check(alpha == 1 or activation == "silu", op, f"alpha is silu's, not {activation}'s")
        check(has_gate or not up_offset, op, "up_offset is added to u, and without a gate there is no u")
        limit = 0.0 if limit is None else float(limit)
        return cls(activation, float(alpha), limit, float(up_offset), has_gate, is_concatenated)

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """z [rows, 2 * inner] (ungated [rows, inner]) -> [rows, inner], in z's dtype, which should be fp32 or wider."""
        if not self.has_gate:
            return self._activate(z.clamp(max=self.limit) if self.limit else z)
        gate, up = z.chunk(2, -1) if self.is_concatenated else (z[..., ::2], z[..., 1::2])
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self._activate(gate) * (up + self.up_offset)

    def _activate(self, gate: torch.Tensor) -> torch.Tensor:
        if self.activation == "silu":
            return gate * torch.sigmoid(self.alpha * gate)
        if self.activation == "gelu":
            return torch.nn.functional.gelu(gate)
        if self.activation == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh")
        return gate.relu() if self.activation == "relu" else gate.relu().square()

    def gradient(self, z: torch.Tensor, dact: torch.Tensor) -> torch.Tensor:
        """Backward of `apply`, in closed form: an operator's body runs below autograd."""
        if not self.has_gate:
            if not self.limit:
                return dact * self._slope(z)
            return dact * self._slope(z.clamp(max=self.limit)) * (z <= self.limit)
        gate, up = z.chunk(2, -1) if self.is_concatenated else (z[..., ::2], z[..., 1::2])
        of_gate = of_up = 1.0
        if self.limit:
            of_gate, of_up = gate <= self.limit, up.abs() <= self.limit  # clamp's gradient: 1 at the bounds too
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        dgate = dact * (up + self.up_offset) * self._slope(gate) * of_gate
        dup = dact * self._activate(gate) * of_up
        return torch.cat((dgate, dup), -1) if self.is_concatenated else torch.stack((dgate, dup), -1).flatten(-2)

    def _slope(self, gate: torch.Tensor) -> torch.Tensor:
        """The derivative of `_activate`."""
        if self.activation == "silu":
            s = torch.sigmoid(self.alpha * gate)
            return s * (1 + self.alpha * gate * (1 - s))
        if self.activation in ("gelu", "gelu_tanh"):
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            return torch.ops.aten.gelu_backward(torch.ones_like(gate), gate, approximate=approximate)
        return (gate > 0).to(gate.dtype) if self.activation == "relu" else 2 * gate.relu()


class How(NamedTuple):
    """The numbers of both operators: the gate, and the layout of the weights."""

    gate: Gate
    is_transposed: bool


def check_index(top_k_index: torch.Tensor, n_experts: int) -> None:
    """Raise `IndexError` for an index outside [0, n_experts], if LIGER_HW_CHECK_TARGETS asks for it.

    n_experts itself marks a slot of another rank's expert.
    """
    if not env.get("LIGER_HW_CHECK_TARGETS"):
        return
    wrong = ((top_k_index < 0) | (top_k_index > n_experts)).nonzero()
    if len(wrong):
        token, choice = wrong[0].tolist()
        raise IndexError(
            f"liger_fused_moe: top_k_index[{token}, {choice}] is {int(top_k_index[token, choice])}, expected 0 to "
            f"{n_experts - 1}, or {n_experts} for an expert of another rank"
        )


def _sorted_slots(top_k_index: torch.Tensor, n_experts: int) -> list[torch.Tensor]:
    """The slots of each expert, in order; the last entry has the slots without an expert."""
    expert_of = top_k_index.reshape(-1)
    slots = [torch.where(expert_of == expert)[0] for expert in range(n_experts)]
    return [*slots, torch.where((expert_of < 0) | (expert_of >= n_experts))[0]]


def _rounded(z: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """z with the values it has after rounding to `dtype`, in its dtype; the gradient passes unchanged."""
    return z if dtype is None else z + (z.to(dtype).to(z.dtype) - z).detach()


def _experts(
    x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias, gate, is_transposed, rounded=None
):
    """(the layer's output, the pre-activations of each expert's rows, its slots, the slots without an expert last)"""
    (n_tokens, top_k), wide = top_k_index.shape, torch.promote_types(x.dtype, torch.float32)
    if not is_transposed:
        gate_up_proj, down_proj = gate_up_proj.mT, down_proj.mT
    slots, kept = _sorted_slots(top_k_index, len(down_proj)), []
    y = x.new_zeros((n_tokens * top_k, x.shape[1]))
    for expert, chosen in enumerate(slots[:-1]):
        z = _rounded(x[chosen // top_k] @ gate_up_proj[expert], rounded)
        if gate_up_bias is not None:
            z = _rounded(z + gate_up_bias[expert], rounded)
        rows = gate.apply(z.to(wide)).to(x.dtype) @ down_proj[expert]
        if down_bias is not None:
            rows = rows + down_bias[expert]
        y = y.index_copy(0, chosen, rows)
        kept.append(z)
    weights = top_k_weights.reshape(-1, 1).to(wide).index_fill(0, slots[-1], 0.0)
    weighted = (weights * y.to(wide)).view(n_tokens, top_k, x.shape[1])
    return weighted.sum(1).to(x.dtype), kept, slots


def experts_reference(*args):
    """The layer's output [T, H]; the arguments of `liger_fused_moe` in order, a checked `Gate`, is_transposed
    and optionally a narrower dtype.

    Products and pre-activations are rounded to x's dtype, as GEMMs leave them; everything else is fp32 (fp64 for fp64).
    Pre-activations are rounded to the narrower dtype unless it is None. Differentiable.
    """
    return _experts(*args)[0]


def experts_fwd_reference(x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias, how):
    """What the operator `fused_moe_fwd` returns: the output, z, and the five parts of `routing.Routing`."""
    check_index(top_k_index, down_proj.shape[0])
    inputs = x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias
    out, kept, slots = _experts(*inputs, how.gate, how.is_transposed)
    z = torch.cat([*kept, x.new_zeros((len(slots[-1]), kept[0].shape[1]))])
    order = torch.cat(slots)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=x.device)
    row = row.index_fill(0, slots[-1], -1)
    counts = torch.tensor([len(chosen) for chosen in slots[:-1]])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    largest = counts.argsort(descending=True, stable=True)
    numbers = order, order // top_k_index.shape[1], row, offsets, largest
    return out, z, *(t.to(device=x.device, dtype=torch.int32) for t in numbers)


def experts_bwd_reference(
    dout, x, gate_up_proj, down_proj, top_k_index, top_k_weights, down_bias, z,
    order, token, row, offsets, largest, needed, how,
):  # fmt: skip
    """What the operator `fused_moe_bwd` returns: six gradients, empty where not needed."""
    gate, is_transposed = how.gate, how.is_transposed
    top_k, wide = top_k_index.shape[1], torch.promote_types(x.dtype, torch.float32)
    up_weights, down_weights = (gate_up_proj, down_proj) if is_transposed else (gate_up_proj.mT, down_proj.mT)
    dx = torch.zeros((top_k_index.numel(), x.shape[1]), dtype=wide, device=x.device)
    dup, ddown = (torch.zeros(w.shape, dtype=x.dtype, device=x.device) for w in (up_weights, down_weights))
    dup_bias, ddown_bias = (
        torch.zeros(w.shape[::2], dtype=x.dtype, device=x.device) for w in (up_weights, down_weights)
    )
    dweights = torch.zeros(top_k_index.numel(), dtype=wide, device=x.device)
    start = 0
    for expert, chosen in enumerate(_sorted_slots(top_k_index, len(down_proj))[:-1]):
        rows, dy = chosen // top_k, dout[chosen // top_k]
        weight = top_k_weights.reshape(-1)[chosen].to(wide).unsqueeze(1)
        z_rows = z[start : start + len(chosen)].to(wide)
        act, start = gate.apply(z_rows).to(x.dtype), start + len(chosen)
        da = (dy @ down_weights[expert].T).to(wide)
        dz = gate.gradient(z_rows, weight * da).to(x.dtype)
        dweights[chosen] = (act.to(wide) * da).sum(1)
        if down_bias is not None:
            dweights[chosen] += (dy.to(wide) * down_bias[expert].to(wide)).sum(1)
        ddown[expert] = (weight * act.to(wide)).to(x.dtype).T @ dy
        ddown_bias[expert] = (weight * dy.to(wide)).sum(0)
        dup[expert] = x[rows].T @ dz
        dup_bias[expert] = dz.to(wide).sum(0)
        dx[chosen] = (dz @ up_weights[expert].T).to(wide)
    dx = dx.view(*top_k_index.shape, x.shape[1]).sum(1).to(x.dtype)
    if not is_transposed:
        dup, ddown = dup.mT.contiguous(), ddown.mT.contiguous()
    gradients = dx, dup, ddown, dweights.view(top_k_index.shape).to(top_k_weights.dtype), dup_bias, ddown_bias
    return only_needed(gradients, needed, x, top_k_weights)


def only_needed(gradients, needed, x, top_k_weights) -> tuple[torch.Tensor, ...]:
    """The six gradients, or an empty tensor of the same dtype for each that is not needed."""
    likes = x, x, x, top_k_weights, x, x
    return tuple([g if want else no_weight(like) for g, want, like in zip(gradients, needed, likes)])
