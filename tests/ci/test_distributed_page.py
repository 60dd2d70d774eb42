"""docs/distributed-matrix.md says what the kept records say, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci import distributed_page as pages

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"rms_norm_fwd": 20, "swiglu_fwd": 8, "rope": 16, "fused_linear_cross_entropy_fwd": 4}


def record(**changes):
    one = {"device": "cpu", "engine": "ddp", "adapter": "full", "ranks": 2, "compute": "float32"}
    one |= {"loss_error": 1e-7, "gradient_error": 2e-6, "kernels": GOOD, "versions": {"torch": "2.13"}}
    return {**one, **changes}


def row(pages, tmp_path, *records):
    """The table's line for DDP with all weights, from these records as the tests leave them."""
    for number, one in enumerate(records):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    runs = pages.collect(tmp_path, "0123456789abcdef")
    lines = pages.table({"CPU, gloo": runs.get("cpu"), "NCCL": runs.get("cuda")}, pages.load_matrix()).splitlines()
    return next(line for line in lines if line.startswith("| ddp | full |")), lines


def test_the_page_is_current():
    assert pages.main(["--check"]) == 0


def test_what_a_record_says(tmp_path):
    line, lines = row(pages, tmp_path, record())
    assert "same (1e-07) | same (2e-06) | - | rms_norm 20, swiglu 8, rope 16, head 4" in line
    assert "- NCCL: not run." in lines and any("commit 0123456789ab," in line for line in lines)
    assert all(
        "not run" in line
        for line in lines
        if line.startswith("| ") and "ddp | full" not in line and "engine" not in line
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"loss_error": 1e-3}, "**wrong** (1e-03)"),
        ({"gradient_error": float("nan")}, "**wrong** (nan)"),
        ({"kernels": {**GOOD, "swiglu_fwd": 0}}, "**swiglu_fwd ran 0 times, not 8**"),
        ({"failed": "ValueError: no"}, "**failed**: ValueError: no"),
    ],
)
def test_wrong_results_are_marked(tmp_path, changes, words):
    assert words in row(pages, tmp_path, record(**changes))[0]


def test_bfloat16_is_held_against_the_unpatched_engine(tmp_path):
    seen = {"device": "cuda", "compute": "bfloat16", "loss_error": 1e-4, "peak_mib": 60.4}
    seen["unpatched"] = {"loss_error": 2e-4, "gradient_error": 1e-2, "peak_mib": 210.0}
    near = row(pages, tmp_path, record(**seen, gradient_error=1.4e-2))[1]
    expected = "NCCL, bf16 | as near (1e-04, unpatched 2e-04) | as near (1e-02, unpatched 1e-02) | 60, 210 |"
    assert any(expected in line for line in near), near
    far = row(pages, tmp_path, record(**seen, gradient_error=1.6e-2))[1]
    assert any("**wrong** (2e-02, unpatched 1e-02)" in line for line in far), far


def test_records_of_two_environments_are_not_one_run(tmp_path):
    with pytest.raises(ValueError, match="several environments"):
        row(pages, tmp_path, record(), record(versions={"torch": "2.11"}))
