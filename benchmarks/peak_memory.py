"""Peak memory of forward, backward and optimizer step apart, and tokens/s, of a model trained on one GPU.

    python benchmarks/peak_memory.py OUT.json --model qwen2 --layers 4 --batch 4 --arms hf,liger,liger_hw,liger_hw+keep

Arms are those of `training.py`, of which `liger_hw` recomputes the cheap tensors of the last layer by default.
`liger_hw+keep` keeps everything, `liger_hw+last` names the default (`activations={-1: "cheap"}`), `liger_hw+64` sets
LIGER_HW_LOSS_MEMORY_MIB. The forward's peak is at the loss head: all layers' tensors are alive, and logits come on top.
The first three steps count for memory and not for time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any, Iterator

import torch
from training import MODELS, Schedule, build, patched, read_text, release, to_tokens

from liger_hw import env, transformers


@contextlib.contextmanager
def arm_of(arm: str, family: str, device: torch.device) -> Iterator[None]:
    name, _, setting = arm.partition("+")
    levels = {"last": {-1: "cheap"}, "keep": "keep"}.get(setting)
    if levels is not None:
        with getattr(transformers, f"apply_liger_kernel_to_{family}")(activations=levels):
            yield
        return
    before = env.LIGER_HW_LOSS_MEMORY_MIB
    env.LIGER_HW_LOSS_MEMORY_MIB = int(setting) if setting else before
    try:
        with patched(name, family, device):
            yield
    finally:
        env.LIGER_HW_LOSS_MEMORY_MIB = before


def run(schedule: Schedule, tokens: torch.Tensor, device: torch.device) -> dict[str, Any]:
    release(device)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    model = build(schedule, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(tokens.numel() - schedule.seq, (schedule.steps, schedule.batch), generator=generator)
    columns = torch.arange(schedule.seq, device=device)
    losses, seconds, peaks, kept = [], [], {}, 0

    def peak(name: str) -> None:
        peaks[name] = max(peaks.get(name, 0.0), (torch.cuda.max_memory_allocated() - held) / 2**20)
        torch.cuda.reset_peak_memory_stats()

    for start_of in rows.to(device):
        torch.cuda.synchronize()
        start = time.perf_counter()
        ids = tokens[start_of[:, None] + columns]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        kept = (torch.cuda.memory_allocated() - held) / 2**20
        peak("forward")
        loss.backward()
        peak("backward")
        losses.append(loss.detach())
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        peak("optimizer")
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "first_step": seconds[0],
        "tokens_per_second": schedule.batch * schedule.seq / statistics.median(seconds[3:]),
        "peak_gib": max(peaks.values()) / 1024,
        "peaks_mib": peaks,
        "kept_after_forward_mib": kept,
        "losses": [float(loss) for loss in losses],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--model", choices=MODELS, default="qwen2")
    parser.add_argument("--arms", default="hf,liger,liger_hw,liger_hw+keep")
    for name, default in (("layers", 4), ("batch", 4), ("seq", 4096), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device, shape = torch.device("cuda", 0), MODELS[options.model]
    tokens = to_tokens(read_text(None), shape.vocab).to(device)
    schedule = Schedule(options.model, options.layers, options.batch, options.seq, options.steps)
    found: dict[str, Any] = {"options": vars(options), "torch": torch.__version__, "runs": []}
    found["device"] = torch.cuda.get_device_name()
    for arm in options.arms.split(","):
        try:
            with arm_of(arm, shape.family, device):
                row = {"arm": arm, **run(schedule, tokens, device)}
        except Exception as error:
            row = {"arm": arm, "error": f"{type(error).__name__}: {error}"[:300]}
        release(device)
        found["runs"].append(row)
        print({name: value for name, value in row.items() if name != "losses"}, flush=True)
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
