"""Real worker processes: crashes, hangs, kill -9 of the run, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from liger_hw.autotune.tuner import Job
from liger_hw.autotune.workers import CompilePool, RemoteMeasurer, Worker, WorkerDied, WorkerError
from liger_hw.backends import LaunchConfig
from tests.autotune.fakes import H200, tunable

ROOT = Path(__file__).resolve().parents[2]
KEY = (4096, 13, 2)
JOB = Job("rms_norm", "fwd", KEY, (8192, 4096), "bfloat16")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(Worker, "module", "tests.autotune.fake_worker")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    call = Worker.call

    def patient(worker, name, *args, seconds):
        """The test's limit for a configuration that hangs; 600 seconds for others, if the machine is busy."""
        hangs = args and getattr(args[-1], "num_warps", 0) == 4
        return call(worker, name, *args, seconds=seconds if hangs else 600)

    monkeypatch.setattr(Worker, "call", patient)


def request(config) -> tuple:
    return H200, "rms_norm", (8192, 4096), "bfloat16", "rms_norm.fwd", config


def with_warps(warps: int):
    return replace(tunable().safe(H200, KEY), num_warps=warps)


def test_a_crash_a_hang_and_a_lost_device_are_told_apart_and_survived(fake, monkeypatch):
    monkeypatch.setitem(RemoteMeasurer.LIMITS, "prepare", 1.0)
    measurer = RemoteMeasurer("cuda:0")
    try:
        for warps, word in ((2, "signal 11.*cannot select"), (4, "hung for 1 s"), (16, "illegal memory access")):
            measurer.open(JOB, JOB.sizes)
            with pytest.raises(WorkerDied, match=word):
                measurer.prepare(with_warps(warps))
        with pytest.raises(WorkerError, match="no"):
            measurer.prepare(with_warps(32))
        assert measurer.prepare(with_warps(1)) is None
        worker = measurer.process
    finally:
        measurer.close()
    assert worker.poll() is not None


def test_the_compile_pool_survives_aborts_and_hangs(fake):
    with CompilePool(2, seconds=1.0) as pool:
        for warps in (1, 2, 4, 8):
            pool.submit(warps, "candidate", *request(with_warps(warps)))
        assert [pool.wait(warps)["resources"].shared for warps in (1, 8)] == [100, 800]
        assert "crashed" in pool.wait(2)["error"] and "hung" in pool.wait(4)["error"]
        pool.submit(8, "never looked at again")
        assert pool.wait(8)["resources"].shared == 800


RUN = """
import signal
import sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest was started in the background
from liger_hw.autotune import workers
workers.Worker.module = "tests.autotune.fake_worker"
import liger_hw.cli.autotune as command
command._device = lambda name: ("cuda:0", [])
from liger_hw.cli import main
sys.exit(main(sys.argv[1:]))
"""
COMMAND = ["autotune", "--ops", "swiglu", "--shapes", "8192x4096,4096x4096", "--candidates", "12", "--workers", "1"]


def start(cache: Path, *more: str, seconds: float = 0.05) -> subprocess.Popen:
    environment = {
        **os.environ,
        "LIGER_HW_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FAKE_SECONDS": str(seconds),
        "FAKE_CALM": "1",
        "FAKE_LOG": str(cache / "timed"),
    }
    environment.pop("LIGER_HW_INTERPRET", None)
    command = [sys.executable, "-c", RUN, *COMMAND, *more]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def stored(cache: Path) -> list[dict]:
    """The lines of the cache's file."""
    paths = list(cache.rglob("*.json"))
    return json.loads(paths[0].read_text())["entries"] if paths else []


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.05)


# The harder end; an interrupt ends the same loop in an orderly way.
@pytest.mark.daily(how="SIGKILL")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_loses_nothing_and_resumes(tmp_path, how):
    run = start(tmp_path, seconds=0.3)
    try:
        wait_for(lambda: len(stored(tmp_path)) >= 4)
        run.send_signal(how)
        output = run.communicate()[0]
    finally:
        run.kill()
    assert run.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    if how == signal.SIGINT:
        assert "--resume" in output and "interrupted" in output

    def name(line: dict) -> str:
        return json.dumps([line["variant"], *line["key"], LaunchConfig.from_json(line["config"]).to_text()])

    kept = {name(line) for line in stored(tmp_path)}
    log = tmp_path / "timed"
    missing = set(log.read_text().splitlines()) - kept
    assert len(missing) <= 1, "at most the candidate in flight"
    log.unlink()
    again = start(tmp_path, "--resume")
    output = again.communicate()[0]
    assert again.returncode == 0, output
    assert not kept & set(log.read_text().splitlines()), "timed twice"
    lines = stored(tmp_path)
    assert len(lines) == 4 and {line["variant"] for line in lines} == {"fwd", "bwd"}
    assert {line["provenance"]["kind"] for line in lines} <= {"measured", "heuristic"}


def test_workers_end_with_their_parent():
    """A worker whose parent was killed notices within a second or two, even while it waits for nothing."""
    script = (
        "import json, os, sys, time\n"
        "from liger_hw.autotune.workers import Worker\n"
        "w = Worker('compile')\n"
        "w._start()\n"
        "print(w.process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_for(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.aot
def test_what_the_pool_compiles_is_what_a_launch_looks_up(tmp_path, monkeypatch):
    """Triton's cache has the kernels of the candidate's whole operator."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fwd = tunable()
    with CompilePool(1) as pool:
        pool.submit("x", "candidate", *request(fwd.safe(H200, KEY)))
        resources = pool.wait("x")["resources"]
    assert resources.threads == 32 * fwd.safe(H200, KEY).num_warps and resources.registers > 0
    assert list(tmp_path.rglob("_norm_fwd_kernel.cubin"))
