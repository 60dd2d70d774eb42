"""`liger-hw compile`: the table, the JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest
from harness import printed

from liger_hw.cli import main

pytestmark = pytest.mark.aot


def test_table(capsys):
    out = printed(capsys, "compile", "--target", "gfx942", "--ops", "softmax", "--workers", "1", "--depth", "quick")
    assert "softmax.fwd" in out and "softmax.bwd" in out and out.strip().endswith("0 with spills")


def test_lines_and_progress(capsys, monkeypatch):
    """A line has its dtype and options; progress goes to stderr, also if that is no terminal."""
    from liger_hw.cli import launches as command

    monkeypatch.setattr(command.StatusLine, "EVERY", 0.0)
    assert main(["compile", "--target", "gfx1151", "--ops", "softmax", "--workers", "1", "--depth", "deep"]) == 0
    said = capsys.readouterr()
    lines = [line for line in said.out.splitlines() if line.startswith("gfx1151")]
    assert {line.split()[-1] for line in lines} >= {"bfloat16", "float32"} and len(lines) == len(set(lines))
    assert "gfx1151 softmax: tracing its launches" in said.err and f"[{len(lines)}/{len(lines)}] kernels" in said.err


def test_evidence(capsys):
    what = ["--target", "sm90,gfx1100", "--ops", "softmax", "--dtype", "fp32", "--depth", "quick"]
    found = json.loads(printed(capsys, "compile", *what, "--json", "--workers", "1"))
    assert found["kind"] == "certificates" and found["targets"] == ["sm90", "gfx1100"] and found["ops"] == ["softmax"]
    assert found["triton"] and found["date"] and found["depth"] == "quick"
    records = found["certificates"]
    assert {c["target"] for c in records} == {"sm90", "gfx1100"}
    assert {c["tunable"] for c in records} == {"softmax.fwd", "softmax.bwd"}
    for c in records:
        assert not c["error"] and not c["illegal"] and c["workload"]
        assert c["dtype"] == "float32" and c["op"] == "softmax"
        assert c["resources"]["registers"] > 0 and c["resources"]["threads"] <= 1024


def test_a_target_without_a_compiler(capsys):
    assert main(["compile", "--target", "bmg", "--ops", "softmax", "--depth", "quick", "--workers", "1", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["certificates"]
    assert records and {c["level"] for c in records} == {"ttir"}


def test_depths(monkeypatch):
    """Deeper compiles more, and nothing less."""
    from liger_hw import registry
    from liger_hw.autotune import compile as aot
    from liger_hw.backends import known_target

    monkeypatch.setattr(aot, "trace", lambda *args, **options: ["one launch"])
    for op in registry.ops().values():
        quick, deep, full = (
            [(c.workload, c.dtype, str(c.options)) for c, _ in aot.trace_cases(op, known_target("sm90"), depth)]
            for depth in aot.DEPTHS
        )
        assert len(quick) == 1 and len(deep) == len(op.options) + 1
        assert len(full) == 2 * len(op.workloads) * len(op.options)
        assert set(quick) <= set(deep) <= set(full)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--target", "gfx9000"], "unknown architecture 'gfx9000'"),
        (["--target", "cpu"], "cpu compiles nothing"),
        (["--target", ","], "',' is empty; write architectures joined by commas"),
        (["--target", "sm90", "--ops", ""], "'' is empty; write names joined by commas"),
        (["--target", "sm90", "--ops", "rms_nrom"], "did you mean rms_norm"),
    ],
)
def test_refusals(capsys, argv, complaint):
    assert complaint in printed(capsys, "compile", *argv, code=2)
