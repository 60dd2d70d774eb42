"""`liger-hw compile`: the table, the JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest

from liger_hw.cli import main

pytestmark = pytest.mark.aot


def test_table(capsys):
    assert main(["compile", "--target", "gfx942", "--ops", "softmax", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "softmax.fwd" in out and "softmax.bwd" in out and out.strip().endswith("0 with spills")


def test_json(capsys):
    assert main(["compile", "--target", "sm90,gfx1100", "--ops", "softmax", "--dtype", "fp32", "--json", "--workers", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {c["target"] for c in found} == {"sm90", "gfx1100"} and {c["tunable"] for c in found} == {"softmax.fwd", "softmax.bwd"}
    for c in found:
        assert not c["error"] and not c["illegal"] and c["workload"]
        assert c["resources"]["registers"] > 0 and c["resources"]["threads"] <= 1024


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--target", "gfx9000"], "unknown architecture 'gfx9000'"),
        (["--target", "pvc"], "no compiler for pvc"),
        (["--target", "sm90", "--ops", "rms_nrom"], "did you mean rms_norm"),
    ],
)
def test_refusals(capsys, argv, complaint):
    assert main(["compile", *argv]) == 2
    assert complaint in capsys.readouterr().err
