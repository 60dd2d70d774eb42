"""What `make test` leaves to `make test LANES=full`: the marks `full` and `daily` of tests/conftest.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

LEFT_OUT = """
import json, pytest, sys

class Lanes:
    def pytest_itemcollected(self, item):
        if item.get_closest_marker("daily"):
            items.append(item)

items = []
assert pytest.main(["-q", "--collect-only", *sys.argv[1:]], plugins=[Lanes()]) == 0
runs = {}
for item in items:
    lane = next(lane for lane in ("cpu", "interpret", "aot", "gpu", "multigpu") if item.get_closest_marker(lane))
    name = f"{item.nodeid.split('[')[0]} {lane}"
    runs[name] = runs.get(name, False) or not item.get_closest_marker("full")
print("FOUND" + json.dumps(runs))
"""
"""Prints for each test and lane whether any of its sets of parameters runs by default."""


@pytest.mark.full  # it collects every test
def test_a_mark_leaves_something_to_every_run():
    """A misspelt value, or the old name of an op, would leave out a test for good."""
    files = [str(path) for path in TESTS.rglob("test_*.py") if "@pytest.mark.daily(" in path.read_text()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-c", LEFT_OUT, "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.split("FOUND")[1])
    assert len(found) > 20 and not [name for name, some in found.items() if not some]
