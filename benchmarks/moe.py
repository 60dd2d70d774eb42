"""The experts of a layer: liger_hw against Liger and against transformers 5's own implementations.

    python benchmarks/moe.py --json results/moe-<device>.json
    python benchmarks/moe.py --sizes qwen3_30b_a3b --tokens 64,256,1024,4096,16384,65536
    python benchmarks/moe.py --routing skewed

What `liger-hw bench fused_moe` times, with experts chosen as a router chooses them: K different ones a token. With
`uniform` routing every expert is as likely as another; with `skewed` routing the first one has ten times the mean, as
far as there are tokens. Without a GPU the layers are small. `experts_page.py` makes a page of the results.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Callable, Sequence

import torch

from liger_hw.bench import ops, peers, report
from liger_hw.bench.cases import Case, cases
from liger_hw.bench.inputs import Inputs
from liger_hw.bench.peers.common import only
from liger_hw.bench.timing import Budget, Meter, OutOfBudget
from liger_hw.cli.arguments import dtype_name, listed, positive, seconds, torch_dtype, usable_device
from liger_hw.text import table

AGAINST = ("eager", "grouped_mm", "batched_mm", "liger")
READY_SECONDS = 240
"""Liger 0.8.5 tunes for up to 168 s at its first step."""


# -- transformers' implementations -----------------------------------------------------------------------------------


def of(implementation: str) -> Callable[[Any], Callable[..., Any]]:
    """A `Peer.build` for `eager` (a loop over experts), `grouped_mm` or `batched_mm`."""

    def build(op: Any) -> Callable[..., Any]:
        try:
            module = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
            forward = module.MixtralExperts.forward
        except (ImportError, AttributeError):
            raise peers.Absent("transformers 5 is not installed") from None
        return functools.partial(_experts, forward, implementation)

    return build


def _experts(
    forward: Callable[..., Any],
    implementation: str,
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Mixtral's experts, whose forward asks its module for these attributes."""
    only({}, **more)

    def gated(z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    module = SimpleNamespace(
        config=SimpleNamespace(_experts_implementation=implementation),
        num_experts=down_proj.shape[0],
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        act_fn=torch.nn.functional.silu,
        _apply_gate=gated,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
    )
    return forward(module, x, top_k_index, top_k_weights)


for _name in AGAINST[:-1]:
    peers.PEERS[_name] = peers.Peer(_name, "transformers", "transformers", of(_name))


# -- the layers ------------------------------------------------------------------------------------------------------


def layers(sizes: Sequence[str], tokens: Sequence[int], routing: str, dtype: torch.dtype) -> list[Case]:
    """The cases: workloads of fused_moe or sizes such as 8192x2048x768x128x8, at each number of `tokens` if given."""
    todo = cases(["fused_moe"], sizes, dtype)
    if tokens:
        todo = [replace(case, sizes=(n, *case.sizes[1:])) for case in todo for n in tokens]
    routed = functools.partial(_routed, skewed=routing == "skewed")
    return [replace(case, prepare=routed, limit=READY_SECONDS) for case in todo]


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


# -- the run ---------------------------------------------------------------------------------------------------------


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """The rate, and what the first call and memory cost."""
    lines = [("tokens x hidden x inner x experts x top-k", "mode", "arm", "TFLOP/s", "kept MiB", "first call s")]
    for row in rows:
        if row["status"] != "ok" or not row["ms"]:
            continue
        n_tokens, hidden, inner, _, top_k = row["sizes"]
        products = 6 * n_tokens * top_k * hidden * inner * {"fwd": 1, "bwd": 2, "full": 3}[row["mode"]]
        kept = "-" if row["kept_mib"] is None else f"{row['kept_mib']:.0f}"
        rate = f"{products / row['ms']['median'] / 1e9:.4g}"
        size = "x".join(map(str, row["sizes"]))
        lines.append((size, row["mode"], row["arm"], rate, kept, f"{row['first_seconds']:.2f}"))
    return table(lines) if len(lines) > 1 else ""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", help="torch device (default: the accelerator, else cpu)")
    add("--dtype", type=dtype_name, default="bfloat16", help="bf16 (default), fp16 or fp32")
    add("--sizes", type=listed(str, "names"), default=[], help="workloads of fused_moe, or 8192x2048x768x128x8")
    add("--tokens", type=listed(positive, "numbers"), default=[], help="each layer at these numbers of tokens")
    add("--routing", choices=("uniform", "skewed"), default="uniform", help="how tokens spread over the experts")
    add("--against", type=listed(str, "names"), default=list(AGAINST), help=f"peers (default {','.join(AGAINST)})")
    add("--mode", type=listed(str, "modes"), default=["full"], help="fwd, bwd, full (default full)")
    add("--repeats", type=positive, default=3, help="interleaved repeats (default 3)")
    add("--budget", type=seconds, help="start no new layer after this many seconds")
    add("--json", metavar="FILE", help="write every figure")
    options = parser.parse_args(words)
    device = usable_device(options.device)
    sizes = options.sizes or (["small"] if device.type == "cpu" else [])
    todo = layers(sizes, options.tokens, options.routing, torch_dtype(options.dtype))
    facts, rows, complete = report.machine(device), [], False

    def keep(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        if options.json:
            report.save(options.json, {"machine": facts, "rows": rows, "complete": complete})

    with Meter(device) as meter:
        facts["copy_gb_s"] = meter.copy_rate()
        arms = {"against": options.against, "modes": options.mode, "repeats": options.repeats}
        budget = Budget(options.budget)
        progress = {"on_case": lambda case: print(case, file=sys.stderr, flush=True), "on_rows": keep}
        try:
            ops.bench(todo, device, **arms, budget=budget, meter=meter, copy_rate=facts["copy_gb_s"], **progress)
            complete = True
        except (OutOfBudget, ops.DeviceLost) as stop:
            print(f"stopped early: {stop}", file=sys.stderr)
    keep([])
    print(f"{report.as_text(rows)}\n\n{as_text(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
