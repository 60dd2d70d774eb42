"""`liger-hw bench` as a user types it."""

from __future__ import annotations

import json

import harness
import pytest


def said(capsys, *argv):
    return harness.said(capsys, "bench", *argv)


def test_an_op_against_torch(tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ("rms_norm", "--sizes", "8x16", "--dtype", "fp32", "--against", "torch", "--device", "cpu")
    code, out, err = said(capsys, *arguments, "--repeats", "1", "--json", str(path))
    assert code == 0 and "wall clock on a CPU" in out and "[1/1]" in err
    document = json.loads(path.read_text())
    code, out, _ = said(capsys, *arguments, "--repeats", "1", "--json")
    assert code == 0 and len(json.loads(out)["rows"]) == 2, "standard output is JSON alone"
    assert document["complete"] and document["machine"]["copy_gb_s"] > 0
    assert [row["arm"] for row in document["rows"]] == ["liger_hw", "torch"]
    assert {"device", "driver", "torch", "triton", "liger_hw", "commit", "date", "config"} <= set(document["rows"][0])


def test_each_case_is_named_before_it_runs(capsys):
    arguments = ("--sizes", "8x16,9x16", "--dtype", "fp32", "--against", "torch", "--device", "cpu", "--repeats", "1")
    _, _, err = said(capsys, "rms_norm", *arguments)
    lines = err.splitlines()
    assert lines[0].startswith("no GPU: torch's reference path")
    assert lines[1].startswith("[1/2] rms_norm 8x16 float32: liger_hw, torch; ") and lines[1].endswith(" s so far")
    assert lines[3].startswith("[2/2] rms_norm 9x16")


def test_a_budget_ends_early_and_says_so(capsys):
    code, out, _ = said(capsys, "rms_norm", "--sizes", "8x16", "--device", "cpu", "--budget", "0.001")
    assert code == 0 and "nothing was measured" in out and "stopped early: the budget of 0.001 s is spent" in out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("rms_nrm",), "did you mean rms_norm"),
        (("rms_norm", "--against", "ligr"), "unknown peer 'ligr'"),
        (("rms_norm", "--sizes", "8x8x8x8x8x8x8"), "no op takes size"),
        (("rms_norm", "--mode", "backward"), "unknown mode 'backward'"),
        (("rms_norm", "--mode", ""), "write fwd, bwd or full"),
        (("rms_norm", "--device", "gpu7"), "cannot use --device gpu7"),
        (("rms_norm", "--device", "meta"), "cannot use --device meta"),
        (("rms_norm", "--budget", "nan"), "'nan' is not a positive number of seconds"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, text):
    code, _, err = said(capsys, *arguments)
    assert code == 2 and text in err
