"""The losses' own parts of the bench: chunked losses as cases, the floor timed in turn, the error check's sizes; and
the scripts that draw tokens x vocabulary, search the largest head and time a first call, at toy size on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import chunked_losses
import head_sweep
import pytest
import sweep
import torch

from liger_hw import registry
from liger_hw.bench import floors, ops, peers
from liger_hw.bench.cases import Case
from liger_hw.bench.timing import Chain, Meter

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.daily(name=("dpo", "grpo", "jsd_distillation", "kto"))
@pytest.mark.parametrize("name", sorted(chunked_losses.OPS))
def test_a_chunked_loss_is_a_case(name):
    case = Case(chunked_losses.OPS[name], "small", (2, 3, 8, 11), torch.float32)
    rows = ops.bench([case], "cpu", against=("torch",), repeats=1, copy_rate=10.0)
    assert [(row["arm"], row["status"]) for row in rows] == [(peers.OURS, "ok"), ("torch", "ok")]
    for row in rows:
        assert row["floor"] == "gemm" and row["floor_ms"] > 0 and row["config"] is None
        assert row["error_out"] < 1e-6 and row["error_grad"] < 1e-5


@pytest.mark.parametrize("name", sorted(chunked_losses.OPS))
def test_a_chunked_loss_depends_on_what_it_is_given(name):
    """The arms must not agree because nothing flows: every leaf gets a gradient, and another draw another loss."""
    case = Case(chunked_losses.OPS[name], "small", (2, 3, 8, 11), torch.float32)
    drawn = [ops.make_inputs(case, case.sizes, torch.device("cpu"), seed) for seed in (0, 1)]
    values = [case.op.function(*inputs.args) for inputs in drawn]
    assert values[0].item() != values[1].item()
    assert all(grad.norm() > 0 for grad in torch.autograd.grad(values[0], drawn[0].leaves))


def test_the_list_of_losses_has_every_loss():
    words = ("cross_entropy", "jsd", "kl_div", "tvd", "linear_log_probs")
    assert sweep.LOSSES.keys() == {name for name in registry.ops() if name.endswith(words)} | chunked_losses.OPS.keys()
    todo = sweep.cases_of("losses")
    assert {case.op.name for case in todo} == sweep.LOSSES.keys()
    assert {case.dtype for case in todo if case.op.name in ("jsd", "kl_div", "tvd")} == {torch.float32}


def test_the_floor_of_a_head_is_timed_in_turn_with_the_arms(monkeypatch):
    (case,) = ops.cases(["fused_linear_cross_entropy"], ["4x8x16"], torch.float32)
    monkeypatch.setattr(ops, "floors_of", lambda *_: ({"full": 1e9, "fwd": 1e9, "bwd": 1e9}, "gemm"))
    rows = ops.bench([case], "cpu", against=(), modes=("fwd", "bwd", "full"), repeats=1, copy_rate=10.0)
    floors = {row["mode"]: row["floor_ms"] for row in rows}
    assert 0 < floors["fwd"] < 1e3 and 0 < floors["full"] < 1e3
    assert floors["bwd"] == pytest.approx(floors["full"] - floors["fwd"])


def test_a_chain_is_the_products_it_was_given():
    a = Chain(Meter("cpu"), [(3, 5, 4, "nt"), (3, 4, 5, "nn"), (5, 4, 3, "tn")], torch.float32)
    a.burst(1)
    assert [tuple(out.shape) for *_, out in a.products] == [(3, 5), (3, 4), (5, 4)]
    for left, right, out in a.products:
        torch.testing.assert_close(out, left @ right)
    assert a.products[0][1].stride() == (1, 4) and a.products[2][0].stride() == (1, 5)


def test_errors_are_taken_on_fewer_rows_where_the_reference_runs_out_of_memory():
    (case,) = ops.cases(["cross_entropy"], ["64x7"], torch.float32)
    asked = []

    def reference(x, *rest, **options):
        asked.append(x.shape[0])
        if x.shape[0] > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return registry.get_op("cross_entropy").reference(x, *rest, **options)

    small = ops.Case(type(case.op)(**{**vars(case.op), "reference": reference}), case.label, case.sizes, case.dtype)
    meter = Meter("cpu")
    check = ops.Accuracy(small, meter, ops.make_inputs(small, small.sizes, meter.device, 0))
    assert asked == [64, 32, 16] and check.sizes == (16, 7)
    out, grad = check.of(case.op.function)
    assert out < 1e-6 and grad < 1e-6


# -- the scripts -----------------------------------------------------------------------------------------------------


def test_the_sweep_measures_draws_and_names_its_least_share(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "sweep.json", tmp_path / "sweep.png"
    tiny = ["--device", "cpu", "--hidden", "8", "--tokens", "1", "9", "--vocabularies", "50", "77"]
    monkeypatch.setattr(sys, "argv", ["head_sweep.py", *tiny, "--out", str(out)])
    assert head_sweep.main() == 0
    text = capsys.readouterr().out
    assert "least share" in text and "largest fall" in text
    points = json.loads(out.read_text())["points"]
    assert [(p["vocab"], p["tokens"]) for p in points] == [(50, 1), (50, 9), (77, 1), (77, 9)]
    assert head_sweep.plot(str(png), [str(out)]) == 0 and png.stat().st_size > 1000


def test_the_floor_of_an_odd_vocabulary_is_an_even_ones():
    assert [floors.floor_words(vocab) for vocab in (7, 8, 50257, 128256)] == [7, 8, 50256, 128256]
    odd, even = (floors.PRODUCTS["fused_linear_jsd"](2048, 4096, vocab) for vocab in (50257, 50256))
    assert odd == even
