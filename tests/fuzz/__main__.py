"""Fuzz tests: random attempts to crash, hang, delete or mislead, for a fixed time.

    python -m tests.fuzz --seconds 600 --seed 7              every area, an equal share of the time each
    python -m tests.fuzz --areas store --attempt 123 --seed 7     one attempt again, with its traceback

An area is a module of this folder with `attempt(chance, folder) -> str`: one attempt, drawn from `chance` only, that
may write in `folder`. It returns its outcome in a few words, and raises for a finding. Attempts run in another process;
one that dies or takes longer than `SECONDS` of its module is a finding too. The cause of a finding is fixed, and the
finding becomes an ordinary test.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import random
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
AREAS = ("store", "configurations", "numerics", "api", "processes", "patching", "command_line")
INTERPRETED = ("configurations", "numerics")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="time for all areas together (default 600)")
    parser.add_argument("--seed", type=int, default=None, help="of every attempt (default: drawn, and printed)")
    parser.add_argument("--areas", default=",".join(AREAS), help=f"which, joined by commas (default {','.join(AREAS)})")
    parser.add_argument("--attempt", type=int, help="this attempt of one area alone, in this process")
    parser.add_argument("--json", metavar="FILE", help="write attempts and findings as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    areas = arguments.areas.split(",")
    if unknown := sorted(set(areas) - set(AREAS)):
        parser.error(f"unknown areas {', '.join(unknown)}; known: {', '.join(AREAS)}")
    if arguments.worker:
        return work(areas[0], arguments.seed, arguments.attempt, arguments.seconds)
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    if arguments.attempt is not None:
        prepare(areas[0])
        print(once(areas[0], seed, arguments.attempt))
        return 0
    print(f"seed {seed}, {arguments.seconds:g} seconds for {', '.join(areas)}", flush=True)
    found: dict[str, Any] = {}
    report = Report(arguments.json)
    for area in areas:
        run(area, seed, arguments.seconds / len(areas), found, lambda: report.save({"seed": seed, "areas": found}))
    report.save({"seed": seed, "areas": found}, finished=True)
    failed = sum(len(area["findings"]) for area in found.values())
    print(f"{sum(area['attempts'] for area in found.values())} attempts, {failed} findings (seed {seed})")
    return 1 if failed else 0


def versions() -> dict[str, Any]:
    import platform

    import torch
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


class Report:
    """The JSON file of one run, if any, replaced every few seconds so that an interrupted run leaves figures."""

    def __init__(self, path: str | None) -> None:
        self.path, self.head = path and Path(path), versions() if path else {}
        self.began, self.written = time.monotonic(), 0.0

    def save(self, found: dict[str, Any], finished: bool = False) -> None:
        now = time.monotonic()
        if self.path and (finished or now - self.written > 2.0):
            self.written, took = now, round(now - self.began, 1)
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps({**self.head, "finished": finished, "took": took, **found}, indent=1) + "\n")
            fresh.replace(self.path)


def run(
    area: str, seed: int, seconds: float, found: dict[str, Any] | None = None, save: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Attempts of one area for `seconds`, in worker processes: their number, outcomes and findings.

    found: gets these under the area's name; save: called after each attempt
    """
    outcomes: collections.Counter[str] = collections.Counter()
    findings: list[dict[str, Any]] = []
    limit = importlib.import_module(f"tests.fuzz.{area}").SECONDS
    end, number = time.monotonic() + seconds, 0
    result = {"attempts": 0, "outcomes": outcomes, "findings": findings}
    if found is not None:
        found[area] = result
    while time.monotonic() < end:
        for event in worker_events(area, seed, number, end - time.monotonic(), limit):
            number = result["attempts"] = event["attempt"] + 1
            save()
            if "outcome" in event:
                outcomes[event["outcome"]] += 1
                continue
            findings.append(event)
            if len(findings) <= 20:
                print(f"  {area} {event['attempt']}: {event['finding'].strip().splitlines()[-1][:700]}", flush=True)
    print(f"{area}: {number} attempts, {len(findings)} findings; {dict(outcomes.most_common(8))}", flush=True)
    return result


def worker_events(area: str, seed: int, first: int, seconds: float, limit: float) -> Iterator[dict[str, Any]]:
    """The worker's report of each attempt, and a finding if the worker died or hung."""
    command = [sys.executable, "-m", "tests.fuzz", "--worker", "--areas", area, "--seed", str(seed)]
    command += ["--attempt", str(first), "--seconds", str(seconds)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LIGER_HW_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if area in INTERPRETED and not environment.get("FUZZ_DEVICE"):
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryFile() as errors:
        worker = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        current, line = None, b""
        lines = lines_of(worker.stdout.fileno(), lambda: limit + (60 if current is None else 5))
        try:
            for line in lines:
                if line == b"hang":
                    break
                event = json.loads(line)
                if "begun" in event:
                    current = event["begun"]
                else:
                    current = None
                    yield event
            died = line != b"hang" and (worker.wait() != 0 or current is not None)
            if line == b"hang" or died:
                errors.seek(0)
                said = errors.read()[-2000:].decode(errors="replace")
                what = f"took more than {limit} s" if line == b"hang" else f"the process ended with {worker.returncode}"
                yield {"attempt": first if current is None else current, "finding": f"{said}\n{what}"}
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            worker.stdout.close()


def lines_of(stream: int, patience: Callable[[], float]) -> Iterator[bytes]:
    """Whole lines of a pipe, ended by `hang` if none comes within `patience()` seconds."""
    text = b""
    while True:
        if not select.select([stream], [], [], patience())[0]:
            yield b"hang"
            return
        if not (more := os.read(stream, 65536)):
            return
        *lines, text = (text + more).split(b"\n")
        yield from lines


def work(area: str, seed: int, number: int, seconds: float) -> int:
    """In a worker: attempts from `number` on, announced and reported on a copy of standard output."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    prepare(area)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print(json.dumps({"begun": number}), file=report, flush=True)
        try:
            event = {"attempt": number, "outcome": once(area, seed, number)}
        except Exception:
            event = {"attempt": number, "finding": traceback.format_exc(limit=-12)}
        print(json.dumps(event), file=report, flush=True)
        number += 1
    report.close()
    os._exit(0)  # without clean-up, which could fail after an interrupted attempt


def prepare(area: str) -> None:
    """Use an empty home folder."""
    home = tempfile.mkdtemp(prefix="liger_hw-fuzz-")
    os.environ.update(HOME=home, XDG_CACHE_HOME=f"{home}/cache", HF_HUB_OFFLINE="1")
    import logging

    logging.disable(logging.CRITICAL)
    importlib.import_module(f"tests.fuzz.{area}")


def once(area: str, seed: int, number: int) -> str:
    """One attempt, the same for the same seed and number."""
    with tempfile.TemporaryDirectory(prefix="liger_hw-fuzz-") as folder:
        module = importlib.import_module(f"tests.fuzz.{area}")
        return module.attempt(random.Random(f"{seed} {area} {number}"), Path(folder))


if __name__ == "__main__":
    sys.exit(main())
