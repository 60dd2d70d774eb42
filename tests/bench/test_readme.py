"""The tables of README and docs/activations.md are those that benchmarks/readme.py makes from benchmarks/results/."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "readme.py"


@pytest.fixture
def readme():
    spec = importlib.util.spec_from_file_location("benchmarks_readme", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_current(readme):
    assert readme.main(["--check"]) == 0, "run `python benchmarks/readme.py`"


def test_an_old_table_is_found_and_made_anew(readme, tmp_path, monkeypatch, capsys):
    current = (readme.ROOT / "README.md").read_text()
    row = next(line for line in current.splitlines() if line.startswith("| rms_norm | 16384x4096 |"))
    (tmp_path / "README.md").write_text(current.replace(row, "| rms_norm | 16384x4096 | older |"))
    (tmp_path / "docs").mkdir()
    levels = (readme.ROOT / "docs" / "activations.md").read_text()
    (tmp_path / "docs" / "activations.md").write_text(levels)
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.main(["--check"]) == 1 and "readme.py" in capsys.readouterr().err
    assert readme.main([]) == 0 and (tmp_path / "README.md").read_text() == current


def test_a_missing_mark_is_named(readme):
    with pytest.raises(ValueError, match="no mark '<!-- benchmarks/readme.py: ops -->'"):
        readme.filled("# a readme without marks")
