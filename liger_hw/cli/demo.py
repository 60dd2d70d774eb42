"""`liger-hw demo`: the same small Mistral trained twice on real text, before and after one line, and compared.

Exit code 0 when the curves agree within what the dtype's rounding explains (`bench/agreement.py`), 1 when they do not.
Written to `--out`: losses.png (or losses.csv without matplotlib) and demo.json with every number.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .. import __version__, env, files
from ..text import json_text, table
from . import UsageError, needs
from .arguments import dtype_name, positive, seed, usable_device

if TYPE_CHECKING:
    import torch

    from ..bench.agreement import Verdict
    from ..bench.training import Run, Training

SIZES = ("tiny", "small", "7b-16l")
ARMS = ("hf", "hf-eager", "liger", "liger_hw")


def _training(size: str) -> "Training":
    """The model and batches of a size."""
    from ..bench.training import MODELS, Shape, Training

    if (
        size == "7b-16l"
    ):  # Mistral-7B's layers, sixteen of them: the shape in which the field publishes end-to-end figures
        return Training(MODELS["mistral"], 16, 4, 4096, 30, checkpointing=True, learning_rate=3e-5)
    if size == "tiny":
        return Training(Shape("mistral", 256, 64, 160, 4, 2, head_dim=16), 2, 2, 48, 12, learning_rate=1e-3)
    return Training(Shape("mistral", 256, 192, 512, 6, 2, head_dim=32), 4, 8, 128, 80, learning_rate=1e-3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--size", choices=SIZES, help="model and batch (default small; tiny with --interpret)")
    add("--steps", type=positive, help="training steps (default: what --size has)")
    add("--batch", type=positive, help="sequences a step (default: what --size has)")
    add("--seq", type=positive, help="tokens a sequence (default: what --size has)")
    add("--device", help="torch device (default: the GPU if there is one, else cpu)")
    add("--dtype", type=dtype_name, help="fp32 or bf16 (default: bf16 on a GPU, fp32 on the CPU)")
    add("--text", metavar="FILE", help="train on this file (default: Python's own documentation)")
    add("--seed", type=seed, default=0, help="seed of weights and batches (default 0)")
    add("--interpret", action="store_true", help="run the real Triton kernels, in Triton's interpreter on the CPU")
    against = f"what to train, compared with the first (default hf,liger_hw): {', '.join(ARMS)}"
    add("--against", default="hf,liger_hw", metavar="ARMS", help=against)
    add(
        "--repeats",
        type=positive,
        default=1,
        help="times every arm is trained, in turn, for steadier timings (default 1)",
    )
    add("--out", default="liger-hw-demo", metavar="DIR", help="where curves and numbers go (default ./liger-hw-demo)")


def run(arguments: argparse.Namespace) -> int:
    needs("demo", "transformers", *(["triton"] if arguments.interpret else []))
    if arguments.interpret and os.environ.get("TRITON_INTERPRET") != "1":
        return _in_interpreter(arguments)
    # OpenMP threads that spin while they wait take most of a small machine's time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from ..bench.agreement import EPS
    from ..bench.training import Leftover, Original, read_text, to_tokens

    env.prefer("LIGER_HW_CPU_REFERENCE", True)  # on a CPU too, what is compared is what the kernels compute
    device = _device(arguments)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if dtype not in EPS:
        raise UsageError("demo: training in fp16 needs a loss scaler, which this demo has not; use fp32 or bf16")
    if arguments.interpret and dtype != "float32":
        raise UsageError("demo: Triton's interpreter is right in fp32, not in bf16; leave --dtype away")
    arms = _arms(arguments.against)
    training = _plan(arguments, dtype)
    try:
        tokens = to_tokens(read_text(arguments.text), training.shape.vocab)
        Original("mistral")  # refuses a Mistral that is already patched
    except ValueError as error:
        raise UsageError(f"demo: {error}") from None
    if tokens.numel() <= training.seq:
        raise UsageError(
            f"demo: the text has {tokens.numel()} tokens, a sequence {training.seq}; give a longer one or --seq"
        )
    out = Path(arguments.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"demo: cannot make --out {out}: {error.strerror}") from None
    context = _describe(arguments, training, device)
    print(_heading(context), file=sys.stderr, flush=True)
    try:
        runs = _train_arms(arms, training, tokens.to(device), device, arguments.repeats, context)
    except Leftover as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError:
        raise UsageError("demo: out of device memory; try a smaller --batch, --seq or --size") from None
    first = arms[0]
    absent = context["absent"]
    if first in absent or len(runs) < 2:
        raise UsageError("demo: nothing to compare with; " + "; ".join(f"{n}: {why}" for n, why in absent.items()))
    verdicts = {name: _worst(runs[first], done, dtype) for name, done in runs.items() if name != first}
    written = _write(out, context, runs, verdicts)
    print(_as_text(context, runs, verdicts))
    print(f"\nwritten: {', '.join(map(str, written))}")
    return _conclude(verdicts, first)


def _train_arms(
    arms: list[str],
    training: "Training",
    tokens: "torch.Tensor",
    device: "torch.device",
    repeats: int,
    context: dict[str, Any],
) -> dict[str, list["Run"]]:
    """Every arm's runs; what kernels launched with and why an arm is left out go into `context`."""
    from .. import registry
    from ..bench.peers import Absent
    from ..bench.training import patched, train

    runs: dict[str, list[Run]] = {}
    for repeat in range(repeats):
        for arm in arms if repeat % 2 == 0 else reversed(arms):
            if arm in context["absent"]:
                continue
            registry.invalidate()
            progress = Progress(arm, training.steps)
            try:
                with patched(arm, "mistral", device) as patch:
                    runs.setdefault(arm, []).append(train(arm, training, tokens, device, progress.step))
                    progress.done()
                    if arm == "liger_hw":
                        context["kernels"].update(_origins(patch))
            except Absent as reason:
                context["absent"][arm] = str(reason)
                print(f"{arm}: left out, {reason}", file=sys.stderr)
    return runs


