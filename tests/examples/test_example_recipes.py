"""Every command of docs/guides/recipes.md, as it stands there but for its sizes, offline on the CPU."""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
from pathlib import Path

import pytest
from harness import python

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\w+) \| (\d) \| (\w+) \| `(.*)` \|$", re.MULTILINE)
RECIPES = ROW.findall((ROOT / "docs" / "guides" / "recipes.md").read_text())
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@pytest.mark.cpu
def test_the_table_has_every_recipe():
    kinds = {(what, gpus, part) for what, gpus, part, _ in RECIPES}
    assert kinds == {(what, n, part) for what in ("SFT", "DPO", "GRPO") for n in "18" for part in ("full", "LoRA")}
    for _, gpus, part, command in RECIPES:
        assert ("--lora" in command) == (part == "LoRA")
        assert command.startswith("torchrun --nproc-per-node 8 " if gpus == "8" else "python ")


def losses(command: str, folder: Path, *more: str) -> list[float]:
    words = shlex.split(command.replace("--nproc-per-node 8", "--standalone --nproc-per-node 2"))
    start = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words[1:]]
    sizes = ["--model", str(folder / "nowhere"), "--steps", "2", "--batch", "2", "--seq", "32", *more]
    said = python(*start, *words, *sizes, env={**ENVIRONMENT, "HF_DATASETS_CACHE": str(folder)}, cwd=folder)
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", said, re.MULTILINE)]


@pytest.mark.full  # lane trl
@pytest.mark.cpu
@pytest.mark.parametrize("what, gpus, part, command", RECIPES, ids=lambda value: None if " " in value else value)
def test_it_runs(what, gpus, part, command, tmp_path):
    needed = ("trl", "datasets", "accelerate", "peft")
    if missing := [module for module in needed if not importlib.util.find_spec(module)]:
        pytest.skip(f"{', '.join(missing)} not installed (TRL=1.16.0 bash ci/cpu.sh)")
    steps = losses(command, tmp_path)
    assert len(steps) >= 2 and all(map(math.isfinite, steps))
    if gpus == "1":  # two processes print in any order
        assert steps == pytest.approx(losses(command, tmp_path, "--unpatched"), abs=1e-3)
