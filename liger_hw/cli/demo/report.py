"""What the demo tells: the table, the numbers as JSON, the curves as a picture."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ... import __version__
from .._values import table
from .check import JUDGED_STEPS, Verdict, allowed
from .train import Run, Size

if TYPE_CHECKING:
    import torch


def describe(arguments: argparse.Namespace, size: Size, device: "torch.device", dtype: str) -> dict[str, Any]:
    """What was run on what: the part of demo.json that is known before training."""
    import platform
    from importlib import metadata

    import torch

    from ... import registry
    from ...backends import target_of

    target = target_of(device)
    on_cpu = "interpreter" if registry.interpreting() else "reference"
    return {
        "device": str(device),
        "device_name": _processor() if device.type == "cpu" else target.name,
        "arch": target.arch,
        "backend": target.vendor,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "runs": on_cpu if device.type == "cpu" else "kernels",
        "dtype": dtype,
        "size": arguments.size or ("tiny" if arguments.interpret else "small"),
        "model": asdict(size),
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


def heading(context: dict[str, Any]) -> str:
    model = context["model"]
    return (
        f"liger-hw demo: Mistral {context['size']} ({model['layers']} layers of {model['hidden']}, "
        f"vocabulary {model['vocab']}), {model['steps']} steps of {model['batch']} x {model['seq']} tokens, "
        f"{context['dtype']} on {context['device']} ({context['device_name']})\ntext: {context['text']}"
    )


def origins(patch: Any) -> dict[str, str]:
    """Kernel -> where its configuration came from, for every launch resolved so far and every patched op.

    patch: the report of `apply_liger_kernel_to_mistral`
    """
    from ... import registry

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


def as_text(context: dict[str, Any], runs: dict[str, list[Run]], verdicts: dict[str, Verdict]) -> str:
    """The table a person reads."""
    first = next(iter(runs))
    columns: dict[str, list[str]] = {}
    for name, done in runs.items():
        run, verdict = done[0], verdicts.get(name)
        speed, base = rate(done), rate(runs[first])
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


def _difference(verdict: Verdict) -> str:
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


def rate(done: list[Run]) -> float:
    """Tokens a second of all repeats together: by the median step."""
    return done[0].tokens_per_step / median([s for run in done for s in run.step_seconds])


def write(out: Path, context: dict[str, Any], runs: dict[str, list[Run]], verdicts: dict[str, Verdict]) -> list[Path]:
    """demo.json and the curves; returns what was written."""
    data = {
        **context,
        "arms": {
            name: {
                "tokens_per_second": rate(done),
                "peak_memory": done[0].peak_memory,
                "runs": [asdict(run) for run in done],
                "against_first": asdict(verdicts[name]) if name in verdicts else None,
            }
            for name, done in runs.items()
        },
    }
    numbers = out / "demo.json"
    numbers.write_text(json.dumps(data, indent=1) + "\n")
    try:
        return [numbers, _picture(out / "losses.png", context, runs)]
    except ImportError:
        print("matplotlib is not installed, so the curves are written as CSV (pip install 'liger_hw[bench]')")
    curves = out / "losses.csv"
    with curves.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *runs])
        writer.writerows([i, *losses] for i, losses in enumerate(zip(*(d[0].losses for d in runs.values())), 1))
    return [numbers, curves]


def _picture(path: Path, context: dict[str, Any], runs: dict[str, list[Run]]) -> Path:
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
    figure.savefig(path, dpi=120)
    return path
