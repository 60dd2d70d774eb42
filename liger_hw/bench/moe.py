"""`liger-hw bench moe`: what is benchmarked of fused_moe, beside what `ops.bench` does with every op.

Tokens choose their experts as a router has them choose: K different ones each. With `uniform` routing every expert is
as likely as another; with `skewed` routing the first one has ten times the mean, as far as there are tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Sequence

import torch

from ..text import table
from .cases import Case, cases
from .inputs import Inputs

AGAINST = ("eager", "grouped_mm", "batched_mm", "liger")
READY_SECONDS = 240
"""Liger 0.8.5 tunes for up to 168 s at its first step."""


def layers(sizes: Sequence[str], tokens: Sequence[int], routing: str, dtype: torch.dtype) -> list[Case]:
    """The cases: workloads of fused_moe or sizes such as 8192x2048x768x128x8, at each number of `tokens` if given."""
    todo = cases(["fused_moe"], sizes, dtype)
    if tokens:
        todo = [replace(case, sizes=(n, *case.sizes[1:])) for case in todo for n in tokens]
    few = 16, 64, 32, 8, 2
    return [
        replace(case, prepare=partial(_routed, skewed=routing == "skewed"), limit=READY_SECONDS, host_sizes=few)
        for case in todo
    ]


def _routed(inputs: Inputs, skewed: bool) -> Inputs:
    """The same inputs with K different experts a token."""
    x, up, down, index, weights = inputs.args
    (n_tokens, top_k), n_experts = index.shape, down.shape[0]
    generator = torch.Generator(index.device).manual_seed(inputs.seed)
    chance = torch.rand(n_tokens, n_experts, generator=generator, device=index.device)
    if skewed:
        many = min(n_tokens, 10 * n_tokens * top_k // n_experts)
        chance[:, 0] = -1.0
        chance[torch.randperm(n_tokens, generator=generator, device=index.device)[:many], 0] = 2.0
    return replace(inputs, args=(x, up, down, chance.topk(top_k, -1).indices, weights))


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """What only this benchmark prints: the rate, and what the first call and memory cost."""
    lines = [("tokens x hidden x inner x experts x top-k", "mode", "arm", "TFLOP/s", "kept MiB", "first call s")]
    for row in rows:
        if row["status"] != "ok" or not row["ms"]:
            continue
        n_tokens, hidden, inner, _, top_k = row["sizes"]
        products = 6 * n_tokens * top_k * hidden * inner * {"fwd": 1, "bwd": 2, "full": 3}[row["mode"]]
        kept = "-" if row["kept_mib"] is None else f"{row['kept_mib']:.0f}"
        rate = f"{products / row['ms']['median'] / 1e9:.4g}"
        lines.append(
            ("x".join(map(str, row["sizes"])), row["mode"], row["arm"], rate, kept, f"{row['first_seconds']:.2f}")
        )
    return table(lines) if len(lines) > 1 else ""
