"""`liger-hw demo`: the same small Mistral trained twice on real text, before and after one line, and compared.

Exit code 0 when the curves agree within what the dtype's rounding explains (`bench/agreement.py`), 1 when they do not.
Written to `--out`: demo.json with every number, and with matplotlib the curves. `liger-hw bench e2e` trains real sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import env
from ..text import fold
from . import UsageError, needs
from .arguments import dtype_name, listed, positive, seed, tokens, usable_device

if TYPE_CHECKING:
    import torch

    from ..bench.agreement import Verdict
    from ..bench.e2e import Schedule

SIZES = {
    "tiny": {"hidden": 64, "layers": 2, "batch": 2, "seq": 48, "steps": 12},
    "small": {"hidden": 192, "layers": 4, "batch": 8, "seq": 128, "steps": 80},
}
INTERPRETED = {"hidden": 64, "layers": 2, "batch": 1, "seq": 32, "steps": 6}
"""The default with --interpret: Triton's interpreter takes a millisecond or two a program."""
ARMS = ("hf", "hf-eager", "liger", "liger_hw")
NOTES = {
    "reference": (
        "This ran on the CPU: liger_hw's cpu backend is torch's reference path, the same mathematics without a Triton "
        "kernel. That the curves agree says something; the speeds say nothing about liger_hw. "
        "`liger-hw demo --interpret` runs the real kernels on the CPU, slowly."
    ),
    "interpreter": "Triton's interpreter checks what the kernels compute. It is slow; the speeds above mean nothing.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--size", choices=SIZES, help="model and batch (default small; with --interpret a few rows of tiny)")
    add("--steps", type=positive, help="training steps (default: what --size has)")
    add("--batch", type=positive, help="sequences a step (default: what --size has)")
    add("--seq", type=tokens, help="tokens a sequence, as 1024 or 1k (default: what --size has)")
    add("--device", help="torch device (default: the GPU if there is one, else cpu)")
    add("--dtype", type=dtype_name, help="fp32 or bf16 (default: bf16 on a GPU, fp32 on the CPU)")
    add("--text", metavar="FILE", help="train on this file (default: Python's own documentation)")
    add("--seed", type=seed, default=0, help="seed of weights and batches (default 0)")
    add("--interpret", action="store_true", help="run the real Triton kernels, in Triton's interpreter on the CPU")
    against = f"what to train; compared with hf, or else the first (default hf,liger_hw): {', '.join(ARMS)}"
    add("--against", type=listed(str, "arms"), default=["hf", "liger_hw"], metavar="ARMS", help=against)
    add("--out", default="liger-hw-demo", metavar="DIR", help="where curves and numbers go (default ./liger-hw-demo)")


def run(arguments: argparse.Namespace) -> int:
    needs("demo", "transformers", *(["triton"] if arguments.interpret else []))
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, which nothing did so far
    # OpenMP threads that spin while they wait take most of a small machine's time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from .. import registry
    from ..bench import agreement, e2e, report
    from ..bench.training import Original

    env.prefer("LIGER_HW_CPU_REFERENCE", True)  # on a CPU too, what is compared is what the kernels compute
    device = _device(arguments)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if dtype not in agreement.EPS:
        raise UsageError("demo: training in fp16 needs a loss scaler, which this demo has not; use fp32 or bf16")
    if arguments.interpret and dtype != "float32":
        raise UsageError("demo: Triton's interpreter is right in fp32, not in bf16; leave --dtype away")
    out, runs = Path(arguments.out), {}
    try:
        schedule = _schedule(arguments, dtype)
        Original("mistral")  # refuses a Mistral that is already patched
        out.mkdir(parents=True, exist_ok=True)
        results = e2e.measure(schedule, device, say=lambda text: print(text, file=sys.stderr), on_run=runs.__setitem__)
    except ValueError as error:
        raise UsageError(f"demo: {error}") from None
    except OSError as error:
        raise UsageError(f"demo: cannot make --out {out}: {error.strerror}") from None
    first = "hf" if "hf" in runs else next(iter(runs), "")
    left_out = {row["arm"]: row["note"] for row in results["runs"] if row["status"] != "ok"}
    if len(runs) < 2 and "liger_hw" not in left_out:
        raise UsageError("demo: nothing to compare with; " + "; ".join(f"{n}: {why}" for n, why in left_out.items()))
    verdicts = {name: agreement.compare(runs[first], one, dtype) for name, one in runs.items() if name != first}
    machine = report.machine(device)
    print(e2e.as_text(results))
    print(fold(f"on {device}: {machine['device']}, torch {machine['torch']}, triton {machine['triton']}"))
    if device.type == "cpu":
        print(fold(NOTES["interpreter" if registry.interpreting() else "reference"]))
    document = {"machine": machine, **results, "verdicts": {name: asdict(one) for name, one in verdicts.items()}}
    report.save(out / "demo.json", document)
    written = [out / "demo.json", *e2e.plots(results, str(out))]
    print(f"written: {', '.join(map(str, written))}")
    return _conclude(verdicts, first, left_out)


def _conclude(verdicts: dict[str, "Verdict"], first: str, left_out: dict[str, str]) -> int:
    """Say whether the curves agree. Only liger_hw's own arm decides the exit code."""
    if "liger_hw" in left_out:
        print(f"FAILED: liger_hw: {left_out['liger_hw']}", file=sys.stderr)
        return 1
    code = 0
    for name, verdict in verdicts.items():
        apart = f"{verdict.difference:.2g} at step {verdict.step + 1} ({verdict.allowance:.2g} allowed)"
        gradient = f"{verdict.grad_difference:.2g} ({verdict.grad_allowance:.2g} allowed)"
        print(fold(f"{name} against {first}: losses differ by {apart}, the first gradients by {gradient}"))
        for problem in verdict.problems:
            print(fold(f"{'FAILED' if name == 'liger_hw' else 'note'}: {name} against {first}: {problem}"))
            code = 1 if name == "liger_hw" else code
    if code == 0 and "liger_hw" in verdicts:
        print(f"OK: liger_hw trains as {first} does, within what rounding explains")
    return code


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


def _schedule(arguments: argparse.Namespace, dtype: str) -> "Schedule":
    """What to train. Raises `UsageError` unless there are two or more different arms, `ValueError` for unknown ones."""
    from ..bench.e2e import Schedule

    arms = arguments.against
    if len(arms) < 2 or len(set(arms)) != len(arms):
        raise UsageError(
            f"demo: --against takes two or more different arms, such as hf,liger_hw; got {','.join(arms)!r}"
        )
    default = INTERPRETED if arguments.interpret else SIZES["small"]
    sizes: dict[str, Any] = dict(SIZES[arguments.size] if arguments.size else default)
    sizes |= {name: one for name in ("steps", "batch", "seq") if (one := getattr(arguments, name)) is not None}
    text = {"text": arguments.text, "seed": arguments.seed}
    return Schedule("mistral", arms=tuple(arms), dtype=dtype, learning_rate=1e-3, **text, **sizes)
