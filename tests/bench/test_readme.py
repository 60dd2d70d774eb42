"""The tables of README, docs/ and examples/ are those that benchmarks/readme.py makes from
benchmarks/results/."""

from __future__ import annotations

import json

import pytest
import readme

from liger_hw.bench import report

pytestmark = pytest.mark.cpu


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


def row(arm, ms, errors=(1.5e-5, 2.84e-3), **more):
    place = {"op": "grpo", "sizes": [8, 1024, 4096, 131072], "dtype": "bfloat16", "mode": "full", "arm": arm}
    place |= {"ms": {"median": ms}, "floor_ms": 36.0, "method": "graph", "peak_mib": 2124.4}
    return place | {"error_out": errors[0], "error_grad": errors[1]} | more


SWEEP = [(1, 0.9), (1024, 0.8), (1025, 0.6)]
RESULTS = {
    "losses": {"rows": [row("liger_hw", 40.0), row("liger", 470.0, method="events"), row("compile", 39.0, (None,
    None))]}, "head-sweep": {
        "points": [{"tokens": n, "vocab": 1000, "ms": 1.0, "share": share} for n, share in SWEEP],
        "left_out": [[65536, 1000]],
    },
    "largest-head": {
        "results": [
            {"arm": "liger_hw", "case": "tokens", "other": 131072, "exact": False,
             "found": {"tokens": 1048576, "vocab": 131072, "peak_gib": 18.24, "seconds": 5.2}},
            {"arm": "torch", "case": "tokens", "other": 131072, "exact": True, "ended_by": "9: RuntimeError: no",
             "found": {"tokens": 81920, "vocab": 131072, "peak_gib": 133.0, "seconds": 0.4}},
            {"arm": "cce", "error": "the time was spent"},
        ]
    },
    "first-call": {
        "runs": [
            {"arm": "liger_hw", "op": "grpo", "sizes": "2x8", "first_s": 0.911, "second_s": 0.0042},
            {"arm": "liger", "op": "grpo", "sizes": "2x8", "error": "the time was spent"},
        ]
    },
}  # fmt: skip


def test_the_tables_of_the_losses_say_what_the_files_hold(tmp_path, monkeypatch):
    for name, document in RESULTS.items():
        (tmp_path / f"{name}-h200.json").write_text(json.dumps(document))
    monkeypatch.setattr(readme.published, "RESULTS", tmp_path)
    place, mib = "grpo | 8x1024x4096x131072 | 36", "2124 / 2124 / 2124"
    errors = "2e-5 / 2e-5 / - | 3e-3 / 3e-3 / -"
    assert readme.losses_page.losses_table().splitlines()[2:] == [
        f"| {place} | **40** (90%) | 470* | 39 | - | - | - | - | {mib} | {errors} |"
    ]
    text = readme.losses_page.sweep_text()
    assert "least share 60%, 1025 tokens x 1000 words" in text and "from 1024 tokens 60%" in text
    assert (
        "80% to 60%, from 1024 to 1025 x 1000" in text
        and "Not reached in the time: 1000 words at 65536 tokens." in text
    )
    assert readme.losses_page.largest_table().splitlines()[2:] == [
        "| liger_hw | at least 1,048,576, 18.2 GiB, 5.20 s |",
        "| torch | 81,920, 133.0 GiB, 0.40 s; then RuntimeError: no |",
        "| CCE 25.1.1 | not reached in the time |",
    ]
    assert readme.losses_page.first_call_table().splitlines()[2:] == ["| grpo | 2x8 | 0.91 s, 4.2 ms | - |"]
    assert readme.losses_page.options_table() == "Not measured yet: `benchmarks/head_options.py`."


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
