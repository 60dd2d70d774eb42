"""benchmarks/activations.py and longest_sequence.py at toy size on the CPU: arms, budgets, rivals, the search."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from harness import python

pytest.importorskip("transformers")

import activations
import long_context as long


def test_arms_of_a_toy(monkeypatch):
    real, calls = activations.train_step, []

    def fails_at_mlp(model, optimizer, ids):
        calls.append(ids.shape)
        if len(calls) == 4:  # two steps of keep, two of cheap
            raise torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")
        return real(model, optimizer, ids)

    monkeypatch.setattr(activations, "train_step", fails_at_mlp)
    options = argparse.Namespace(
        **{"model": "llama3", "layers": 3, "batch": 1, "seq": 8, "hidden": 32, "device": "cpu", "no_window": False},
        **{"rounds": 1, "steps": 1, "budgets": [0.01, 60.0], "rivals": 1},
    )
    found = {row["arm"]: {"library": "liger_hw", **row} for row in activations.arms("liger_hw", options)}
    assert list(found) == ["keep", "cheap", "mlp", "full", "0.01GiB", "60GiB"]
    assert found["cheap"]["error"].startswith("tried to allocate") and found["cheap"]["levels"] == "cheap x3"
    assert "needs" in found["0.01GiB"]["error"] and "tokens_per_second" not in found["0.01GiB"]
    assert found["60GiB"]["levels"] == "keep x3" and found["60GiB"]["predicted_speed"] == 1.0
    assert found["mlp"]["levels"] == "mlp x2, cheap x1" and found["mlp"]["tokens_per_second"] > 0
    text = activations.as_text(list(found.values()))
    assert "tried to allocate" in text and "full x2, cheap x1" in text


def test_long_context(tmp_path, monkeypatch):
    """A narrow model, causal and by documents, at a level and without; the plan stands beside each step."""
    monkeypatch.setattr(long, "DOCUMENT", 32)
    out = tmp_path / "long.json"
    words = ["64:2", "64:2:documents:tiled", "96:3:documents"]
    monkeypatch.setattr(sys, "argv", ["long_context", "--device", "cpu", "--hidden", "64", "--out", str(out), *words])
    assert long.main() == 0
    rows = json.loads(out.read_text())["runs"]
    assert [(row["tokens"], row["levels"], row["attention"]) for row in rows] == [
        (64, "keep x2", "causal"),
        (64, "tiled x2", "documents"),
        (96, "keep x3", "documents"),
    ]
    assert all(row["seconds"] > row["forward_seconds"] > 0 and row["planned_gib"] > 0 for row in rows)
    q, k = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    for strided in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        y, _ = long.attend(32, None, strided, k, k, None, 0.5)
        options = {"is_causal": True, "enable_gqa": True, "scale": 0.5}
        parts = (F.scaled_dot_product_attention(*(t[:, :, i : i + 32] for t in (q, k, k)), **options) for i in (0, 32))
        torch.testing.assert_close(y, torch.cat([*parts], 2).transpose(1, 2))


@pytest.mark.full  # three processes import torch
def test_long_context_of_two_processes(tmp_path, monkeypatch):
    """Half the tokens and half of each parameter in each: the losses of one process, step after step."""
    outs = [tmp_path / "one.json", tmp_path / "two.json"]
    arguments = [*("--device", "cpu", "--hidden", "64", "--lr", "1e-3"), *["64:2"] * 3, "--out"]
    monkeypatch.setattr(sys, "argv", ["long_context", *arguments, str(outs[0])])
    assert long.main() == 0
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", long.__file__
    python(*launcher, *arguments, outs[1])
    one, two = (json.loads(out.read_text()) for out in outs)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    losses = [[row["loss"] for row in results["runs"]] for results in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=0.005) and losses[0][2] < losses[0][0] - 0.3
