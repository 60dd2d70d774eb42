"""`liger-hw models`: what every causal LM family of the installed transformers gets, checked on tiny models."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any, Iterator

from ..autotune.workers import Worker, WorkerDied, WorkerError, serve
from ..text import StatusLine, fold, json_text
from . import UsageError, needs
from .arguments import seconds, usable_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("families", nargs="*", help="names as in config.model_type (default: all)")
    parser.add_argument("--named", action="store_true", help="only the families with a function of their own")
    parser.add_argument("--device", default="cpu", help="where (default cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON object a family, for machines")
    parser.add_argument("--timeout", type=seconds, default=120.0, help="seconds a family may take (default 120)")
    parser.description = (
        "Builds every causal LM family of transformers tiny, from its configuration class, with random weights;\n"
        "patches it; compares loss and gradients with the reverted model; prints what was patched, what was left\n"
        "alone and why. Families with a function of their own are checked through it, on their classes."
    )


class _Checker(Worker):
    """The process that builds and checks models; a family may crash it or take too long."""

    module = __name__
    SETTINGS = {
        "PYTHONWARNINGS": "ignore",
        "TRANSFORMERS_VERBOSITY": "error",
        "LIGER_HW_CPU_REFERENCE": "1",  # on a CPU too, what is compared is what the kernels compute
    }

    def __init__(self) -> None:
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        super().__init__("models", settings={**self.SETTINGS, **threads})


def run(arguments: argparse.Namespace) -> int:
    needs("models", "transformers")
    usable_device("models", arguments.device)
    rows, screen, checker = [], StatusLine(), _Checker()
    try:
        jobs = list(_jobs(checker.call("list", seconds=arguments.timeout), arguments.families, arguments.named))
        for number, job in enumerate(jobs):
            screen.progress(number, len(jobs), job[0])
            row = dict(zip(("family", "model_class", "named"), job))
            try:
                row |= checker.call("check", *job, arguments.device, seconds=arguments.timeout)
            except (WorkerDied, WorkerError) as error:
                row |= {"outcome": "cannot be built", "reason": f"its process {_brief(error)}"}
                if isinstance(error, WorkerDied):
                    checker = _Checker()
            rows.append(row)
            screen.end()
            print(json_text(row) if arguments.json else fold(_line(row), " " * 36), flush=True)
    except (WorkerDied, WorkerError) as error:
        raise UsageError(
            f"models: transformers cannot be asked for its families: the process {_brief(error)}"
        ) from None
    finally:
        checker.kill()
    if not arguments.json:
        print(fold(summary(rows)))
    return 1 if any(row["outcome"] == "differs" for row in rows) else 0


def _brief(error: Exception) -> str:
    """How a process ended, and its last line of output."""
    first, *more = str(error).splitlines()
    return f"{first.partition(':')[0]}: {more[-1]}" if more else first


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


def main() -> None:
    """What the process of `_Checker` runs."""
    serve(lambda: _answer)


def _answer(call: str, arguments: list[Any]) -> Any:
    """`list`: the families and their classes. `check`: a row."""
    from .. import transformers as public
    from ..transformers import verify
    from ..transformers.models import specs

    if call == "list":
        return verify.causal_lms()
    family, class_name, named, device = arguments
    function = getattr(public, specs()[family].function_name) if named else None
    return asdict(verify.check_step(family, class_name, function, classes=named, device=device))


# -- words -----------------------------------------------------------------------------------------------------------


def _line(row: dict[str, Any]) -> str:
    kind = "function" if row.get("named") else "patch()"
    if row["outcome"] != "verified":
        return f"{row['family']:<26} {kind:<8} {row['outcome']}: {row['reason']}"
    done = ", ".join(f"{kernel} x{n}" for kernel, n in row["patched"].items())
    left = f"; left alone: {len(row['left'])} kinds" if row["left"] else ""
    return f"{row['family']:<26} {kind:<8} verified: {done}{left}"


def summary(rows: list[dict[str, Any]]) -> str:
    """How many rows of `--json` are verified."""
    verified = [row for row in rows if row["outcome"] == "verified"]
    others = [row for row in rows if not row["named"]]
    both = sum(row["outcome"] == "verified" and row["norms"] and row["loss"] for row in others)
    named = [row for row in rows if row["named"]]
    return (
        f"{len(verified)} of {len(rows)} verified; {both} of {len(others)} causal LM families with norms and loss on "
        f"kernels; {sum(row['outcome'] == 'verified' for row in named)} of {len(named)} functions"
    )
