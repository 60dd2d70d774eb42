"""What `make test` leaves to `make test LANES=full`: the marks `full` and `daily` of tests/conftest.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.cpu
TESTS = Path(__file__).resolve().parents[1]
OP = SimpleNamespace(name="softmax", options=[{}, {"dim": 0}])

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


@pytest.fixture
def conftest(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


@pytest.fixture
def runs(conftest):
    def ask(lane, params, *marks):
        item = SimpleNamespace(
            nodeid="a test", iter_markers=lambda name: [getattr(pytest.mark, name)(*a, **k).mark for a, k in marks]
        )
        if params:
            item.callspec = SimpleNamespace(params=params)
        return conftest._runs_daily(item, lane)

    return ask


def test_a_mark_names_what_stays(runs):
    mark = ((), {"options": "default"})
    assert runs("cpu", {"case": (OP, {})}, mark) and not runs("cpu", {"case": (OP, {"dim": 0})}, mark)
    assert runs("cpu", {"case": (OP, {"dim": 0})}, mark, ((), {"op": ("rope", "softmax")}))
    assert runs("cpu", {"case": (OP, {"dim": 0})}, (("interpret",), {"options": "default"}))
    assert not runs("cpu", {"arch": "sm90", "n": 2}, ((), {"arch": "sm90", "n": "1"}))


def test_float16_is_interpreted_where_a_mark_asks_for_it(runs):
    import torch

    half = {"dtype": torch.float16}
    assert not runs("interpret", half) and runs("interpret", {"dtype": torch.float32}) and runs("aot", half)
    assert runs("interpret", half, ((), {"dtype": ("float16", "float32")})) and runs("interpret", {})


def test_a_mark_names_parameters_of_its_test(runs):
    with pytest.raises(pytest.UsageError, match="arhc"):
        runs("cpu", {"arch": "sm90"}, ((), {"arhc": "sm90"}))


def test_memory_is_of_the_op_where_the_mark_names_it(conftest):
    def needed(op, *marks):
        item = SimpleNamespace(nodeid="a test", callspec=SimpleNamespace(params={"op": SimpleNamespace(name=op)}))
        item.get_closest_marker = lambda name: next(iter(marks), None)
        return conftest._memory_of(item)

    mark = pytest.mark.memory(16, embedding=50).mark
    assert needed("softmax", mark) == 16 and needed("embedding", mark) == 50 and needed("embedding") == 0
    with pytest.raises(pytest.UsageError, match="embeding"):
        needed("softmax", pytest.mark.memory(16, embeding=50).mark)


GPU_TESTS = """
import pytest

@pytest.mark.memory(4, softmax=16)
@pytest.mark.lanes("gpu")
def test_much(lane, op):
    assert op.name != "softmax"

@pytest.mark.gpu
def test_little():
    pass
"""

LIKE_A_GPU = """
def pytest_collection(session):
    conftest = session.config.pluginmanager.get_plugin(str(session.config.rootpath / "conftest.py"))
    conftest.gpu_device, conftest._gib_of = lambda config: "meta", lambda device: 8.0
"""


def test_tests_of_more_memory_than_there_is_are_skipped(tmp_path):
    (tmp_path / "test_it.py").write_text(GPU_TESTS)
    (tmp_path / "like_a_gpu.py").write_text(LIKE_A_GPU)
    given_back = "torch.get_device_module(torch.device(device).type).empty_cache()"
    conftest = (TESTS / "conftest.py").read_text()
    assert given_back in conftest
    (tmp_path / "conftest.py").write_text(conftest.replace(given_back, "pass"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(TESTS.parent)])
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu and memory"]
    command += ["-p", "like_a_gpu", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "SKIPPED [1]" in done.stdout and "takes 16 GiB of device memory, this one has 8" in done.stdout
    assert "1 skipped, 1 deselected" in done.stdout


@pytest.mark.full  # it collects every test
def test_a_mark_leaves_something_to_every_run():
    """A value that is misspelt, or of an op that was renamed, would leave a test out for good."""
    files = [str(path) for path in TESTS.rglob("test_*.py") if "@pytest.mark.daily(" in path.read_text()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-c", LEFT_OUT, "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.split("FOUND")[1])
    assert len(found) > 20 and not [name for name, some in found.items() if not some]
