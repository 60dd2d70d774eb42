"""Training steps of Qwen3.5 with flash-linear-attention's scan: Hugging Face's, and ours with and without convolutions.

    python benchmarks/hybrids.py --out results/hybrid-qwen3_5-<device>.json

flash-linear-attention tries many configurations of each kernel, for minutes: here one, two of the scan's, for all arms
alike. Its refusal of some Tritons on Hopper is lifted; its gradients may then be wrong, in all arms. Before the steps,
which the arms take in turns, each arm's gradients are compared with Hugging Face's at the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import training
from activations import train_step

import liger_hw
from liger_hw.backends import with_index
from liger_hw.bench import report
from liger_hw.text import table

ARMS: dict[str, dict[str, Any] | None] = {"hf": None, "short_conv=False": {"short_conv": False}, "liger_hw": {}}
"""Arm -> the options of `patch`, None for Hugging Face's own model."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936, help="that of Qwen3; Qwen3.5 has 248320 words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, help="smaller width, for a quick try")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out")
    options = parser.parse_args()
    machine = report.machine(with_index(options.device), os.environ.get("LIGER_COMMIT"))
    if not options.hidden:
        _shorten_autotuning()
    rows = _rows(options)
    lines = [("arm", "ms a step", "gain", "peak GiB", "worst gradient norm")]
    for row in rows:
        gib = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        gain = rows[0]["ms"] / row["ms"]
        lines.append((row["arm"], f"{row['ms']:.1f}", f"{gain:.2f}x", gib, f"{row['worst_gradient_norm']:.4f}"))
    print(table(lines))
    if options.out:
        results = {"options": vars(options), "machine": machine, "rows": rows}
        Path(options.out).write_text(json.dumps(results, indent=1))
    return 0


def _shorten_autotuning() -> None:
    """Leave two configurations of the kernels of flash-linear-attention's scan and one of the others, near 4 warps, 3
    stages and blocks of 64; to be called before it is imported. And lift its refusal of this Triton."""
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def distance(config: Any) -> float:
        blocks = [size for size in config.kwargs.values() if isinstance(size, int) and size > 8]
        return abs(config.num_warps - 4) + abs(config.num_stages - 3) + sum(abs(size - 64) / 32 for size in blocks)

    def shortened(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        name = getattr(getattr(fn, "fn", fn), "__name__", "")
        init(self, fn, arg_names, sorted(configs or [], key=distance)[: 1 + name.startswith("chunk")], *args, **kwargs)

    Autotuner.__init__ = shortened
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True


def _rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each arm: loss and gradients at the same weights beside Hugging Face's, then its steps."""
    from transformers import AutoModelForCausalLM

    device = with_index(options.device)
    schedule = training.Schedule("qwen3_5", options.layers, options.batch, options.seq, hidden=options.hidden)
    config = training.config(schedule)
    config.vocab_size, config.tie_word_embeddings = options.vocab, True
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    ids = torch.randint(options.vocab, (options.batch, options.seq), device=device)
    rows: list[dict[str, Any]] = []
    steps: dict[str, list[tuple[float, float | None]]] = {arm: [] for arm in ARMS}
    norms: dict[str, list[tuple[str, float]]] = {}

    for turn in range(options.rounds + 1):
        for arm, patch in ARMS.items():
            patched = None if patch is None else liger_hw.patch(model, **patch)
            if turn:
                steps[arm] += [train_step(model, optimizer, ids) for _ in range(6)][2:]
            else:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                norms[arm] = [(name, float(p.grad.float().norm())) for name, p in model.named_parameters()]
                worst, name = max((abs(a / b - 1), name) for (name, a), (_, b) in zip(norms[arm], norms["hf"]))
                rows.append({"arm": arm, "loss": float(loss), "worst_gradient_norm": worst, "of": name})
                del loss
                optimizer.zero_grad(set_to_none=True)
            if patched is not None:
                patched.revert()
    for row, seen in zip(rows, steps.values()):
        ms = [1e3 * seconds for seconds, _ in seen]
        row |= {"ms": statistics.median(ms), "low_ms": min(ms), "high_ms": max(ms)}
        row |= {"peak_gib": max((gib for _, gib in seen if gib is not None), default=None)}
    return rows


if __name__ == "__main__":
    sys.exit(main())
