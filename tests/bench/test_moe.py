"""benchmarks/moe.py: experts of a layer against transformers' own, routed as a router routes."""

from __future__ import annotations

import json

import moe
import pytest
import torch

from liger_hw.bench.cases import make_inputs


def test_experts(tmp_path, capsys):
    """Two numbers of tokens against transformers' own; an implementation that is not here is said to be absent."""
    path = tmp_path / "moe.json"
    words = ["--sizes", "1x16x8x6x2", "--tokens", "5,24", "--routing", "skewed", "--dtype", "fp32", "--device", "cpu"]
    assert moe.main([*words, "--repeats", "1", "--against", "eager,liger", "--json", str(path)]) == 0
    assert "first call s" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["complete"]
    rows = {(row["sizes"][0], row["arm"]): row for row in document["rows"]}
    assert rows.keys() == {(n, arm) for n in (5, 24) for arm in ("liger_hw", "eager", "liger")}
    for n in (5, 24):
        for arm in ("liger_hw", "eager"):
            row = rows[n, arm]
            assert row["status"] == "ok" and row["error_out"] < 1e-5 and row["error_grad"] < 1e-5, row
            assert row["floor"] == "gemm" and row["floor_ms"] > 0 and row["first_seconds"] > 0
        assert rows[n, "liger"]["status"] == "absent"


@pytest.mark.parametrize(("routing", "share"), [("uniform", 1), ("skewed", 10)])
def test_routing_of_experts(routing, share):
    (case,) = moe.layers(["4000x8x4x64x4"], (), routing, torch.float32)
    index = make_inputs(case, case.sizes, torch.device("cpu"), 3).args[3]
    assert all(len(set(row)) == 4 for row in index.tolist())
    counts = index.flatten().bincount(minlength=64)
    assert counts[0] == pytest.approx(share * 250, rel=0.2 if share == 1 else 1e-9)
    assert counts[1:].float().mean() == pytest.approx((16000 - float(counts[0])) / 63)
