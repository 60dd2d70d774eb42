"""benchmarks/activations.py and longest_sequence.py at toy size on the CPU: arms, budgets, rivals, the search."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from liger_hw.autotune import models
from liger_hw.recompute.planner import Planner

pytestmark = pytest.mark.cpu
pytest.importorskip("transformers")
GIB = 1 << 30


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module


def test_arms_of_a_toy(script, monkeypatch):
    activations = script("activations")
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


def test_rivals_fit_and_are_of_other_levels(script):
    activations = script("activations")
    planner = Planner(models.find("llama-3-8b"), 4, 4096)
    found = activations.budgets(planner, [60, 75, 200], 2)
    assert list(found) == ["60GiB", "75GiB", "75GiB, rival 1", "75GiB, rival 2", "200GiB"]
    assert isinstance(found["60GiB"], activations.NothingFits), "nor would anything be left to compare where all fits"
    chosen = planner.best(75 * GIB)
    for number in (1, 2):
        rival = planner.predict(found[f"75GiB, rival {number}"])
        assert rival.peak <= 75 * GIB and rival.speed <= chosen.speed + 0.005
        assert not set(rival.levels) <= set(chosen.levels)


class Device:
    """Runs what is at most so long; remembers what it was asked."""

    def __init__(self, most):
        self.most, self.asked = most, []

    def __call__(self, level, seq):
        self.asked.append(seq)
        return (2.0, 100.0) if seq <= self.most else None


def test_long_context(script, tmp_path, monkeypatch):
    """A narrow model, causal and by documents, at a level and without; the plan stands beside each step."""
    long = script("long_context")
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
def test_long_context_of_two_processes(script, tmp_path, monkeypatch):
    """Half the tokens and half of each parameter in each: the losses of one process, step after step."""
    long, outs = script("long_context"), [tmp_path / "one.json", tmp_path / "two.json"]
    arguments = [*("--device", "cpu", "--hidden", "64", "--lr", "1e-3"), *["64:2"] * 3, "--out"]
    monkeypatch.setattr(sys, "argv", ["long_context", *arguments, str(outs[0])])
    assert long.main() == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", long.__file__]
    subprocess.run([*launcher, *arguments, str(outs[1])], check=True)
    one, two = (json.loads(out.read_text()) for out in outs)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    losses = [[row["loss"] for row in results["runs"]] for results in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=0.005) and losses[0][2] < losses[0][0] - 0.3


@pytest.mark.parametrize("most, tries, outcomes", [
    (10**9, 3, ["ran", "ran"]),
    (0, 3, ["out of memory"] * 3),
    (0, 2, ["out of memory"] * 2),
    ("first", 3, ["ran", "out of memory"]),
    ("less", 3, ["out of memory", "ran"]),
])  # fmt: skip
def test_the_search(script, most, tries, outcomes):
    longest = script("longest_sequence")
    memory = 139 * GIB
    model = models.find("mistral-7b")

    def at(seq):
        return Planner(model, 1, seq)

    free = Device(10**9)
    lengths = [one["seq"] for one in longest.search("mlp", at, free, memory, 3, longest.Clock(1e9))["tries"]]
    device = Device({"first": lengths[0], "less": lengths[0] - 1}.get(most, most))
    row = longest.search("mlp", at, device, memory, tries, longest.Clock(1e9))
    assert [one["outcome"] for one in row["tries"]] == outcomes
    assert row["longest"] == max((s for s in device.asked if s <= device.most), default=0)
    assert lengths[1] > lengths[0] and all(seq % longest.STEP == 0 for seq in lengths)
    peak = at(lengths[0]).predict(("mlp",) * 31 + ("cheap",)).peak
    more = at(lengths[0] + longest.STEP).predict(("mlp",) * 31 + ("cheap",)).peak
    assert peak <= longest.FIRST * memory < more
    assert "out of memory" in longest.as_text([row]) or "ran" in outcomes


def test_given_lengths_are_tried_as_they_are_and_a_failure_says_its_numbers(script):
    longest = script("longest_sequence")
    device = Device(6000)
    message = (
        "CUDA out of memory. Tried to allocate 6.15 GiB. GPU 0 has a total capacity of 139.80 GiB of which 5.02 GiB is "
        "free. Including non-PyTorch memory, this process has 134.78 GiB memory in use. Of the allocated memory "
        "127.3 GiB is "
        "allocated by PyTorch, and 6.9 GiB is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is "
        "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation"
    )
    device.failure = longest.numbers(message)
    row = longest.search(
        "full",
        lambda seq: Planner(models.find("mistral-7b"), 1, seq),
        device,
        139 * GIB,
        1,
        longest.Clock(1e9),
        [5000, 7000, 3000],
    )
    assert device.asked == [5000, 7000, 3000] and row["longest"] == 5000
    assert [one["outcome"] for one in row["tries"]] == ["ran", "out of memory", "ran"]
    said = row["tries"][1]["failure"]
    assert "failure" not in row["tries"][0] and "allocate 6.15 GiB" in said and "6.9 GiB is reserved" in said
    assert "try setting" not in said


def test_a_try_that_takes_too_long_is_said(script):
    longest = script("longest_sequence")
    device = Device(10**9)
    row = longest.search(
        "full", lambda seq: Planner(models.find("mistral-7b"), 1, seq), device, 139 * GIB, 3, longest.Clock(5)
    )
    assert not device.asked and row["longest"] == 0 and row["tries"][0]["outcome"].startswith("not tried: about")
