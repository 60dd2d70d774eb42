"""The support page says what the evidence says, and no more."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from ci import support
from liger_hw import registry

ROOT = Path(__file__).resolve().parents[2]


def certificate(target, spills=0, error="", level="binary", kernel="_k"):
    facts = {"op": "rms_norm", "target": target, "tunable": "rms_norm.fwd", "kernel": kernel, "config": {}}
    resources = None if error else {"spills": spills}
    return {**facts, "error": error, "illegal": "", "level": level, "resources": resources}


def compiled(*certificates, **more):
    head = {"kind": "certificates", "date": "2026-01-01T00:00:00Z", "triton": "3.7.1", "depth": "quick", **more}
    return support.condense_compiled({**head, "certificates": list(certificates)})


def test_the_page_is_current():
    assert support.main(["--check"]) == 0


def test_kernels_are_counted_once():
    twice = certificate("gfx942"), certificate("gfx942"), certificate("gfx942", spills=3, kernel="_other")
    counts = {"kernels": 2, "failed": 0, "spilling": 1, "worst": 3, "level": "binary"}
    assert compiled(*twice)["ops"]["rms_norm"]["gfx942"] == counts


def test_kernels_that_were_not_reached_are_not_counted():
    """An op of which kernels were not reached on an architecture is not proven there."""
    found = compiled(certificate("gfx942"), certificate("sm80"), depth="full", left=[["rms_norm", "sm80", 7]])
    assert set(found["ops"]["rms_norm"]) == {"gfx942"}


def test_kernels_launched_by_other_ops_are_not_counted():
    some = certificate("gfx942"), {**certificate("gfx942"), "op": "softmax"}
    assert set(compiled(*some, depth="full", ops=["softmax"])["ops"]) == {"softmax"}


def test_kernels_are_told_apart_by_their_id():
    """Two that differ in what Triton specialises on alone, not in anything else that is kept."""
    twins = [{**certificate("gfx942"), "id": name} for name in ("a", "b", "b")]
    assert compiled(*twins, depth="full")["ops"]["rms_norm"]["gfx942"]["kernels"] == 2


def _kept(depth="quick", source="s", failures=(), **archs):
    facts = {"date": "2026-01-01", "depth": depth, "source": source, **({"failures": [*failures]} if failures else {})}
    return {
        "triton": "3.7.1",
        "about": {"dyt": facts},
        "ops": {"dyt": {arch: {"kernels": n} for arch, n in archs.items()}},
    }


def test_compiled_runs_are_merged():
    merged = support.merged_compiled
    both = merged(_kept(sm80=1, sm90=1), _kept(sm90=2))
    assert both["ops"]["dyt"] == {"sm80": {"kernels": 1}, "sm90": {"kernels": 2}}
    changed = merged(_kept(sm80=1, sm90=1), _kept(source="other", sm90=2))
    assert changed["ops"]["dyt"] == {"sm90": {"kernels": 2}}, "nothing of an earlier source stays"
    deeper = merged(_kept("quick", sm80=1), _kept("full", sm80=9))
    assert deeper["ops"]["dyt"] == {"sm80": {"kernels": 9}} and deeper["about"]["dyt"]["depth"] == "full"
    assert merged(deeper, _kept("quick", sm80=1)) == deeper, "a shallower run of the same source adds nothing"
    broken = merged(deeper, _kept("quick", failures=["sm80 dyt.fwd: no"], sm80=1))
    assert broken["about"]["dyt"]["failures"] == ["sm80 dyt.fwd: no"]
    mended = merged(_kept(failures=["sm80 dyt.fwd: no", "sm90 dyt.fwd: no"], sm80=1, sm90=1), _kept(sm80=1))
    assert mended["about"]["dyt"]["failures"] == ["sm90 dyt.fwd: no"], "of what was compiled again"
    assert merged(_kept("quick", sm80=1, sm90=1), _kept("full", sm80=9)) == _kept("quick", sm80=1, sm90=1), (
        "not all yet"
    )
    other = {**_kept(sm80=1), "about": {"jsd": _kept()["about"]["dyt"]}, "ops": {"jsd": {"sm80": {"kernels": 1}}}}
    assert set(merged(_kept(sm80=1), other)["ops"]) == {"dyt", "jsd"}


def test_stale_evidence_of_compilation(monkeypatch, tmp_path):
    """Changed source, a shallower depth, a missing architecture, a new op."""
    kept = _kept("deep", source=support.source_of("dyt"), sm80=1, sm90=1)
    (tmp_path / "compiled-3.7.1.json").write_text(json.dumps(kept))
    monkeypatch.setattr(support, "EVIDENCE", tmp_path)

    def stale(*ops, version="3.7.1", depth="quick", targets=("sm80",)):
        return support.stale_compiled(list(ops), version, depth, list(targets))

    assert stale("dyt") == stale("dyt", depth="deep", targets=("sm90", "sm80")) == []
    assert (
        stale("dyt", depth="full") == stale("dyt", targets=("pvc", "sm80")) == stale("dyt", version="3.9.0") == ["dyt"]
    )
    assert stale("dyt", "softmax") == ["softmax"]
    (tmp_path / "compiled-3.7.1.json").write_text(
        json.dumps({**kept, "about": {"dyt": {**kept["about"]["dyt"], "source": "other"}}})
    )
    assert stale("dyt") == ["dyt"]


def test_what_is_unproven_is_listed():
    """For each architecture what was not shown of it, with a command that shows it; nothing of what was."""
    built = compiled(certificate("gfx942"), certificate("pvc", level="ttir"), certificate("sm90"), certificate("sm80"))
    timed = {"rms_norm": {"sm90": {}}}
    lines = support._unproven(["gfx942", "pvc", "sm80", "sm90"], timed, built)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    assert "MI300X" in rows["gfx942"] and "bash ci/rocm.sh" in rows["gfx942"] and "INDEX=https://" in rows["gfx942"]
    assert "Intel's compiler takes it" in rows["pvc"] and "bash ci/xpu.sh" in rows["pvc"]
    assert "`bash ci/cuda.sh`" in rows["sm80"] and "results on the device" in rows["sm80"]
    assert "sm90" not in rows, "its only op was timed"
    assert "DEPTH=full" in lines[-1], "quick is not all of it"


def test_results_of_a_bench_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(support, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    row = {"op": "dyt", "arm": "liger_hw", "status": "ok", "error_out": 0.0}
    facts = {"device": "D", "arch": "gfx942", "device_type": "cuda"}
    facts |= {"torch": "2", "triton": "3", "date": "2026-01-02T00:00:00Z"}
    left = tmp_path / "bench.json"
    left.write_text(json.dumps({"machine": facts, "rows": [row]}))
    assert support.keep_measured(left).name == "ops-gfx942.json"
    assert support.measured()["dyt"]["gfx942"]["device"] == "D"
    for wrong in ({"rows": [row]}, {"machine": facts}, {"machine": {**facts, "device_type": "cpu"}, "rows": [row]}):
        left.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="not what|CPU"):
            support.keep_measured(left)


def test_states():
    failed = certificate("sm80", error="the compiler ended its process with signal 6\nand more")
    found = compiled(certificate("gfx942"), certificate("pvc", level="ttir"), failed, certificate("sm90"))
    (failure,) = found["about"]["rms_norm"]["failures"]
    assert failure.startswith("sm80 rms_norm.fwd") and failure.endswith("with signal 6")
    timed = {"rms_norm": {"sm90": {}, "sm80": {}}}
    interpreted = {"ops": {"rms_norm": {"gfx1201": {"tests": 1, "failed": 0}, "gfx942": {"tests": 2, "failed": 0}}}}
    states = {"sm90": "measured", "gfx942": "compile-proven", "pvc": "modelled", "gfx1201": "interpreted"}
    states |= {"sm80": "failed", "gfx90a": None}
    assert {arch: support._state("rms_norm", arch, timed, found, interpreted) for arch in states} == states


def test_a_failed_interpreter_test_shows():
    named = '<property name="op" value="{}"/><property name="arch" value="pvc"/>'
    case = f"<testcase><properties>{named}</properties>{{}}</testcase>"
    cases = case.format("dyt", "") + case.format("dyt", "<failure/>") + "<testcase/>"
    root = xml.fromstring(f'<testsuites><testsuite timestamp="2026-01-02T03:04:05">{cases}</testsuite></testsuites>')
    found = support.condense_interpreted(root)
    assert found["ops"] == {"dyt": {"pvc": {"tests": 2, "failed": 1}}}
    assert found["about"] == {"dyt": {"date": "2026-01-02", "source": support.source_of("dyt")}}


def test_changed_kernels_make_an_op_stale(monkeypatch, tmp_path):
    """Its own kernels' code; an op that is gone is not stale."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    monkeypatch.setattr(support, "EVIDENCE", evidence)
    about = {op: {"date": "2026-01-01", "source": support.source_of(op)} for op in ("dyt", "swiglu")}
    (evidence / "interpreted.json").write_text(json.dumps({"about": about, "ops": {}}))
    (evidence / "compiled-3.7.1.json").write_text(json.dumps({"ops": {"dyt": {}, "swiglu": {}, "gone": {}}}))
    assert support.stale() == []
    monkeypatch.setattr(registry.get_op("dyt").tunables[0], "kernels", registry.get_op("swiglu").tunables[0].kernels)
    assert support.stale() == ["dyt"]
