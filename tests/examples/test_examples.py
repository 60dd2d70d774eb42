"""Every example, as it is started, at its small default size on the CPU: it ends, and both arms trained alike."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
FOLDER = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {
    "trainer_sft": ("transformers", "accelerate"),
    "trl_dpo": ("trl", "datasets"),
    "fsdp2": ("transformers",),
    "lightning_sft": ("lightning",),
    "medusa": ("transformers",),
}
STEPS = 4


def test_there_is_no_other_example():
    assert {path.stem for path in FOLDER.glob("*.py")} == {"common", *NEEDS}
    assert all(f"`{name}.py`" in (FOLDER / "README.md").read_text() for name in NEEDS)


# Lane trl runs them all; `fsdp2` and `medusa` need no trl, but a process or two of their own each.
@pytest.mark.daily(name="trainer_sft")
@pytest.mark.parametrize("name", NEEDS)
def test_it_runs_offline_and_trains_as_unpatched(name, tmp_path):
    if missing := [module for module in NEEDS[name] if not importlib.util.find_spec(module)]:
        pytest.skip(f"{', '.join(missing)} not installed (TRL=1.16.0 bash ci/cpu.sh)")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name == "fsdp2" else []
    sizes = ["--steps", str(STEPS), "--hidden", "64", "--seq", "64", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [sys.executable, *start, str(FOLDER / f"{name}.py"), *sizes, "--device", "cpu"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "unpatched" in done.stdout and "liger_hw" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["example"] == name and found["largest_loss_difference"] < 1e-4
    for arm in found["arms"].values():
        assert len(arm["losses"]) == STEPS and arm["losses"][-1] < arm["losses"][0] and arm["tokens_per_second"] > 0
