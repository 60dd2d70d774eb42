"""`liger-hw models`: what every causal LM family of the installed transformers gets, checked on tiny models."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
from typing import Any, Iterator

from ..text import StatusLine, fold, json_text
from . import UsageError, needs
from .arguments import seconds, usable_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("families", nargs="*", help="names as in config.model_type (default: all)")
    parser.add_argument("--named", action="store_true", help="only the families with a function of their own")
    parser.add_argument("--device", default="cpu", help="where (default cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON object a family, for machines")
    parser.add_argument("--timeout", type=seconds, default=120.0, help="seconds a family may take (default 120)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.description = (
        "Builds every causal LM family of transformers tiny, from its configuration class, with random weights;\n"
        "patches it; compares loss and gradients with the reverted model; prints what was patched, what was left\n"
        "alone and why. Families with a function of their own are checked through it, on their classes."
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.worker:
        return _work()
    needs("models", "transformers")
    usable_device("models", arguments.device)
    rows = []
    with _Worker(arguments.timeout) as worker:
        jobs = list(_jobs(worker.ask({"list": True}), arguments.families, arguments.named))
        screen = StatusLine()
        for number, job in enumerate(jobs):
            screen.progress(number, len(jobs), job["family"])
            row = worker.ask({**job, "device": arguments.device})
            rows.append(row)
            screen.end()
            print(json_text(row) if arguments.json else fold(_line(row), " " * 36), flush=True)
    if not arguments.json:
        print(fold(summary(rows)))
    return 1 if any(row["outcome"] == "differs" for row in rows) else 0


def _jobs(listed: dict[str, Any], families: list[str], named: bool) -> Iterator[dict[str, Any]]:
    """(family, class, how) of every check, in order: through functions of their own first."""
    from ..transformers.models import specs

    if "classes" not in listed:
        raise UsageError(f"models: transformers cannot be asked for its families: {listed['reason']}")
    known = {**listed["classes"], **{name: spec.models[0] for name, spec in specs().items()}}
    for name in families:
        if name not in known:
            raise UsageError(f"models: transformers has no causal LM family {name!r}; see `liger-hw models --named`")
    for name, spec in specs().items():
        if not families or name in families:
            yield {"family": name, "class": spec.models[0], "named": True}
    if not named:
        for name, class_name in listed["classes"].items():
            if not families or name in families:
                yield {"family": name, "class": class_name, "named": False}


class _Worker:
    """The process that builds and checks models, started anew when a family crashes it or takes too long."""

    def __init__(self, timeout: float) -> None:
        self.timeout, self.process = timeout, None

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The worker's row for a job, or one that says why there is none."""
        if self.process is None or self.process.poll() is not None:
            self.process = _start()
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(self.timeout) else None
        if line:
            return json.loads(line)
        reason = f"took more than {self.timeout:g} s" if line is None else "its process died"
        self.process.kill()
        self.process.wait()
        return {**job, "model_class": job.get("class"), "outcome": "cannot be built", "reason": reason}


def _start() -> subprocess.Popen:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TRANSFORMERS_VERBOSITY": "error",
        "LIGER_HW_CPU_REFERENCE": "1",  # on a CPU too, what is compared is what the kernels compute
    }
    command = [sys.executable, "-W", "ignore", "-m", "liger_hw", "models", "--worker"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def _work() -> int:
    """Jobs from stdin, rows to stdout, one JSON line each; what models print goes nowhere."""
    from .. import transformers as public
    from ..transformers import verify
    from ..transformers.models import specs

    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        job = json.loads(line)
        if "list" in job:
            answers.write(json.dumps({"classes": verify.causal_lms()}) + "\n")
            answers.flush()
            continue
        function = getattr(public, specs()[job["family"]].function_name) if job["named"] else None
        row = verify.check_step(job["family"], job["class"], function, classes=job["named"], device=job["device"])
        answers.write(json.dumps({**row.as_dict(), "named": job["named"]}) + "\n")
        answers.flush()
    return 0


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
    own = [row for row in rows if row["named"]]
    return (
        f"{len(verified)} of {len(rows)} verified; {both} of {len(others)} causal LM families with norms and loss on "
        f"kernels; {sum(row['outcome'] == 'verified' for row in own)} of {len(own)} functions"
    )
