"""The gate of an expert and the whole layer in plain torch: the specification of fused_moe."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import env
from ...runtime.operator import check, check_numbers

ACTIVATIONS = "silu", "gelu", "gelu_tanh", "relu", "relu2"


class Gate(NamedTuple):
    """The function between the two products of an expert: act(g) * (u + up_offset), or act(g) without has_gate.

    activation: one of `ACTIVATIONS`; alpha: silu is g * sigmoid(alpha * g)
    limit: 0, or a bound: g is first clamped to at most limit, and u to [-limit, limit]
    is_concatenated: g is the first half of a row and u the second; False: g has the even columns and u the odd ones
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
        """The gate with these options of a public function. Raises `ValueError` for invalid options."""
        check(activation in ACTIVATIONS, op, f"activation must be one of {ACTIVATIONS}, got {activation!r}")
        check_numbers(op, alpha=alpha, limit=1.0 if limit is None else limit, up_offset=up_offset)
        if limit is not None and not limit > 0:  # not by `check`: torch.compile cannot format a symbolic limit
            check(False, op, f"limit must be positive, or None for no limit, got {limit}")
        check(alpha != 0, op, "alpha must not be 0")
        check(alpha == 1 or activation == "silu", op, f"alpha must be 1 for {activation}, since only silu has alpha")
        check(has_gate or not up_offset, op, "up_offset must be 0 if has_gate is False, since there is no u")
        limit = 0.0 if limit is None else float(limit)
        return cls(activation, float(alpha), limit, float(up_offset), has_gate, is_concatenated)

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """z [rows, 2 * inner] ([rows, inner] without has_gate) -> [rows, inner]; in fp32 or wider."""
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


class ExpertOptions(NamedTuple):
    """The options of both operators: the gate, and whether the weights are transposed."""

    gate: Gate
    is_transposed: bool


def check_index(top_k_index: torch.Tensor, n_experts: int) -> None:
    """With LIGER_HW_CHECK_TARGETS, raise `IndexError` for an index outside [0, n_experts]; n_experts itself marks an
    expert of another rank."""
    if not env.LIGER_HW_CHECK_TARGETS:
        return
    wrong = ((top_k_index < 0) | (top_k_index > n_experts)).nonzero()
    if len(wrong):
        token, choice = wrong[0].tolist()
        raise IndexError(
            f"liger_fused_moe: top_k_index[{token}, {choice}] is {int(top_k_index[token, choice])}, expected 0 to "
            f"{n_experts - 1}, or {n_experts} for an expert of another rank"
        )


def experts_reference(
    x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias, options, rounded=None
):
    """The results of `fused_moe_fwd` in plain torch: the output [T, H], z, and the fields of `routing.Routing`.

    Products and pre-activations are rounded to x's dtype; everything else is fp32 (fp64 for fp64).
    rounded: a narrower dtype to which pre-activations are rounded, or None; their gradient is not rounded
    """
    (n_tokens, top_k), wide = top_k_index.shape, torch.promote_types(x.dtype, torch.float32)
    n_experts = len(down_proj)
    check_index(top_k_index, n_experts)
    if not options.is_transposed:
        gate_up_proj, down_proj = gate_up_proj.mT, down_proj.mT
    expert_of = top_k_index.reshape(-1)
    slots = [torch.where(expert_of == expert)[0] for expert in range(n_experts)]
    others = torch.where((expert_of < 0) | (expert_of >= n_experts))[0]
    y, z = x.new_zeros((n_tokens * top_k, x.shape[1])), []
    for expert, expert_slots in enumerate(slots):
        z_rows = x[expert_slots // top_k] @ gate_up_proj[expert]
        if gate_up_bias is not None:
            z_rows = _rounded(z_rows, rounded) + gate_up_bias[expert]
        z.append(_rounded(z_rows, rounded))
        rows = options.gate.apply(z[-1].to(wide)).to(x.dtype) @ down_proj[expert]
        if down_bias is not None:
            rows = rows + down_bias[expert]
        y = y.index_copy(0, expert_slots, rows)
    z.append(x.new_zeros((len(others), gate_up_proj.shape[2])))
    weights = top_k_weights.reshape(-1, 1).to(wide).index_fill(0, others, 0.0)
    out = (weights * y.to(wide)).view(n_tokens, top_k, x.shape[1]).sum(1).to(x.dtype)
    order = torch.cat([*slots, others])
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=x.device)
    row = row.index_fill(0, others, -1)
    counts = torch.tensor([len(expert_slots) for expert_slots in slots])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    largest = counts.argsort(descending=True, stable=True)
    numbers = order, order // top_k, row, offsets, largest
    return out, torch.cat(z), *(t.to(device=x.device, dtype=torch.int32) for t in numbers)


def _rounded(z: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """z with its values rounded to `dtype`; its dtype and its gradient do not change."""
    return z if dtype is None else torch.where(z.isinf(), z, z + (z.to(dtype).to(z.dtype) - z).detach())
