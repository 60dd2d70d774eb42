"""The scripts of ci/ as far as a machine without a GPU can run them, and the workflows made from its matrix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ci import workflows

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.name for path in (ROOT / "ci").glob("*.sh") if path.name not in ("test.sh", "common.sh", "evidence.sh")
)


VARIABLES = {"TORCH", "INDEX", "TRITON", "TRANSFORMERS", "TRL", "FULL", "OUT", "VENV", "BUDGET"}


def ran(script, *words, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    command = ["bash", f"ci/{script}", *words]
    return subprocess.run(command, cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True)


def steps(script, **environment):
    """The commands a lane script would run, without running them."""
    done = ran(script, DRY_RUN="1", **environment)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("+ ") for line in done.stdout.splitlines()]


def test_every_script_is_in_the_matrix():
    matrix = yaml.safe_load((ROOT / "ci" / "matrix.yaml").read_text())
    assert {lane["script"] for group in matrix.values() for lane in group} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_installs_first_and_then_tests(script):
    commands = steps(script)
    assert commands[0].startswith("make install") and any("ci/test.sh" in command for command in commands[1:])


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "xpu"])
def test_a_vendor_is_required_tested_planned_and_timed(vendor):
    commands = steps(f"{vendor}.sh", TORCH="2.12.0", INDEX="https://example.org/whl", OUT="kept")
    assert commands[0].endswith("TORCH=torch==2.12.0 TORCH_INDEX=https://example.org/whl")
    wanted = (
        f"info --require {vendor}",
        "info --json > kept/info.json",
        "ci/test.sh gpu",
        f"autotune --device {vendor} --dry-run",
        "--json > kept/bench.json",
        f"autotune --device {vendor} --budget 900",
        f"cache export --device {'xpu' if vendor == 'xpu' else 'cuda'}:0 > kept/table.json",
        "--json > kept/bench-tuned.json",
    )
    found = [next(i for i, command in enumerate(commands) if piece in command) for piece in wanted]
    assert found == sorted(found)


def test_tuning_can_be_left_out():
    commands = steps("rocm.sh", BUDGET="0")
    assert not any("--budget" in command or "table.json" in command for command in commands)
    assert any("bench.json" in command for command in commands)


@pytest.mark.parametrize(
    "script, more, lanes",
    [("cpu.sh", {}, "cpu interpret"), ("cpu.sh", {"TRANSFORMERS": "4.57.6"}, "transformers4")]
    + [("aot.sh", {}, "aot oldest"), ("aot.sh", {"TRITON": "3.9.0"}, "aot")],
)
def test_full_runs_the_same_lanes_with_everything(script, more, lanes):
    assert steps(script, **more)[-1].endswith(f"bash ci/test.sh {lanes}")
    assert steps(script, FULL="1", **more)[-1].endswith(f"bash ci/test.sh full {lanes}")


def test_what_a_push_leaves_out_runs_every_week_and_before_a_release():
    matrix = yaml.safe_load((ROOT / "ci" / "matrix.yaml").read_text())
    assert {(lane["script"], lane.get("transformers")) for lane in matrix["full"]} == {
        (lane["script"], lane.get("transformers"))
        for lane in matrix["hosted"]
        if "trl" not in lane and lane["script"] != "distributed.sh"  # these two leave nothing out
    }
    assert all(lane["full"] for lane in (*matrix["full"], *matrix["triton"]))
    assert {"schedule", "push"} <= workflows.WHEN["full"].keys()


@pytest.mark.parametrize(
    "script, variables, overlay, lane",
    [
        ("aot.sh", {"TRITON": "3.9.0"}, ".venv/triton-3.9.0 triton==3.9.0", "aot"),
        ("distributed.sh", {}, ".venv/distributed -r ci/distributed.txt", "distributed"),
        ("cpu.sh", {"TRL": "1.12.0"}, ".venv/trl-1.12.0 -r ci/trl.txt trl==1.12.0", "trl"),
    ],
)
def test_a_lane_with_other_packages_lays_them_over_the_environment(script, variables, overlay, lane):
    """In the environment's folder, where dill pickles their modules by name."""
    commands = steps(script, **variables)
    assert f"--target {overlay}" in commands[1] and commands[-1].endswith(f"bash ci/test.sh {lane}")


def test_a_machine_without_the_gpu_stops_at_the_requirement(tmp_path):
    """The vendor script for real, with a `make` that does nothing: its first own step must refuse, and end it."""
    (tmp_path / "make").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "make").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "liger-hw").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m liger_hw "$@"\n')
    (tmp_path / "bin" / "liger-hw").chmod(0o755)
    done = ran("xpu.sh", PATH=f"{tmp_path}:{os.environ['PATH']}", VENV=str(tmp_path), OUT=str(tmp_path))
    assert done.returncode == 1 and "sees no xpu device" in done.stderr
    assert "ci/test.sh" not in done.stdout


@pytest.mark.parametrize("script", [*SCRIPTS, "evidence.sh"])
def test_words_are_refused_before_anything_is_installed(script):
    """`--help` builds no environment."""
    done = ran(script, "--help", DRY_RUN="1", PYTHON=sys.executable, STEPS="")
    assert done.returncode == 2 and "no words, only variables" in done.stderr and not done.stdout


def test_evidence_refuses_a_step_it_does_not_know():
    """Before it touches the page."""
    done = ran("evidence.sh", STEPS="guess", PYTHON=sys.executable)
    assert done.returncode == 2 and "known: tables compile interpret" in done.stderr and "==" not in done.stdout


def test_the_releases_of_triton_around_the_pinned_one_are_a_lane():
    """Two before and two after; each has left evidence, of the ops that the pinned one's has."""
    matrix = yaml.safe_load((ROOT / "ci" / "matrix.yaml").read_text())
    pins = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    pinned = next(line.removeprefix("triton==") for line in pins if line.startswith("triton=="))
    lanes = [lane["triton"] for lane in matrix["triton"] if lane["script"] == "aot.sh"]

    def number(version):
        return [int(part) for part in version.split(".")]

    assert sum(number(v) < number(pinned) for v in lanes) >= 2 and sum(number(v) > number(pinned) for v in lanes) >= 2
    evidence = {v: json.loads((ROOT / "ci" / "evidence" / f"compiled-{v}.json").read_text()) for v in (pinned, *lanes)}
    for version, found in evidence.items():
        assert found["triton"] == version and set(found["ops"]) == set(evidence[pinned]["ops"])


def test_the_workflows_are_current():
    assert workflows.main(["--check"]) == 0