def _worst(base: list["Run"], done: list["Run"], dtype: str) -> "Verdict":
    """The verdict of the repeat that used most of its allowance."""
    from ..bench.agreement import compare

    verdicts = [compare(base[0], other, dtype) for other in done]
    return max(verdicts, key=lambda v: (len(v.problems), v.used))


def _conclude(verdicts: dict[str, "Verdict"], first: str) -> int:
    """Say whether the curves agree. Only liger_hw's own arm decides the exit code."""
    code = 0
    for name, verdict in verdicts.items():
        for problem in verdict.problems:
            print(f"{'FAILED' if name == 'liger_hw' else 'note'}: {name} against {first}: {problem}")
            code = 1 if name == "liger_hw" else code
    if code == 0 and "liger_hw" in verdicts:
        print(f"OK: liger_hw trains as {first} does, within what rounding explains")
    return code


def _in_interpreter(arguments: argparse.Namespace) -> int:
    """The same command in a child process: Triton decides when it is imported whether it interprets."""
    command = [sys.executable, "-m", "liger_hw", "demo"]
    for name, value in vars(arguments).items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command += [f"--{name}", str(value)]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    return subprocess.run(command, env=environment).returncode


def _device(arguments: argparse.Namespace) -> "torch.device":
    import torch

    if arguments.interpret:
        if arguments.device not in (None, "cpu"):
            raise UsageError("demo: --interpret runs on the CPU; leave --device away")
        return torch.device("cpu")
    device = usable_device("demo", arguments.device)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def _plan(arguments: argparse.Namespace, dtype: str) -> "Training":
    """What to train. Triton's interpreter takes a millisecond or two a program, so its default batch is a few rows."""
    size = arguments.size or ("tiny" if arguments.interpret else "small")
    training = replace(_training(size), dtype=dtype, seed=arguments.seed)
    if arguments.interpret and size == "tiny":
        training = replace(training, batch=1, seq=32, steps=6)
    given = {name: getattr(arguments, name) for name in ("steps", "batch", "seq")}
    return replace(training, **{name: value for name, value in given.items() if value is not None})


