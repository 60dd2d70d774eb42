"""What recorded calls (`runtime/recording.py`) win in a training step that waits for Python: Llamas of two layers.

    python benchmarks/recorded_calls.py --out benchmarks/results/recorded-calls-<device>.json

Three arms take turns in one process, steps of four. Two of them call the launcher alone at every call: once without
any check, which is the least that a launcher takes, and once comparing each call with its declaration.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Callable

import torch

import liger_hw
from liger_hw.bench import report
from liger_hw.runtime import operator
from liger_hw.runtime.launch import NOT_CHECKED, NOT_REPLAYED

ARMS = {"recorded": operator.replay, "launcher": lambda *_: NOT_REPLAYED, "launcher, checked": lambda *_: NOT_CHECKED}
MODELS = {"1024 wide, 2 x 2048 tokens": (1024, 2, 2048), "512 wide, 512 tokens": (512, 1, 512)}


def step_of(hidden: int, batch: int, seq: int, device: torch.device) -> Callable[[], None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": 2, "vocab_size": 32000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).to(device, torch.bfloat16).train()
    ids = torch.randint(0, 32000, (batch, seq), device=device)
    liger_hw.patch(model)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], None], turns: int) -> dict[str, list[float]]:
    """Milliseconds of a step, by arm and turn."""
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    order = list(ARMS)
    gc.disable()
    for turn in range(-2, turns):  # the first two warm up
        for arm in order:
            operator.replay = ARMS[arm]
            step()
            torch.accelerator.synchronize()
            start = time.perf_counter()
            for _ in range(4):
                step()
            torch.accelerator.synchronize()
            if turn >= 0:
                times[arm].append((time.perf_counter() - start) / 4 * 1e3)
        order = order[1:] + order[:1]
    gc.enable()
    operator.replay = ARMS["recorded"]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", default="-", help="JSON file (default: print it)")
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator()
    rows = []
    for name, sizes in MODELS.items():
        times = timed(step_of(*sizes, device), arguments.turns)
        for arm, ms in times.items():
            ratio = statistics.median(one / recorded for one, recorded in zip(ms, times["recorded"]))
            facts = {"median_ms": statistics.median(ms), "least_ms": min(ms), "over_recorded": ratio, "turns": len(ms)}
            rows.append({"model": name, "arm": arm, **facts})
    report.save(arguments.out, {"machine": report.machine(torch.device(device, 0)), "rows": rows})


if __name__ == "__main__":
    main()
