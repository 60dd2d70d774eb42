"""What `end_to_end.py` does not show of training in FP8: its operators, where a step goes, whether the loss is
the same.

    python benchmarks/float8.py --ops --out ops.json              each operator against a copy of as many bytes
    python benchmarks/float8.py --step --out step.json            kernels of a step of Llama-3-8B (--layers) in FP8
    python benchmarks/float8.py --convergence --out curves.json   1,000 steps of 125M parameters, three seeds

--convergence trains a model on Python's own standard library, byte by byte, in bf16 and in FP8 from the same weights on
the same batches, for each seed, all runs at the same time in processes of their own. The last twentieth of the text is
for evaluation. What is printed is the loss of the arms and its spread over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, Iterator

import torch
import training

import liger_hw
from liger_hw.autotune.clock import Clock
from liger_hw.backends import with_index
from liger_hw.bench import report
from liger_hw.text import table

ARMS = ("bf16", "rowwise", "tensorwise")
EVERY = 50
"""Steps between losses that a run keeps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ops", action="store_true")
    what.add_argument("--step", action="store_true")
    what.add_argument("--convergence", action="store_true")
    what.add_argument("--run", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=8192, help="of the operators")
    parser.add_argument("--layers", type=int, default=32, help="of the step")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=("bf16", "rowwise"))
    parser.add_argument("--hidden", type=int, default=1024, help="smaller width, for a quick try")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.run:
        arm, seed = options.run
        print(json.dumps(list(_curve(arm, int(seed), options))))
        return 0
    results: dict[str, Any] = {
        "options": vars(options),
        "machine": report.machine(with_index(options.device), os.environ.get("LIGER_COMMIT")),
    }
    results |= (_ops if options.ops else _step if options.step else _convergence)(options)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))
    return 0


# -- operators -------------------------------------------------------------------------------------------------------


