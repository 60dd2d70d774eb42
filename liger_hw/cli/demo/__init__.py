"""`liger-hw demo`: the same small Mistral trained twice on real text, before and after one line, and compared.

Exit code 0 when the curves agree within what the dtype's rounding explains (`check.py`), 1 when they do not.
Written to `--out`: losses.png (or losses.csv without matplotlib) and demo.json with every number.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import UsageError
from .._values import dtype_name, positive, torch_dtype, usable_device
from . import train
from .arms import ARMS, Absent, Arm, Leftover, Original, arms_named
from .check import EPS, Verdict, compare
from .train import SIZES, Run

if TYPE_CHECKING:
    import torch

# Triton's interpreter takes 1 to 2 ms a program, so its batch is a few rows.
_INTERPRETED = replace(SIZES["tiny"], batch=1, seq=32, steps=6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--size", choices=tuple(SIZES), help="model and batch (default small; tiny with --interpret)")
    add("--steps", type=positive, help="training steps (default: what --size has)")
    add("--batch", type=positive, help="sequences a step (default: what --size has)")
    add("--seq", type=positive, help="tokens a sequence (default: what --size has)")
    add("--device", help="torch device (default: the GPU if there is one, else cpu)")
    add("--dtype", type=dtype_name, help="fp32 or bf16 (default: bf16 on a GPU, fp32 on the CPU)")
    add("--text", metavar="FILE", help="train on this file (default: Python's own documentation)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default 0)")
    add("--interpret", action="store_true", help="run the real Triton kernels, in Triton's interpreter on the CPU")
    arms = ", ".join(f"{arm.name} ({arm.title})" for arm in ARMS.values())
    against = f"what to train, compared with the first (default hf,liger_hw): {arms}"
    add("--against", default="hf,liger_hw", metavar="ARMS", help=against)
    add(
        "--repeats",
        type=positive,
        default=1,
        help="times every arm is trained, in turn, for steadier timings (default 1)",
    )
    add("--out", default="liger-hw-demo", metavar="DIR", help="where curves and numbers go (default ./liger-hw-demo)")


def run(arguments: argparse.Namespace) -> int:
    for package in ("transformers", "triton" if arguments.interpret else "torch"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"demo: needs {package}, which is not installed; pip install {package}")
    if arguments.interpret and os.environ.get("TRITON_INTERPRET") != "1":
        return _in_interpreter(arguments)
    # OpenMP threads that spin while they wait cost six times the CPU time on a busy two-core machine (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    device = _device(arguments)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if dtype not in EPS:
        raise UsageError("demo: training in fp16 needs a loss scaler, which this demo has not; use fp32 or bf16")
    if arguments.interpret and dtype != "float32":
        raise UsageError("demo: Triton's interpreter is right in fp32, not in bf16; leave --dtype away")
    size = _size(arguments)
    arms = arms_named(arguments.against)
    text = train.to_tokens(train.read_text(arguments.text), size.vocab)
    if text.numel() <= size.seq:
        raise UsageError(f"demo: the text has {text.numel()} tokens, a sequence {size.seq}; give a longer one or --seq")
    out = Path(arguments.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"demo: cannot make --out {out}: {error.strerror}") from None

    from . import report

    text = text.to(device)
    Original()  # refuses a Mistral that is already patched
    context = report.describe(arguments, size, device, dtype)
    print(report.heading(context), file=sys.stderr, flush=True)
    runs: dict[str, list[Run]] = {}
    absent: dict[str, str] = {}
    try:
        for repeat in range(arguments.repeats):
            for arm in arms if repeat % 2 == 0 else reversed(arms):
                if arm.name in absent:
                    continue
                try:
                    done, origins = _train_arm(arm, size, text, arguments.seed, torch_dtype(dtype), device)
                except Absent as reason:
                    absent[arm.name] = str(reason)
                    print(f"{arm.name}: left out, {reason}", file=sys.stderr)
                    continue
                runs.setdefault(arm.name, []).append(done)
                context["kernels"].update(origins)
    except Leftover as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError:
        raise UsageError("demo: out of device memory; try a smaller --batch, --seq or --size") from None
    first = arms[0].name
    if first in absent or len(runs) < 2:
        raise UsageError("demo: nothing to compare with; " + "; ".join(f"{n}: {why}" for n, why in absent.items()))
    verdicts = {name: _worst(runs[first], done, dtype) for name, done in runs.items() if name != first}
    context["absent"] = absent
    written = report.write(out, context, runs, verdicts)
    print(report.as_text(context, runs, verdicts))
    print(f"\nwritten: {', '.join(map(str, written))}")
    return _conclude(verdicts, first)


def _worst(base: list[Run], done: list[Run], dtype: str) -> Verdict:
    """The verdict of the repeat that used most of its allowance."""
    verdicts = [compare(base[0], other, dtype) for other in done]
    return max(verdicts, key=lambda v: (len(v.problems), v.used))


def _conclude(verdicts: dict[str, Verdict], first: str) -> int:
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
    root = str(Path(__file__).parents[3])
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


def _size(arguments: argparse.Namespace) -> train.Size:
    if arguments.interpret and arguments.size in (None, "tiny"):
        size = _INTERPRETED
    else:
        size = SIZES[arguments.size or "small"]
    given = {name: getattr(arguments, name) for name in ("steps", "batch", "seq")}
    return replace(size, **{name: value for name, value in given.items() if value is not None})


def _train_arm(
    arm: Arm,
    size: train.Size,
    text: "torch.Tensor",
    seed: int,
    dtype: "torch.dtype",
    device: "torch.device",
) -> tuple[Run, dict[str, str]]:
    """The arm's run, and where its kernels' configurations came from (empty for an arm that is not ours)."""
    from ... import registry
    from . import report

    registry.invalidate()
    progress = Progress(arm.name, size.steps, size.batch * size.seq)
    with arm.patched(device) as patch:
        done = train.train(
            size, text, seed=seed, dtype=dtype, device=device, attention=arm.attention, on_step=progress.step
        )
        progress.done()
        return done, report.origins(patch) if arm.name == "liger_hw" else {}


class Progress:
    """One line that is rewritten on a terminal; elsewhere a plain line now and then. To standard error."""

    def __init__(self, name: str, steps: int, tokens: int) -> None:
        self.name, self.steps, self.tokens = name, steps, tokens
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
