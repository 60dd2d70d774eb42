"""`liger-hw bench` as a user types it."""

from __future__ import annotations

import json

import harness
import pytest
import torch

from liger_hw.bench import moe, training
from liger_hw.bench.cases import make_inputs
from liger_hw.cli import COMMANDS

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def command(monkeypatch):
    if "bench" not in COMMANDS:
        monkeypatch.setitem(COMMANDS, "bench", "benchmarks")


def said(capsys, *argv):
    return harness.said(capsys, "bench", *argv)


def test_an_op_against_torch(tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ("rms_norm", "--sizes", "8x16", "--dtype", "fp32", "--against", "torch", "--device", "cpu")
    code, out, err = said(capsys, *arguments, "--json", str(path), "--repeats", "1")
    assert code == 0 and "wall clock on a CPU" in out and "[1/1]" in err
    document = json.loads(path.read_text())
    assert document["complete"] and document["machine"]["copy_gb_s"] > 0
    assert [row["arm"] for row in document["rows"]] == ["liger_hw", "torch"]
    assert {"device", "driver", "torch", "triton", "liger_hw", "commit", "date", "config"} <= set(document["rows"][0])


def test_help_names_every_arm(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # no name is broken at a hyphen
    arms = said(capsys, "--help")[1].partition("--arms ARMS  ")[2].partition("(default")[0]
    assert arms.strip() == "of " + ", ".join(training.ARMS)


def test_each_case_is_named_before_it_runs(capsys):
    arguments = ("--sizes", "8x16,9x16", "--dtype", "fp32", "--against", "torch", "--device", "cpu", "--repeats", "1")
    _, _, err = said(capsys, "rms_norm", *arguments)
    lines = err.splitlines()
    assert lines[0].startswith("no GPU: torch's reference path")
    assert lines[1].startswith("[1/2] rms_norm 8x16 float32: liger_hw, torch; ") and lines[1].endswith(" s so far")
    assert lines[3].startswith("[2/2] rms_norm 9x16")


def test_experts(tmp_path, capsys):
    """Two numbers of tokens against transformers' own; an implementation that is not here is said to be absent."""
    path = tmp_path / "moe.json"
    arguments = ("moe", "--sizes", "1x16x8x6x2", "--tokens", "5,24", "--routing", "skewed", "--dtype", "fp32")
    arguments += ("--device", "cpu", "--repeats", "1", "--against", "eager,liger", "--json", str(path))
    code, out, err = said(capsys, *arguments)
    assert code == 0 and "first call s" in out and "liger" in out
    rows = {(row["sizes"][0], row["arm"]): row for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == {(n, arm) for n in (5, 24) for arm in ("liger_hw", "eager", "liger")}
    for n in (5, 24):
        for arm in ("liger_hw", "eager"):
            row = rows[n, arm]
            assert row["status"] == "ok" and row["error_out"] < 1e-5 and row["error_grad"] < 1e-5, row
            assert row["floor"] == "gemm" and row["floor_ms"] > 0 and row["first_seconds"] > 0
        assert rows[n, "liger"]["status"] == "absent"


def test_without_a_gpu_experts_are_small(capsys):
    code, out, err = said(capsys, "moe", "--device", "cpu", "--against", "eager", "--repeats", "1")
    sizes = [int(n) for n in err.splitlines()[1].split()[2].rstrip(":").split("x")]
    assert code == 0 and max(sizes) < 64 and "liger_hw" in out


@pytest.mark.parametrize(("routing", "share"), [("uniform", 1), ("skewed", 10)])
def test_routing_of_experts(routing, share):
    (case,) = moe.layers(["4000x8x4x64x4"], (), routing, torch.float32)
    index = make_inputs(case, case.sizes, torch.device("cpu"), 3).args[3]
    assert all(len(set(row)) == 4 for row in index.tolist())
    counts = index.flatten().bincount(minlength=64)
    assert counts[0] == pytest.approx(share * 250, rel=0.2 if share == 1 else 1e-9)
    assert counts[1:].float().mean() == pytest.approx((16000 - float(counts[0])) / 63)


def test_json_to_standard_output_is_only_json(capsys):
    arguments = ("rms_norm", "--sizes", "8x16", "--dtype", "fp32", "--against", "torch", "--device", "cpu")
    code, out, _ = said(capsys, *arguments, "--repeats", "1", "--json")
    assert code == 0 and len(json.loads(out)["rows"]) == 2


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
        (("e2e", "--model", "gpt5"), "unknown model 'gpt5'"),
        (("e2e", "rms_norm"), "e2e takes no op"),
        (("float8", "rms_norm"), "float8 takes no op"),
        (("float8", "--device", "cpu"), "a small one: liger-hw bench float8 --hidden 64"),
        (("moe", "rms_norm"), "moe takes no op"),
        (("moe", "--sizes", "8x8"), "no op takes size"),
        (("--model", "llama3"), "--model is an option of `liger-hw bench e2e`, and changes nothing for ops"),
        (("rms_norm", "--tokens", "64"), "--tokens is an option of `liger-hw bench moe`, and changes nothing for ops"),
        (("moe", "--steps", "3"), "--steps is an option of `liger-hw bench e2e`, and changes nothing for moe"),
        (("e2e", "--sizes", "8x8"), "--sizes is an option of `liger-hw bench`, and changes nothing for e2e"),
        (("e2e", "--hidden", "64", "--text", "no/such.txt"), "cannot read --text no/such.txt: No such file"),
        (("moe", "--tokens", "0"), "0"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, text):
    code, _, err = said(capsys, *arguments)
    assert code == 2 and text in err
