"""One training step of a whole model at long sequences on one GPU: seconds, tokens/s, peak memory, beside the plan's.

    python benchmarks/long_context.py --out FILE.json 16384 65536 524288::documents 524288:4

Each word is TOKENS[:LAYERS[:ATTENTION]]: `causal` attention over the whole sequence (the default), or `documents`,
causal within packed documents of 16384 tokens: the memory of the former and less of its time. Batch 1, bf16, sdpa.

AdamW has its states on the GPU in bf16 and steps each parameter as soon as its gradient is complete, which is freed
then: gradients never exist together. A layer's input waits in pinned host memory for as many layers as --host GiB allow
(level `offload`), the rest are at `tiled`. Nothing else is offloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.nn.functional as F

import liger_hw
from liger_hw.autotune import models
from liger_hw.backends import with_index
from liger_hw.bench import e2e, report, training
from liger_hw.recompute import offload
from liger_hw.recompute.levels import in_words
from liger_hw.recompute.planner import Assumptions, Planner

GIB, DOCUMENT = 1 << 30, 16384
SDPA = F.scaled_dot_product_attention


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="TOKENS[:LAYERS[:ATTENTION]]")
    parser.add_argument("--model", default="llama3", choices=training.MODELS)
    parser.add_argument("--host", type=float, help="GiB of pinned memory (default: four fifths of what is free)")
    parser.add_argument("--hidden", type=int, help="smaller width, for a quick try")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    device = with_index(options.device)
    results: dict[str, Any] = {"options": vars(options), "machine": report.machine(device), "runs": []}
    results["host_gib"] = round(offload.free_host_memory() / GIB, 1)
    model, layers_built = None, 0
    for word in options.runs:
        tokens, layers, attention = (*word.split(":"), "", "")[:3]
        layers = int(layers or training.MODELS[options.model].layers)
        if layers != layers_built:
            model = None
            training.release(device)
            model, layers_built = build(options, layers, device), layers
        row = {"tokens": int(tokens), "layers": layers, "attention": attention or "causal"}
        row |= run(model, row["tokens"], row["attention"], options.host, device)
        results["runs"].append(row)
        print(json.dumps(row), flush=True)
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def build(options: argparse.Namespace, layers: int, device: torch.device) -> Any:
    """The patched model, whose parameters are updated in backward."""
    schedule = e2e.Schedule(model=options.model, layers=layers, batch=1, hidden=options.hidden)
    model = training.build(schedule, device)
    liger_hw.patch(model)
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes the states
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: update(p, optimizer))
    training.release(device)
    return model.train()


def update(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    parameter.grad = None


def run(model: Any, tokens: int, attention: str, host: float | None, device: torch.device) -> dict[str, Any]:
    """One step, or two for short sequences, of which the second counts."""
    config = model.config
    shape = models.from_config(config.to_dict(), "model")
    plan = Planner(shape, 1, tokens, Assumptions(optimizer="sgd"))
    levels = levels_for(shape, tokens, host, device)
    ids = torch.randint(config.vocab_size, (1, tokens), device=device)
    F.scaled_dot_product_attention = by_documents if attention == "documents" else SDPA
    row: dict[str, Any] = {"levels": in_words(levels)}
    try:
        with liger_hw.activations(levels, model):
            if tokens <= 1 << 16:
                step(model, ids)
            row |= step(model, ids)
    except torch.OutOfMemoryError as error:
        row["failure"] = str(error).splitlines()[0][:300]
        for parameter in model.parameters():
            parameter.grad = None
    finally:
        F.scaled_dot_product_attention = SDPA
    states = 2 * sum(p.nbytes for p in model.parameters())
    row["planned_gib"] = round((plan.predict(levels).peak + states) / GIB, 2)  # with all gradients
    if device.type != "cpu":
        row["pinned_gib"] = round(offload.host_memory(device).pinned / GIB, 2)
    training.release(device)
    return row


def levels_for(shape: models.Model, tokens: int, host: float | None, device: torch.device) -> tuple[str, ...]:
    """As many of the first layers at `offload` as the host's memory has room for; none for few tokens."""
    stream = tokens * shape.hidden * 2
    if device.type == "cpu" or shape.layers * stream < 16 * GIB:
        return ("tiled",) * shape.layers
    memory = offload.host_memory(device)
    memory.limit = memory.limit if host is None else int(host * GIB)
    room = memory.limit // (-(-stream // offload.CHUNK) * offload.CHUNK)
    count = min(room, shape.layers - 1)
    began, needed = time.perf_counter(), count * (-(-stream // offload.CHUNK) * offload.CHUNK)
    memory.reserve(needed - memory.pinned)
    print(f"pinned {memory.pinned / GIB:.1f} GiB in {time.perf_counter() - began:.1f} s", flush=True)
    return ("offload",) * count + ("tiled",) * (shape.layers - count)


def step(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    device = ids.device
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None:
        module.synchronize()
        module.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    value = loss.item()
    forward = time.perf_counter() - began
    loss.backward()
    if module is not None:
        module.synchronize()
    seconds = time.perf_counter() - began
    row = {"seconds": round(seconds, 3), "forward_seconds": round(forward, 3), "loss": round(value, 4)}
    row["tokens_per_second"] = round(ids.numel() / seconds, 1)
    if module is not None:
        row["peak_gib"] = round(module.max_memory_allocated() / GIB, 2)
        row["reserved_gib"] = round(module.max_memory_reserved() / GIB, 2)
    return row


def by_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """sdpa of [1, heads, tokens, dim] within documents of DOCUMENT tokens; all but the result are views."""
    if attn_mask is not None or q.shape[2] % DOCUMENT:
        raise ValueError(f"documents: no mask, and a multiple of {DOCUMENT} tokens; got {tuple(q.shape)}")
    q, k, v = (t[0].unflatten(1, (-1, DOCUMENT)).transpose(0, 1) for t in (q, k, v))
    y = SDPA(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return y.transpose(1, 2).reshape(1, -1, y.shape[1], y.shape[3]).transpose(1, 2)


if __name__ == "__main__":
    sys.exit(main())
