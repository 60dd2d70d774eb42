"""ci/certificates.py: what it leaves, that it goes on where it stopped, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.aot
ROOT = Path(__file__).resolve().parents[2]
FEW = ["--targets", "gfx942,bmg", "--ops", "relu_squared", "--depth", "quick", "--workers", "1"]


@pytest.fixture
def certificates(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("certificates", ROOT / "ci" / "certificates.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _result(folder):
    (path,) = folder.glob("compiled-*.json")
    return json.loads(path.read_text())


def test_every_kernel_is_kept_and_compiled_once(certificates, tmp_path, capsys):
    assert certificates.main([str(tmp_path), *FEW]) == 0
    found = _result(tmp_path)
    records = found["certificates"]
    assert {(r["target"], r["tunable"], r["level"]) for r in records} == {
        (arch, f"relu_squared.{way}", level)
        for arch, level in (("gfx942", "binary"), ("bmg", "ttir"))
        for way in ("fwd", "bwd")
    }
    assert all(r["resources"]["registers"] > 0 and not r["error"] and not r["illegal"] for r in records)
    assert found["left"] == [] and found["sources"]["relu_squared"]
    assert "4 to compile" in capsys.readouterr().err
    assert certificates.main([str(tmp_path), *FEW]) == 0
    assert "0 to compile" in capsys.readouterr().err and _result(tmp_path)["certificates"] == records


def test_an_interrupted_run_reports_the_rest_and_continues(certificates, tmp_path, capsys):
    assert certificates.main([str(tmp_path), *FEW, "--seconds", "0.01"]) == 3
    found = _result(tmp_path)
    assert len(found["certificates"]) == 1 and sum(count for *_, count in found["left"]) == 3
    assert "3 left" in capsys.readouterr().out
    (journal,) = tmp_path.glob("*.jsonl")
    journal.write_text(journal.read_text() + '{"id": "cut o')  # killed while it wrote
    assert certificates.main([str(tmp_path), *FEW]) == 0
    assert "3 to compile" in capsys.readouterr().err and len(_result(tmp_path)["certificates"]) == 4
    assert certificates.main([str(tmp_path), *FEW]) == 0
    assert "0 to compile" in capsys.readouterr().err


def test_a_failure_is_printed_and_kept(certificates, tmp_path, monkeypatch, capsys):
    from liger_hw.autotune import compile as aot

    whole = aot.trace_cases

    def broken(*args):
        return ((case, replace(launch, kernel="no_such_module:kernel")) for case, launch in whole(*args))

    monkeypatch.setattr(aot, "trace_cases", broken)
    assert certificates.main([str(tmp_path), *FEW]) == 1
    said = capsys.readouterr().out
    assert "gfx942 relu_squared.fwd" in said and "ModuleNotFoundError" in said and "4 failed or illegal" in said
    assert all("ModuleNotFoundError" in record["error"] for record in _result(tmp_path)["certificates"])


def test_names_it_does_not_know(certificates, tmp_path, capsys):
    assert certificates.main([str(tmp_path), "--targets", "gfx9000"]) == 2
    assert "unknown architecture 'gfx9000'" in capsys.readouterr().err
