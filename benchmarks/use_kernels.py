"""One training step of tiny models through every route of the `kernels` package, and which of our kernels ran.

    python benchmarks/use_kernels.py --out results/hub-<device>.json

A row has the modules that a layer of ours is bound to, the calls of our functions in a step (and on a GPU the launches
of our Triton kernels), and how far loss and gradients are from those of the model before: gradients by their largest
difference, relative to the largest number of each. `floor` is the unpatched model compiled, against itself. Exit
code 1 where nothing of ours ran, or a gradient is further off than rounding explains.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.utils.import_utils as import_utils

import liger_hw
from liger_hw import hub
from liger_hw.backends import with_index
from liger_hw.bench import report
from liger_hw.text import table
from liger_hw.transformers.tiny import tiny_model

WIDTHS = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
ROUTES = (
    ("Llama", "float32", "KernelConfig by hand"),
    ("Llama", "float32", "kernelize"),
    ("Llama", "float32", "kernel_config"),
    ("Llama", "bfloat16", "kernel_config"),
    ("Llama", "bfloat16", "floor"),
    ("Llama", "bfloat16", "compiled"),
    ("Gemma3", "bfloat16", "kernel_config"),
    ("Qwen3", "bfloat16", "kernel_config"),
    ("Qwen3_5", "bfloat16", "kernel_config"),
    ("Qwen3Next", "bfloat16", "kernel_config"),
)
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of a gradient's distance: of few hundred additions in fp32, and of bf16's rounding in every layer."""
OURS = re.compile(r"^_[a-z0-9_]+_kernel$")


def apply(how: str, model: Any) -> Any:
    """The model with our layers, by one of the routes; `floor` and `compiled` are compiled."""
    if how == "KernelConfig by hand":
        layers = {"RMSNorm": f"{hub.REPOSITORY}:RMSNorm", "rotary_pos_emb": f"{hub.REPOSITORY}:RotaryPosEmb"}
        model.set_use_kernels(True, transformers.KernelConfig(layers, use_local_kernel=True))
    elif how == "kernelize":
        import kernels

        with kernels.use_kernel_mapping(hub.kernel_mapping(model)):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    elif how != "floor":
        model.set_use_kernels(True, liger_hw.kernel_config(model))
    return torch.compile(model) if how in ("floor", "compiled") else model


def bound(model: Any) -> dict[str, int]:
    """Layer of ours -> modules, and functions that kernels has made modules of, whose forward it is."""
    modules = list(model.modules())
    modules += [function for module in modules for function in getattr(module, "_kernel_funcs", {}).values()]
    forwards = [getattr(module.forward, "__func__", None) for module in modules]
    ours = [forward for forward in forwards if "liger_hw_torch" in getattr(forward, "__module__", "")]
    return dict(collections.Counter(forward.__qualname__.partition(".")[0] for forward in ours))


def counted_step(model: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Loss and gradients of a step, calls of our functions, launches of our kernels."""
    repository = sys.modules.get("_liger_hw_torch_universal")
    functions = {} if repository is None else {n: f for n, f in vars(repository.layers).items() if n[:6] == "liger_"}
    calls: collections.Counter[str] = collections.Counter()

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return functions[name](*args, **kwargs)

        return call

    if functions and not hasattr(model, "_orig_mod"):  # a compiler would count what it traces
        vars(repository.layers).update({name: counting(name) for name in functions})
    activities = [torch.profiler.ProfilerActivity.CUDA] if tokens.is_cuda else [torch.profiler.ProfilerActivity.CPU]
    try:
        with torch.profiler.profile(activities=activities) as profile:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
    finally:
        if functions:
            vars(repository.layers).update(functions)
    launches = {event.key: event.count for event in profile.key_averages() if OURS.match(event.key)}
    gradients = {name.removeprefix("_orig_mod."): p.grad.float() for name, p in model.named_parameters()}
    model.zero_grad()
    return {"loss": loss.item(), "gradients": gradients, "calls": dict(calls), "launches": launches}


def row_of(family: str, dtype: str, how: str, device: torch.device) -> dict[str, Any]:
    cls = getattr(transformers, f"{family}ForCausalLM")
    tokens = torch.arange(2 * 64, device=device).view(2, 64) % 512
    before = counted_step(tiny_model(cls, **WIDTHS).to(device, getattr(torch, dtype)), tokens)
    model = apply(how, tiny_model(cls, **WIDTHS).to(device, getattr(torch, dtype)))
    torch._dynamo.reset()
    if how in ("floor", "compiled"):
        torch._dynamo.utils.counters.clear()
        counted_step(model, tokens)
    after = counted_step(model, tokens)
    pairs = [(before["gradients"][name], gradient) for name, gradient in after["gradients"].items()]
    apart = max(float((a - b).abs().max() / a.abs().max().clamp(1e-3)) for a, b in pairs)
    row = {"model": family, "dtype": dtype, "how": how, "bound": bound(model)}
    row |= {"calls": after["calls"], "launches": after["launches"], "loss": [before["loss"], after["loss"]]}
    row |= {"gradient_apart": float(f"{apart:.2g}")}
    if how in ("floor", "compiled"):
        row["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    for module in model.modules():  # one object for every model of the family
        for function in getattr(module, "_kernel_funcs", {}).values():
            vars(function).pop("forward", None)
    ran = after["launches"] if tokens.is_cuda else after["calls"] or how == "compiled"
    row["ok"] = apart < LIMITS[dtype] and (how == "floor" or bool(row["bound"] and ran))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="", help="only these, of " + ", ".join(dict.fromkeys(r[0] for r in ROUTES)))
    parser.add_argument("--any-kernels", action="store_true", help="lift transformers' check of the kernels version")
    options = parser.parse_args()
    if options.any_kernels:
        import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17.2", "1.0")
        import_utils.is_kernels_available.cache_clear()
    device = with_index(options.device)
    checked = "its check of kernels lifted" if options.any_kernels else "as it is"
    versions = {
        "transformers": f"{transformers.__version__}, {checked}",
        "kernels": importlib.metadata.version("kernels"),
    }
    results = {"machine": report.machine(device, os.environ.get("LIGER_COMMIT")), "versions": versions, "rows": []}
    for family, dtype, how in ROUTES:
        if options.models and family not in options.models.split(","):
            continue
        if device.type == "cpu" and how == "KernelConfig by hand":
            continue  # transformers refuses it
        results["rows"].append(row_of(family, dtype, how, device))
        if options.out:
            Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    lines = [("model", "dtype", "route", "bound", "calls", "launches", "gradients apart", "")]
    for row in results["rows"]:
        cells = [" ".join(f"{n}:{count}" for n, count in row[key].items()) for key in ("bound", "calls", "launches")]
        verdict = "ok" if row["ok"] else "WRONG"
        lines.append((row["model"], row["dtype"], row["how"], *cells, f"{row['gradient_apart']:.1e}", verdict))
    print(table(lines))
    print(versions)
    return int(not all(row["ok"] for row in results["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
