"""`liger-hw models`: what every causal LM family of the installed transformers gets, checked on tiny models.

Builds every causal LM family of transformers tiny, from its configuration class, with random weights; patches it;
compares loss and gradients with the reverted model; prints what was patched, what was left alone and why. Families with
a function of their own are checked through it, on their classes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from dataclasses import asdict
from typing import Any, Iterator

from .. import env
from ..text import StatusLine, first_line, fold, json_text
from . import UsageError, needs
from .arguments import usable_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("families", nargs="*", help="names as in config.model_type (default: all)")
    add("--named", action="store_true", help="only the families with a function of their own")
    add("--device", default="cpu", help="where (default cpu)")
    add("--json", action="store_true", help="one JSON object a family, for machines")


def run(arguments: argparse.Namespace) -> int:
    needs("models", "transformers")
    usable_device("models", arguments.device)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    env.prefer("LIGER_HW_CPU_REFERENCE", True)  # on a CPU too, what is compared is what the kernels compute
    from .. import transformers as public
    from ..transformers import verify
    from ..transformers.models import specs

    rows, screen, jobs = [], StatusLine(), list(_jobs(verify.causal_lms(), arguments.families, arguments.named))
    for number, (family, class_name, named) in enumerate(jobs):
        screen.progress(number, len(jobs), family)
        function = getattr(public, specs()[family].function_name) if named else None
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            try:
                row = verify.check_step(family, class_name, function, classes=named, device=arguments.device)
            except Exception as error:
                row = verify.Row(family, class_name, outcome=verify.WRONG, reason=first_line(error))
        rows.append({**asdict(row), "named": named})
        screen.end()
        print(json_text(rows[-1]) if arguments.json else fold(_line(rows[-1]), " " * 36), flush=True)
    if not arguments.json:
        print(fold(summary(rows)))
    return 1 if any(row["outcome"] == "differs" for row in rows) else 0


def _jobs(classes: dict[str, str], families: list[str], named: bool) -> Iterator[tuple[str, str, bool]]:
    """(family, class, whether through its function) of every check, in order: through functions of their own first."""
    from ..transformers.models import specs

    functions = {name: spec.models[0] for name, spec in specs().items()}
    for name in families:
        if name not in {**classes, **functions}:
            raise UsageError(f"models: transformers has no causal LM family {name!r}; see `liger-hw models --named`")
    for checks, through_function in ((functions, True), ({} if named else classes, False)):
        for name, class_name in checks.items():
            if not families or name in families:
                yield name, class_name, through_function


def _line(row: dict[str, Any]) -> str:
    kind = "function" if row.get("named") else "patch()"
    if row["outcome"] != "verified":
        return f"{row['family']:<26} {kind:<8} {row['outcome']}: {row['reason']}"
    done = ", ".join(f"{kernel} x{n}" for kernel, n in row["patched"].items())
    left = f"; left alone: {len(row['left'])} kinds" if row["left"] else ""
    return f"{row['family']:<26} {kind:<8} verified: {done}{left}"


_NORMS, _LOSSES = {"rms_norm", "layer_norm"}, {"cross_entropy", "fused_linear_cross_entropy"}


def summary(rows: list[dict[str, Any]]) -> str:
    """How many rows of `--json` are verified."""
    verified = [row for row in rows if row["outcome"] == "verified"]
    others = [row for row in rows if not row["named"]]
    calls = [row["calls"].keys() for row in others if row["outcome"] == "verified"]
    both = sum(bool(kernels & _NORMS and kernels & _LOSSES) for kernels in calls)
    named = [row for row in rows if row["named"]]
    return (
        f"{len(verified)} of {len(rows)} verified; {both} of {len(others)} causal LM families with norms and loss on "
        f"kernels; {sum(row['outcome'] == 'verified' for row in named)} of {len(named)} functions"
    )
