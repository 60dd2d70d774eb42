"""What is kept: machine facts, JSON that survives a kill, the table."""

from __future__ import annotations

import gzip
import json

import torch

from liger_hw.bench import report


def row(arm: str, ms: float | None = 1.0, **more):
    stats = {"median": ms, "p20": ms, "p80": ms, "repeats": [ms], "samples": 1} if ms else None
    base = {
        "op": "rms_norm",
        "sizes": [8, 16],
        "dtype": "bfloat16",
        "mode": "full",
        "arm": arm,
        "status": "ok" if ms else "absent",
        "note": "" if ms else "x is not installed",
        "ms": stats,
        "method": "graph" if ms else None,
        "floor_ms": 0.5,
        "floor": "copy",
        "share": 0.5 / ms if ms else None,
        "peak_mib": 4.0,
        "error_out": 1e-3,
        "error_grad": None,
        "l2_cold": True,
    }
    return {**base, **more}


def test_machine_facts():
    facts = report.machine(torch.device("cpu"), commit="abc")
    assert facts["commit"] == "abc" and facts["torch"] == torch.__version__ and facts["driver"] is None
    assert set(facts) >= {"device", "arch", "triton", "liger_hw", "date"}
    json.dumps(facts)


def test_a_case_names_its_best_peer():
    text = report.as_text([row("liger_hw", 0.8), row("torch", 2.0), row("liger", 1.0), row("quack", None)])
    assert "rms_norm 8x16 full: 1.25x liger" in text and "0.800..0.800  62%" in text
    assert "absent  quack: x is not installed" in text


def test_calls_without_a_graph_are_marked():
    text = report.as_text([row("liger_hw"), row("liger", 2.0, method="events", note="syncs")])
    assert "events syncs" in text and "host time included" in text


def test_cpu_times_are_marked():
    assert "wall clock on a CPU" in report.as_text([row("liger_hw", method="wall")])
    assert report.as_text([]) == "nothing was measured"


def test_saving_leaves_no_torn_file(tmp_path, capsys):
    path = tmp_path / "deep" / "out.json"
    report.save(path, {"rows": [1]})
    report.save(path, {"rows": [1, 2]})
    assert json.loads(path.read_text()) == {"schema": report.SCHEMA, "rows": [1, 2]}
    assert list(path.parent.iterdir()) == [path]
    report.save(path, {"found": 1 / 3, "rows": [{"ms": {"median": 1 / 3}, "sizes": (1, 2)}, {}]})
    assert json.loads(path.read_text())["rows"] == [{"ms": {"median": 0.333333}, "sizes": [1, 2]}, {}]
    packed = tmp_path / "out.json.gz"
    report.save(packed, {"rows": [1]})
    assert json.loads(gzip.decompress(packed.read_bytes())) == {"schema": report.SCHEMA, "rows": [1]}
    assert json.loads(path.read_text())["found"] == 1 / 3
    report.save("-", {"rows": []})
    assert json.loads(capsys.readouterr().out)["rows"] == []