def _arms(text: str) -> list[str]:
    """`hf,liger_hw` -> names of arms. Raises `UsageError` unless there are two or more different known ones."""
    names = [name.strip().replace("_eager", "-eager") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ARMS:
            raise UsageError(f"demo: unknown arm {name!r} in --against; known: {', '.join(ARMS)}")
    if len(names) < 2 or len(set(names)) != len(names):
        raise UsageError(f"demo: --against takes two or more different arms, such as hf,liger_hw; got {text!r}")
    return names


class Progress:
    """One line that is rewritten on a terminal; elsewhere a plain line now and then. To standard error."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.terminal = sys.stderr.isatty()
        self.every = 0.25 if self.terminal else 5.0  # seconds; reading the loss waits for the device
        self.started = self.shown = time.monotonic()
        self.first: float | None = None

    def step(self, step: int, loss: Any) -> None:
        now = time.monotonic()
        last = step + 1 == self.steps
        if step and not last and now - self.shown < self.every:
            return
        self.shown = now
        value = loss()
        now = time.monotonic()
        if self.first is None:
            self.first = now
        left = (now - self.first) / step * (self.steps - step - 1) if step else float("nan")
        eta = f"{left:4.0f} s left" if step and not last else f"{now - self.started:4.0f} s" if last else ""
        line = f"{self.name:<9} step {step + 1:>4}/{self.steps}  loss {value:7.4f}  {eta}"
        if self.terminal:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.terminal:
            print(file=sys.stderr)


# -- what is told ----------------------------------------------------------------------------------------------------


def _describe(arguments: argparse.Namespace, training: "Training", device: "torch.device") -> dict[str, Any]:
    """What was run on what: the part of demo.json that is known before training."""
    import platform
    from importlib import metadata

    import torch

    from .. import registry
    from ..backends import target_of

    target = target_of(device)
    on_cpu = "interpreter" if registry.interpreting() else "reference"
    return {
        "device": str(device),
        "device_name": _processor() if device.type == "cpu" else target.name,
        "arch": target.arch,
        "backend": target.vendor,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "runs": on_cpu if device.type == "cpu" else "kernels",
        "dtype": training.dtype,
        "size": arguments.size or ("tiny" if arguments.interpret else "small"),
        "model": {**asdict(training.shape), **asdict(training)},
        "text": arguments.text or "pydoc_data.topics (Python's own documentation)",
        "seed": arguments.seed,
        "versions": {
            "liger_hw": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
            **{n: metadata.version(n) for n in ("triton", "liger-kernel") if _installed(n)},
        },
        "kernels": {},
        "absent": {},
    }


def _processor() -> str:
    import platform

    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def _installed(name: str) -> bool:
    from importlib import metadata

    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _heading(context: dict[str, Any]) -> str:
    model = context["model"]
    return (
        f"liger-hw demo: Mistral {context['size']} ({model['layers']} layers of {model['hidden']}, "
        f"vocabulary {model['vocab']}), {model['steps']} steps of {model['batch']} x {model['seq']} tokens, "
        f"{context['dtype']} on {context['device']} ({context['device_name']})\ntext: {context['text']}"
    )


def _origins(patch: Any) -> dict[str, str]:
    """Kernel -> where its configuration came from, for every launch resolved so far and every patched op.

    patch: the report of `apply_liger_kernel_to_mistral`
    """
    from .. import registry

    found: dict[str, str] = {}
    for op in registry.ops().values():
        for tunable in op.tunables:
            sources = set()
            for plan in list(tunable.plans.values()):
                kind = plan.provenance["kind"]
                where = f" from {plan.source}" if plan.source else ""
                sources.add(plan.layer + (f" ({kind})" if kind != plan.layer else "") + where)
            if sources:
                found[tunable.name] = "; ".join(sorted(sources))
    launched = {name.split(".")[0] for name in found}
    for kernel in sorted({row.kernel for row in patch.rows} - launched):
        found[kernel] = "no kernel launched, torch reference"
    return found


def _as_text(context: dict[str, Any], runs: dict[str, list["Run"]], verdicts: dict[str, "Verdict"]) -> str:
    """The table a person reads."""
    from ..bench.agreement import JUDGED_STEPS

    first = next(iter(runs))
    columns: dict[str, list[str]] = {}
    for name, done in runs.items():
        run, verdict = done[0], verdicts.get(name)
        speed, base = _rate(done), _rate(runs[first])
        columns[name] = [
            f"{speed:,.0f}" + (f" ({speed / base - 1:+.1%})" if verdict and context["runs"] == "kernels" else ""),
            "n/a" if run.peak_memory is None else f"{max(r.peak_memory for r in done) / 2**20:,.0f} MiB",
            f"{run.losses[0]:.4f} -> {run.losses[-1]:.4f}",
            _difference(verdict) if verdict else "",
            f"{verdict.grad_difference:.2g} ({verdict.grad_allowance:.2g} allowed)" if verdict else "",
        ]
    memory = "peak resident memory" if context["backend"] == "cpu" else "peak memory"
    loss = ("loss, first -> last", "largest loss difference", "first gradient differs by")
    labels = ["tokens/s (median step)", memory, *loss]
    rows = [["", *columns], *[[label, *(c[i] for c in columns.values())] for i, label in enumerate(labels)]]
    detail = f"{context['threads']} threads" if context["threads"] else context["arch"]
    where = f"{context['device']} ({context['device_name']}, {detail})"
    facts = [["device", where], ["backend", f"{context['backend']}: {_RUNS[context['runs']]}"]]
    facts.append(["versions", ", ".join(f"{name} {value}" for name, value in context["versions"].items())])
    lines = [table(facts, header=False), "", table(rows), "", "launch configurations of liger_hw's kernels"]
    kernels = [[name, source] for name, source in sorted(context["kernels"].items())]
    lines.append(table(kernels or [["(liger_hw was not among the arms)"]], header=False, indent="  "))
    if len(next(iter(runs.values()))[0].losses) > JUDGED_STEPS:
        lines.append(f"\nOnly the first {JUDGED_STEPS} steps are judged; later ones part by training's own chaos.")
    for name, reason in context.get("absent", {}).items():
        lines.append(f"\n{name} was left out: {reason}")
    if note := _NOTES.get(context["runs"]):
        lines.append("\n" + note)
    return "\n".join(lines)


def _difference(verdict: "Verdict") -> str:
    return f"{verdict.difference:.2g} at step {verdict.step + 1} ({verdict.allowance:.2g} allowed)"


_RUNS = {
    "kernels": "Triton kernels",
    "reference": "torch's reference path, no Triton kernel",
    "interpreter": "Triton kernels in Triton's interpreter",
}
_NOTES = {
    "reference": (
        "This ran on the CPU: liger_hw's cpu backend is torch's reference path, the same mathematics without a Triton\n"
        "kernel. That the curves agree says something; the speeds say nothing about liger_hw.\n"
        "`liger-hw demo --interpret` runs the real kernels on the CPU, slowly."
    ),
    "interpreter": "Triton's interpreter checks what the kernels compute. It is slow; the speeds above mean nothing.",
}


def _rate(done: list["Run"]) -> float:
    """Tokens a second of all repeats together: by the median step, or the first where there are no more."""
    seconds = [s for run in done for s in run.step_seconds] or [run.first_step_seconds for run in done]
    return done[0].tokens_per_step / median(seconds)


def _write(
    out: Path, context: dict[str, Any], runs: dict[str, list["Run"]], verdicts: dict[str, "Verdict"]
) -> list[Path]:
    """demo.json and the curves; returns what was written."""
    data = {
        **context,
        "arms": {
            name: {
                "tokens_per_second": _rate(done),
                "peak_memory": done[0].peak_memory,
                "runs": [asdict(run) for run in done],
                "against_first": asdict(verdicts[name]) if name in verdicts else None,
            }
            for name, done in runs.items()
        },
    }
    numbers = out / "demo.json"
    files.write_text(numbers, json_text(data, indent=1) + "\n")
    try:
        return [numbers, _picture(out / "losses.png", context, runs)]
    except ImportError:
        print("matplotlib is not installed, so the curves are written as CSV (pip install 'liger_hw[bench]')")
    curves = out / "losses.csv"
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", *runs])
    writer.writerows([i, *losses] for i, losses in enumerate(zip(*(d[0].losses for d in runs.values())), 1))
    files.write_text(curves, text.getvalue())
    return [numbers, curves]


def _picture(path: Path, context: dict[str, Any], runs: dict[str, list["Run"]]) -> Path:
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ..bench.agreement import JUDGED_STEPS, allowed

    first, *others = runs
    base = runs[first][0].losses
    steps = range(1, len(base) + 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for name, style in zip(runs, ("-", "--", ":", "-.")):
        top.plot(steps, runs[name][0].losses, style, label=name, linewidth=2.4 if name == first else 1.6)
    top.set_ylabel("training loss")
    top.legend()
    model = context["model"]
    top.set_title(
        f"Mistral {context['size']}, {context['dtype']}, {context['device_name']} ({_RUNS[context['runs']]}), "
        f"{model['batch']} x {model['seq']} tokens a step",
        fontsize=10,
    )
    judged = range(min(len(base), JUDGED_STEPS))
    limits = [allowed(context["dtype"], t, base[t]) for t in judged]
    bottom.plot([t + 1 for t in judged], limits, color="grey", label="explained by rounding")
    for name in others:
        gaps = [abs(a - b) for a, b in zip(base, runs[name][0].losses)]
        bottom.plot(steps, [gap or float("nan") for gap in gaps], ".", markersize=4, label=f"{name} - {first}")
    bottom.set_yscale("log")
    bottom.set_ylabel("loss difference")
    bottom.set_xlabel("step (a missing point is no difference at all)")
    bottom.legend(fontsize=8)
    files.write_figure(path, figure, 120)
    return path
