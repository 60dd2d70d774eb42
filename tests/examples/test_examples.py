"""Every example, as it is started, offline on the CPU: it ends, and patched it trains as unpatched."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from harness import python

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {
    "trainer_sft": ("transformers", "accelerate"),
    "trl_dpo": ("trl", "datasets"),
    "fsdp2": ("transformers",),
    "lightning_sft": ("lightning",),
    "medusa": ("transformers",),
}
RECIPES = {"trl_grpo"}
"""Examples that test_recipes.py runs: what GRPO samples has no loss that falls in four steps."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


def test_the_list_is_complete_and_each_is_short():
    assert {path.stem for path in FOLDER.glob("*.py")} == {"local", *NEEDS, *RECIPES}
    listed = (FOLDER / "README.md").read_text()
    for path in FOLDER.iterdir():
        if path.is_file() and path.name not in ("README.md", "local.py"):
            assert f"`{path.name}`" in listed
        if path.suffix == ".py":
            assert len(path.read_text().splitlines()) < 80, path.name


def run(folder: Path, *words: str) -> str:
    return python(*words, env={**ENVIRONMENT, "HF_DATASETS_CACHE": str(folder)}, cwd=folder)


# Lane trl runs them all, twice each.
@pytest.mark.full
@pytest.mark.parametrize("name", NEEDS)
def test_it_runs_offline_and_trains_as_unpatched(name, tmp_path):
    if missing := [module for module in NEEDS[name] if not importlib.util.find_spec(module)]:
        pytest.skip(f"{', '.join(missing)} not installed (TRL=1.16.0 bash ci/cpu.sh)")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name == "fsdp2" else []
    words = [*start, str(FOLDER / f"{name}.py"), "--model", str(tmp_path / "nowhere"), "--steps", "4", "--seq", "64"]
    patched, unpatched = (
        [float(loss) for loss in re.findall(r"^loss (\S+)$", run(tmp_path, *words, *flag), re.MULTILINE)]
        for flag in ((), ("--unpatched",))
    )
    assert len(patched) == len(unpatched) == 4 and patched[-1] < patched[0]
    assert max(abs(one - other) for one, other in zip(patched, unpatched)) < 1e-3


@pytest.mark.full  # test_demo.py trains before and after a patch
def test_the_notebook_runs(tmp_path):
    cells = json.loads((FOLDER / "compare.ipynb").read_text())["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    program = tmp_path / "notebook.py"
    same = "a, b = (losses[-1] for losses, *_ in arms.values()); assert abs(a - b) < 1e-3"
    program.write_text(f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{code}\n\n{same}\n")
    run(tmp_path, str(program))


@pytest.mark.parametrize("name", ["axolotl", "llamafactory"])
def test_the_configurations_can_be_read(name):
    text = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert text.get("enable_liger_kernel") or any("liger" in plugin for plugin in text["plugins"])
