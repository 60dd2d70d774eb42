"""The table: cases, rows, failing arms, budgets, accuracy. On the CPU, at tiny sizes."""

from __future__ import annotations

import time

import pytest
import torch
from harness import ONE_OF_A_FAMILY

from liger_hw import registry
from liger_hw.bench import ops, peers, report
from liger_hw.bench.timing import Budget, Meter, OutOfBudget


@pytest.fixture
def rms():
    return ops.cases(["rms_norm"], ["32x64"], torch.float32)


def run(cases, **options):
    options = {"against": ("torch",), "repeats": 1, "copy_rate": 10.0, **options}
    return ops.bench(cases, "cpu", **options)


def test_cases_are_workloads_or_sizes():
    op = registry.get_op("rms_norm")
    assert [case.label for case in ops.cases(["rms_norm"])] == list(op.workloads)
    assert [case.sizes for case in ops.cases(["rms_norm"], ["mistral_7b", "7x9"])] == [(16384, 4096), (7, 9)]
    assert {case.op.name for case in ops.cases([])} == set(registry.ops())


@pytest.mark.parametrize("size", ("7x9x3x5x5x5x5", "0x4", "mistral_8b", "x", "4x"))
def test_a_size_no_op_takes_is_refused(size):
    with pytest.raises(ValueError, match=f"no op takes size '{size}'.*n_rows x n_cols or mistral_7b"):
        ops.cases(["rms_norm"], [size])


def test_a_row_has_every_figure(rms):
    rows = run(rms, modes=("fwd", "bwd", "full"))
    modes = [(arm, mode) for arm in (peers.OURS, "torch") for mode in ("fwd", "bwd", "full")]
    assert [(row["arm"], row["mode"]) for row in rows] == modes
    for row in rows:
        assert row["status"] == "ok" and row["method"] == "wall" and row["peak_mib"] is None
        assert row["sizes"] == [32, 64] and row["floor"] == "copy" and row["dtype"] == "float32"
        assert row["error_out"] < 1e-6 and row["error_grad"] < 1e-6
        assert set(row["ms"]) == {"median", "p20", "p80", "repeats", "samples"}
    by_mode = {row["mode"]: row for row in rows if row["arm"] == peers.OURS}
    assert by_mode["full"]["floor_ms"] == pytest.approx(5 * 32 * 64 * 4 / 10e6)
    assert by_mode["fwd"]["floor_ms"] == pytest.approx((2 * 32 * 64 + 64) * 4 / 10e6)
    assert by_mode["full"]["floor_ms"] == pytest.approx(by_mode["fwd"]["floor_ms"] + by_mode["bwd"]["floor_ms"])
    assert by_mode["full"]["share"] == pytest.approx(by_mode["full"]["floor_ms"] / by_mode["full"]["ms"]["median"])
    assert {one["tunable"] for one in by_mode["full"]["config"]} == {t.name for t in rms[0].op.tunables}
    assert all(one["layer"] and one["provenance"]["kind"] for one in by_mode["full"]["config"])


@pytest.mark.daily(name=ONE_OF_A_FAMILY)
@pytest.mark.parametrize("name", sorted(registry.ops()))
def test_every_op_can_be_benchmarked(name):
    op = registry.get_op(name)
    sizes = "x".join(str(min(size, 16)) for size in next(iter(op.workloads.values())))
    rows = run(ops.cases([name], [sizes], torch.float32))
    assert [row["status"] for row in rows] == ["ok", "ok"], [row["note"] for row in rows]
    for row in rows:
        assert row["floor_ms"] > 0 and row["error_out"] < 1e-4 and row["error_grad"] < 1e-3


def broken(monkeypatch, build):
    peer = peers.Peer("broken", "torch", "torch", build)
    monkeypatch.setitem(peers.PEERS, "broken", peer)


def test_a_peer_that_never_gets_ready_is_a_row(rms, monkeypatch):
    def build(op):
        def waits(*args, **kwargs):
            while True:
                time.sleep(0.01)

        return waits

    broken(monkeypatch, build)
    limited = ops.at_most  # the others get what they need on a machine that is busy
    monkeypatch.setattr(ops, "at_most", lambda seconds, what: limited(1 if "broken" in what else 600, what))
    ours, bad, torch_ = run(rms, against=("broken", "torch"))
    assert (bad["status"], bad["note"]) == ("error", "TimeoutError: broken was not ready after 1 s")
    assert ours["ms"] and torch_["ms"]


def test_a_peer_that_fails_is_a_row_and_the_others_go_on(rms, monkeypatch):
    def build(op):
        def fails(*args, **kwargs):
            raise RuntimeError("no kernel image\nand a long trace")

        return fails

    broken(monkeypatch, build)
    ours, bad, torch_ = run(rms, against=("broken", "torch"))
    assert (bad["status"], bad["note"], bad["ms"]) == ("error", "RuntimeError: no kernel image", None)
    assert ours["ms"] and torch_["ms"]
    text = report.as_text([ours, bad, torch_])
    assert "failed  broken rms_norm: RuntimeError: no kernel image" in text


def test_a_peer_that_computes_something_else_shows_in_the_error(rms, monkeypatch):
    broken(monkeypatch, lambda op: lambda X, W, eps, *more: 1.1 * op.reference(X, W, eps, *more))
    row = run(rms, against=("broken",))[1]
    assert row["error_out"] == pytest.approx(0.1, rel=1e-3) and row["error_grad"] == pytest.approx(0.1, rel=1e-3)


def test_a_budget_ends_the_run_with_what_was_measured():
    budget, rows = Budget(3600), []

    def keep(found):
        rows.extend(found)
        budget.seconds = 0.0

    with pytest.raises(OutOfBudget):
        run(ops.cases(["rms_norm"], ["8x16", "16x16"], torch.float32), budget=budget, on_rows=keep)
    assert [row["sizes"] for row in rows] == [[8, 16]] * 2


def test_inputs_that_cannot_be_made_are_rows_too(monkeypatch):
    op = registry.get_op("rms_norm")

    def too_big(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    case = ops.Case(op, "8x16", (8, 16), torch.float32)
    monkeypatch.setattr(ops, "make_inputs", too_big)
    rows = run([case])
    assert {row["status"] for row in rows} == {"error"} and "out of memory" in rows[0]["note"]


def test_accuracy_takes_a_subset_of_the_rows():
    case = ops.cases(["rms_norm"], ["65536x64"], torch.float32)[0]
    meter = Meter("cpu")
    check = ops.Accuracy(case, meter, ops.make_inputs(case, case.sizes, meter.device, 0))
    assert check.sizes == (16384, 64)
    assert max(check.of(case.op.reference)) < 1e-6
