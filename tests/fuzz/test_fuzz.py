"""Each fuzzer works: a few attempts of every area, always the same ones. `bash ci/test.sh fuzz` is the lane."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz import __main__ as fuzz


@pytest.mark.daily(area="store")
@pytest.mark.parametrize("area", fuzz.AREAS)
def test_an_area_finds_nothing_in_its_first_attempts(area):
    assert fuzz.run(area, seed=0, seconds=2.0)["findings"] == []


@pytest.mark.parametrize(
    ("attempt", "said"),
    [("raise ValueError('found')", "found"), ("os._exit(7)", "ended with 7"), ("time.sleep(60)", "took more than")],
)
def test_an_error_a_crash_and_a_hang_are_findings(attempt, said, monkeypatch, tmp_path):
    """A worker that writes what a real one does, for an attempt that fails in each way."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, time, traceback\n"
        "print(json.dumps({'begun': 3}), flush=True)\n"
        f"try:\n    {attempt}\n"
        "except Exception:\n    print(json.dumps({'attempt': 3, 'finding': traceback.format_exc()}), flush=True)\n"
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {_PYTHON} {worker}\n")
    (tmp_path / "python").chmod(0o755)
    (event,) = fuzz.worker_events("api", 0, 0, 1.0, limit=1 if "sleep" in attempt else 600)
    assert event["attempt"] == 3 and said in event["finding"]


_PYTHON = sys.executable


@pytest.mark.full
def test_an_attempt_is_the_same_every_time():
    command = [sys.executable, "-m", "tests.fuzz", "--areas", "api", "--seed", "4", "--attempt", "17"]
    said = {subprocess.run(command, cwd=fuzz.ROOT, capture_output=True, text=True).stdout for _ in range(2)}
    assert len(said) == 1 and said != {""}
