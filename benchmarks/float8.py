"""Training in FP8 against bf16: tokens a second, memory, and whether the loss is the same.

    python benchmarks/float8.py --out speed.json                              Llama-3-8B's layers, 2 x 4096 tokens
    python benchmarks/float8.py --model qwen3 --layers 6 --arms bf16 rowwise torchao
    python benchmarks/float8.py --lora --arms bf16 rowwise                    adapters on a frozen model
    python benchmarks/float8.py --ops --out ops.json                          each operator against its copy floor
    python benchmarks/float8.py --convergence --out curves.json               1,000 steps of 87M parameters, three seeds

Arms: `bf16` is liger_hw's patch alone, `rowwise` and `tensorwise` the patch with `liger_hw.float8`, `kept` rowwise with
frozen weights kept in FP8 (for --lora), `torchao` and
`torchao-compiled` torchao's rowwise training on the patched model, `te` the linears of TransformerEngine. An arm whose
package does not import is listed with the reason.

--convergence trains a model on Python's own standard library, byte by byte, in bf16 and in FP8 from the same weights on
the same batches, for each seed, all runs at the same time in processes of their own. The last twentieth of the text is
for evaluation. What is printed is the loss of the arms and its spread over the seeds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, Iterator

import torch
from activations import train_step

import liger_hw
from liger_hw.backends import with_index
from liger_hw.bench import report, training
from liger_hw.text import first_line, table

ARMS = ("bf16", "rowwise", "tensorwise", "kept", "torchao", "torchao-compiled", "te")
EVERY = 50
"""Steps between losses that a run keeps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3", choices=training.MODELS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, help="default: 8, of a convergence run 1000")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, help="default: bf16 rowwise tensorwise, with --convergence two"
    )
    parser.add_argument("--lora", action="store_true", help="rank 16 on all linears (peft)")
    parser.add_argument("--hidden", type=int, help="smaller width, for a quick try")
    parser.add_argument("--ops", action="store_true")
    parser.add_argument("--convergence", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--run", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
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
    measure = _convergence if options.convergence else _ops if options.ops else _speed
    results |= measure(options)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))
    return 0


# -- arms ------------------------------------------------------------------------------------------------------------


def prepare(model: torch.nn.Module, arm: str, smallest: int) -> None:
    """Change the linears of a patched model to an arm's. Raises `ImportError` where its package is not there."""
    if arm in ("rowwise", "tensorwise"):
        liger_hw.float8(model, arm, smallest=smallest)
    elif arm == "kept":
        liger_hw.float8(model, smallest=smallest, keep_frozen=True)
    elif arm.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise")
        fits = lambda module, path: "lm_head" not in path and "lora" not in path  # noqa: E731
        convert_to_float8_training(model, config=config, module_filter_fn=fits)
        if arm == "torchao-compiled":
            for layer in model.get_submodule("model.layers"):
                layer.compile()
    elif arm == "te":
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        for layer in model.get_submodule("model.layers"):
            linears = [(n, m) for n, m in layer.named_modules() if type(m) is torch.nn.Linear]
            for name, linear in linears:
                twin = te.Linear(
                    linear.in_features, linear.out_features, linear.bias is not None, params_dtype=linear.weight.dtype
                )
                twin.weight = linear.weight
                layer.set_submodule(name, twin)
        model.forward = te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling())(model.forward)


# -- speed -----------------------------------------------------------------------------------------------------------


def _speed(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for arm in options.arms or ("bf16", "rowwise", "tensorwise"):
        try:
            rows.append({"arm": arm, **_time(arm, options)})
        except (ImportError, RuntimeError, ValueError) as error:
            rows.append({"arm": arm, "absent": first_line(error)})
        gc.collect()
        if options.device != "cpu":
            torch.get_device_module(options.device).empty_cache()
        print(json.dumps(rows[-1]), flush=True)
    base = next((row["tokens_per_second"] for row in rows if row["arm"] == "bf16" and "absent" not in row), None)
    lines = [("arm", "tokens/s", "of bf16", "peak GiB", "loss")]
    for row in rows:
        if "absent" in row:
            lines.append((row["arm"], row["absent"][:60], "", "", ""))
        else:
            share = f"{row['tokens_per_second'] / base:.2f}x" if base else ""
            peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
            lines.append((row["arm"], f"{row['tokens_per_second']:.0f}", share, peak, f"{row['loss']:.3f}"))
    print(table(lines))
    return {"rows": rows}


def _time(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: steps of AdamW in bf16 on random tokens, the first three not counted."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    schedule = training.Schedule(
        model=options.model, layers=options.layers, batch=options.batch, seq=options.seq, hidden=options.hidden
    )
    device = with_index(options.device)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            training.config(schedule), dtype=torch.bfloat16, attn_implementation=schedule.shape.attention
        )
    if options.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    liger_hw.patch(model)
    prepare(model, arm, 16 if options.hidden else 512)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-5, fused=device.type != "cpu")
    generator = torch.Generator(device).manual_seed(0)
    size = (options.batch, options.seq)
    ids = torch.randint(schedule.shape.vocab, size, generator=generator, device=device)
    seen = [train_step(model, optimizer, ids) for _ in range(3 + (options.steps or 8))][3:]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids, use_cache=False).loss)
    return {
        "tokens_per_second": round(ids.numel() / statistics.median(seconds for seconds, _ in seen), 1),
        "peak_gib": None if seen[0][1] is None else round(max(gib for _, gib in seen), 2),
        "loss": loss,
        "seconds": [round(seconds, 5) for seconds, _ in seen],
    }


# -- operators -------------------------------------------------------------------------------------------------------


def _ops(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each operator at Llama-3-8B's sizes, in a CUDA graph over inputs that L2 does not hold, beside a
    copy of as many bytes; and the FP8 products beside the fastest one."""
    from liger_hw.kernels.float8 import fused_add_rms_norm_float8, layer_norm_float8, rms_norm_float8, swiglu_float8
    from liger_hw.kernels.float8.float8_linear import product
    from liger_hw.kernels.float8.formats import E4M3
    from liger_hw.kernels.float8.quantize_float8 import float8_rows, float8_transposed, quantized

    device, m, n, wide = with_index(options.device), options.batch * options.seq, 4096, 14336

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

    source = drawn(1 << 28)
    into = torch.empty_like(source)
    bytes_per_us = 4 * source.numel() / microseconds(into.copy_, [(source,)])
    del source, into
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
    lines, rows = [("operator", "us", "copy floor, us", "share of it")], []
    for name, (call, make, size) in calls.items():
        sets = [make() for _ in range(4)]
        us, floor = microseconds(call, sets), size * sets[0][0].numel() / bytes_per_us
        rows.append({"operator": name, "us": us, "floor_us": floor})
        lines.append((name, f"{us:.1f}", f"{floor:.1f}", f"{floor / us:.0%}"))
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

    device, steps, hidden = with_index(options.device), options.steps or 1000, options.hidden or 768
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=12 if hidden > 256 else 2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=512,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    liger_hw.patch(model)
    prepare(model, arm, 64)
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
    began, arms = time.perf_counter(), options.arms or ("bf16", "rowwise")
    command = [sys.executable, __file__, "--device", options.device, "--steps", str(options.steps or 1000)]
    command += ["--hidden", str(options.hidden)] if options.hidden else []
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