def _ops(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each operator at Llama-3-8B's sizes, in a CUDA graph over inputs that L2 does not hold, beside
    torch's elementwise kernel of as many bytes in the same way, and beside a large copy's rate, which a small one has
    not; and the FP8 products beside the fastest one."""
    from liger_hw.kernels.float8 import fused_add_rms_norm_float8, layer_norm_float8, rms_norm_float8, swiglu_float8
    from liger_hw.kernels.float8.float8_linear import product
    from liger_hw.kernels.float8.formats import E4M3
    from liger_hw.kernels.float8.quantize_float8 import float8_rows, float8_transposed, quantized

    device, m, n, wide = with_index(options.device), options.tokens, 4096, 14336

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def microseconds(call: Any, sets: list[tuple]) -> float:
        for arguments in sets:
            call(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [call(*arguments) for arguments in sets]  # held, or they would share memory that L2 keeps
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / 5 / len(sets))
        del outputs
        return statistics.median(times)

    def elementwise(n_bytes: int) -> float:
        sets = [tuple(torch.zeros(n_bytes // 4, device=device, dtype=torch.bfloat16) for _ in "xy") for _ in range(4)]
        return microseconds(lambda x, y: torch.neg(x, out=y), sets)

    bytes_per_us = 1e3 * Clock(device).copy_rate()  # outside a graph, whose copies take another way at half the rate
    w, one = drawn(n), torch.ones(1, device=device)
    norm, add = rms_norm_float8.rms_norm_float8_rows, fused_add_rms_norm_float8.fused_add_rms_norm_float8_rows
    calls: dict[str, tuple[Any, Any, float]] = {  # what it is -> the call, its inputs, bytes an element of x
        "quantize rows, 4096": (lambda x: float8_rows(x, E4M3), lambda: (drawn(m, n),), 3),
        "quantize rows, 14336": (lambda x: float8_rows(x, E4M3), lambda: (drawn(m, wide),), 3),
        "quantize tensor, 4096": (lambda x: quantized(x, E4M3, False), lambda: (drawn(m, n),), 5),
        "transpose FP8, 4096": (
            lambda q: float8_transposed(q, None, E4M3), lambda: (float8_rows(drawn(m, n), E4M3)[0],), 2,
        ),
        "transpose a weight, 4096 -> 14336": (lambda x: float8_transposed(x, one, E4M3), lambda: (drawn(wide, n),), 3),
        "swiglu_float8, 14336": (swiglu_float8.GATE.rows, lambda: (drawn(m, wide), drawn(m, wide)), 5),
        "rms_norm_float8, 4096": (lambda x: norm(x, w, 1e-5, 0.0, 0), lambda: (drawn(m, n),), 3),
        "fused_add_rms_norm_float8, 4096": (
            lambda x, r: add(x, r, w, 1e-5, 0.0, 0), lambda: (drawn(m, n), drawn(m, n)), 7,
        ),
        "layer_norm_float8, 4096": (
            lambda x: layer_norm_float8.layer_norm_float8_rows(x, w, w, 1e-5), lambda: (drawn(m, n),), 3,
        ),
    }  # fmt: skip
    lines, rows = [("operator", "us", "torch.neg of as many bytes, us", "share of it", "of a copy's rate")], []
    for name, (call, make, size) in calls.items():
        sets = [make() for _ in range(4)]
        us, n_bytes = microseconds(call, sets), size * sets[0][0].numel()
        del sets
        floor, rate = elementwise(n_bytes), n_bytes / us / bytes_per_us
        rows.append({"operator": name, "us": us, "floor_us": floor, "share_of_copy_rate": rate})
        lines.append((name, f"{us:.1f}", f"{floor:.1f}", f"{floor / us:.0%}", f"{rate:.0%}"))
    print(table(lines))
    lines, products = [("product m x k x n", "scales", "TFLOP/s", "of the fastest")], []
    for k, n_out in ((8192, 8192), (n, n), (n, 1024), (n, wide), (wide, n)):
        for rowwise in (True, False):
            a, b = (quantized(drawn(size, k), E4M3, rowwise) for size in (m, n_out))
            us = microseconds(product, [(a.data, b.data, a.scale, b.scale, rowwise)] * 4)
            products.append({"sizes": (m, k, n_out), "rowwise": rowwise, "tflops": 2e-6 * m * k * n_out / us})
    fastest = max(row["tflops"] for row in products)
    for row in products:
        scales = "rows" if row["rowwise"] else "tensor"
        size, share = " x ".join(map(str, row["sizes"])), row["tflops"] / fastest
        lines.append((size, scales, f"{row['tflops']:.0f}", f"{share:.0%}"))
    print(table(lines))
    return {"operators": rows, "products": products, "copy_bytes_per_us": bytes_per_us}


# -- a step ----------------------------------------------------------------------------------------------------------

PARTS = {
    "FP8 products": "_qqtst_",
    "attention": "sdpa|cudnn::fusion",
    "AdamW": "FusedOpti",
    "the head": "nvjet_sm90_tst_",
    "quantising, with transposed copies": "_float8_",
}
"""Part of a step -> what names of its kernels contain on Hopper, with torch 2.11. Only the head multiplies in bf16."""


def parts(step: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each of `PARTS`, and of the rest. step: `ms`, and `kernels` with `kernel` and `ms` of each."""
    ms = {
        name: sum(row["ms"] for row in step["kernels"] if re.search(text, row["kernel"]))
        for name, text in PARTS.items()
    }
    return ms | {"the rest": step["ms"] - sum(ms.values())}


def _step(options: argparse.Namespace) -> dict[str, Any]:
    """The kernels of one step of 2 x 4096 tokens, `rowwise`, AdamW in bf16, the last of eight."""
    device, schedule = with_index(options.device), training.Schedule("llama3", options.layers, 2, steps=8)
    tokens = training.to_tokens(training.read_text(None), schedule.shape.vocab).to(device)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def on_step(step: int, loss: Any) -> None:
        if step >= schedule.steps - 2:
            torch.cuda.synchronize(device)
            (profile.start if step == schedule.steps - 2 else profile.stop)()

    with training.patched("float8", schedule.shape.family, device):
        run = training.train("float8", schedule, tokens, device, on_step)
    kernels: dict[str, dict[str, Any]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            row = kernels.setdefault(event.name, {"kernel": event.name, "launches": 0, "ms": 0.0})
            row["launches"] += 1
            row["ms"] += event.device_time / 1e3
    rows = sorted(kernels.values(), key=lambda row: -row["ms"])
    step = {"ms": 1e3 * statistics.median(run.step_seconds), "kernels": rows}
    print(table([("what", "ms"), *((name, f"{ms:.0f}") for name, ms in parts(step).items())]))
    return {"step": step}


# -- convergence -----------------------------------------------------------------------------------------------------


def _text(most: int = 16 << 20) -> torch.Tensor:
    """The sources of Python's standard library, in an order that does not depend on the machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts and "test" not in p.parts)
    random.Random(0).shuffle(files)
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) > most:
            break
    return training.to_tokens(bytes(text), 256)


def _curve(arm: str, seed: int, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Train one model; yields the step, the mean training loss since the last one, and the evaluation loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device, steps, hidden = with_index(options.device), options.steps, options.hidden
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=10 if hidden > 256 else 2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=512,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    liger_hw.patch(model)
    if arm != "bf16":
        liger_hw.float8(model, arm, smallest=64)
    tokens = _text().to(device)
    n_train, length = tokens.numel() * 19 // 20, 512
    batch = 8 if hidden > 256 else 2
    generator = torch.Generator().manual_seed(seed)
    master = [p.detach().float() for p in model.parameters()]  # bf16 weights lose the last updates of a schedule
    optimizer = torch.optim.AdamW(master, 1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def windows(begin: int, end: int, source: torch.Generator) -> torch.Tensor:
        starts = torch.randint(begin, end - length, (batch,), generator=source)
        return torch.stack([tokens[s : s + length] for s in starts.tolist()])

    losses = []
    for step in range(1, steps + 1):
        warm = min(1.0, step / (steps / 20))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warm * (1 - 0.9 * step / steps)
        ids = windows(0, n_train, generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for one, p in zip(master, model.parameters()):
            one.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), master)
        losses.append(loss.detach())
        if step % EVERY == 0 or step == steps:
            source = torch.Generator().manual_seed(1)
            with torch.no_grad():
                held_out = [windows(n_train, tokens.numel(), source) for _ in range(8)]
                evaluated = torch.stack([model(input_ids=ids, labels=ids).loss for ids in held_out]).mean()
            yield {"step": step, "train": float(torch.stack(losses).mean()), "eval": float(evaluated)}
            losses.clear()


def _convergence(options: argparse.Namespace) -> dict[str, Any]:
    began, arms = time.perf_counter(), options.arms
    command = [sys.executable, __file__, "--device", options.device]
    command += ["--steps", str(options.steps), "--hidden", str(options.hidden)]
    runs = [(arm, seed) for arm in arms for seed in range(options.seeds)]
    workers = [
        subprocess.Popen([*command, "--run", arm, str(seed)], stdout=subprocess.PIPE, text=True) for arm, seed in runs
    ]
    curves: dict[str, list[list[dict[str, float]]]] = {arm: [] for arm in arms}
    for (arm, seed), worker in zip(runs, workers):
        text, _ = worker.communicate()
        if worker.returncode:
            raise SystemExit(f"{arm}, seed {seed}: status {worker.returncode}")
        curves[arm].append(json.loads(text.splitlines()[-1]))
    lines = [("arm", "eval loss, mean of seeds", "spread (max - min)", "train loss")]
    finals = {arm: [curve[-1]["eval"] for curve in of_seeds] for arm, of_seeds in curves.items()}
    for arm, losses in finals.items():
        train = statistics.mean(curve[-1]["train"] for curve in curves[arm])
        lines.append((arm, f"{statistics.mean(losses):.4f}", f"{max(losses) - min(losses):.4f}", f"{train:.4f}"))
    print(table(lines))
    apart = {
        arm: [round(b - a, 5) for a, b in zip(finals[arms[0]], losses)]
        for arm, losses in finals.items()
        if arm != arms[0]
    }
    for arm, differences in apart.items():
        print(f"{arm} - {arms[0]}, seed by seed: {', '.join(f'{d:+.4f}' for d in differences)}")
    print(f"{time.perf_counter() - began:.0f} s")
    return {"curves": curves, "differences": apart}


if __name__ == "__main__":
    sys.exit(main())
