"""The tables of README, docs/ and examples/ are those that benchmarks/readme.py makes from benchmarks/results/."""

from __future__ import annotations

import readme

from liger_hw.bench import report


def test_the_readme_is_current():
    assert readme.main(["--check"]) == 0, "run `python benchmarks/readme.py`"


def test_an_old_table_is_found_and_made_anew(tmp_path, monkeypatch, capsys):
    for page in readme.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((readme.ROOT / page).read_text())
    ops = tmp_path / "docs/benchmarks/ops.md"
    current = ops.read_text()
    row = next(line for line in current.splitlines() if line.startswith("| rms_norm | 16384x4096 |"))
    ops.write_text(current.replace(row, "| rms_norm | 16384x4096 | older |"))
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.main(["--check"]) == 1 and "readme.py" in capsys.readouterr().err
    assert readme.main([]) == 0 and ops.read_text() == current


def many(op, sizes, **ms):
    place = {"op": op, "sizes": sizes, "dtype": "bfloat16", "mode": "full", "floor_ms": 0.5, "copy_gb_s": 4000.0}
    return [place | {"arm": arm, "ms": {"median": time}} for arm, time in ms.items()]


def test_many_shapes_say_where_a_peer_wins(tmp_path, monkeypatch):
    rows = many("dyt", [8, 16], liger_hw=1.0, liger=2.0, compile=1.5) + many("dyt", [1, 16], liger_hw=1.0, compile=0.9)
    report.save(tmp_path / readme.published.MANY, {"rows": rows})
    monkeypatch.setattr(readme.published, "RESULTS", tmp_path)
    assert "| dyt | 2 | 0.90 | 0.90 | 1.20 | 1 | 1 | 50% |" in readme.shapes_table()
    assert "In all: 2 shapes, 1 behind a peer by more than 1%." in readme.shapes_table()
    assert readme.behind_table().splitlines()[2:] == ["| dyt | 1x16 | 1000.0 | 900.0 | compile | 0.90 | - |"]
