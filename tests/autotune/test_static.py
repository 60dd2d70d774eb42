"""Choosing without the device: what is read from a kernel's text, the model of its time, and the tuner around both."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import static_regret
from harness import printed

from liger_hw import registry
from liger_hw.autotune import static
from liger_hw.autotune.compile import Certificate, Launch
from liger_hw.autotune.jobs import OUT_OF_BUDGET, Job, Result
from liger_hw.autotune.ttir import Access, accesses
from liger_hw.backends import LaunchConfig, backend, known_target
from liger_hw.backends.assembly import Assembly
from liger_hw.backends.base import Resources
from tests.autotune.fakes import H200, other_config, tunable

ROOT = Path(__file__).resolve().parents[2]

# -- TTIR ------------------------------------------------------------------------------------------------------------

TTIR = """
module {
  tt.func public @k(%X_ptr: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("X_ptr"(#l)), %Y_ptr: !tt.ptr<f32> loc("Y"(#l)), %n: i32 loc(#l)) attributes {noinline = false} {
    %0 = tt.splat %X_ptr : !tt.ptr<bf16> -> tensor<2x64x!tt.ptr<bf16>> loc(#l1)
    %1 = tt.addptr %0, %off : tensor<2x64x!tt.ptr<bf16>>, tensor<2x64xi32> loc(#l1)
    %2 = tt.load %1, %m, %c : tensor<2x64x!tt.ptr<bf16>> loc(#l1)
    %s = scf.for %i = %a to %b step %c iter_args(%p = %1, %acc = %z) -> (tensor<2x64x!tt.ptr<bf16>>, tensor<2x64xf32>)  : i32 {
      %3 = tt.load %p, %m : tensor<2x64x!tt.ptr<bf16>> loc(#l2)
      %r = "tt.reduce"(%3) <{axis = 1 : i32}> ({
      ^bb0(%x: f32 loc(callsite(#l1 at #l2)), %y: f32 loc(#l2)):
        %add = arith.addf %x, %y : f32 loc(#l2)
        tt.reduce.return %add : f32 loc(#l2)
      }) : (tensor<2x64xf32>) -> tensor<2xf32> loc(#l2)
      %4 = tt.addptr %p, %step : tensor<2x64x!tt.ptr<bf16>>, tensor<2x64xi32> loc(#l2)
      scf.yield %4, %acc : tensor<2x64x!tt.ptr<bf16>>, tensor<2x64xf32> loc(#l2)
    } loc(#l2)
    scf.if %cond {
      tt.store %Y_ptr, %v : !tt.ptr<f32> loc(#l3)
    } else {
      %5 = tt.splat %Y_ptr : !tt.ptr<f32> -> tensor<32x!tt.ptr<f32>> loc(#l3)
      %6 = tt.addptr %5, %o : tensor<32x!tt.ptr<f32>>, tensor<32xi32> loc(#l3)
      tt.store %6, %w, %m : tensor<32x!tt.ptr<f32>> loc(#l3)
    } loc(#l3)
    tt.return loc(#l)
  } loc(#l)
} loc(#l)
"""  # noqa: E501


def test_accesses_are_followed_back_to_arguments():
    """Through splats, additions and a loop's arguments; of two branches the one that moves more counts."""
    found = accesses(TTIR, (0, 3, 7))
    assert found == [Access(0, "load", 256, False), Access(0, "load", 256, True), Access(3, "store", 128, False)]


def test_an_access_that_cannot_be_told_is_said():
    with pytest.raises(ValueError, match="3 parameters, expected 2"):
        accesses(TTIR, (0, 1))
    with pytest.raises(ValueError, match="cannot tell which argument"):
        accesses(TTIR.replace("%2 = tt.load %1", "%2 = tt.load %lost"), (0, 1, 2))


def test_instructions_in_loops():
    text = "L0:\n add 1\nL1:\n mul 2\nL2:\n mul 3\n bra L2\n sub 4\n bra L1\n end 5\n bra L3\nL3:\n last 6"
    line = re.compile(r"^ (add|mul|sub|end|last)(.*)"), re.compile(r"^(L\d):"), re.compile(r"bra (L\d)")
    assembly = Assembly(*line, classify=lambda name, rest: None, kinds=())
    found = [(name, looped) for name, _, looped in assembly.instructions(text)]
    assert found == [("add", False), ("mul", True), ("mul", True), ("sub", True), ("end", False), ("last", False)]


# -- the model -------------------------------------------------------------------------------------------------------

# what a launch takes is held by test_the_published_regret_is_what_the_model_gives, but for spills


def _certificate(**resources) -> Certificate:
    facts = {"registers": 32, "spills": 0, "scratch": 0, "shared": 32, "threads": 256, "occupancy": 1.0}
    facts |= {"instructions": {"load": 2, "store": 2, "barrier": 2, "shuffle": 8, "other": 230}}
    config = LaunchConfig({"BLOCK_SIZE": 4096}, 8)
    launch = Launch(H200, "x.fwd", (4096, 14, 2), "explicit", config, "m:k", (), (), (16384,), (1 << 27, 1 << 27))
    moved = Access(0, "load", 8192, False), Access(1, "store", 8192, False)
    return Certificate(launch, Resources(**{**facts, **resources}), accesses=moved)


def test_spills_make_a_launch_slower():
    spilling = _certificate(
        instructions={"load": 2, "store": 2, "barrier": 2, "shuffle": 8, "other": 230, "spill": 400}
    )
    assert static.time_of([spilling]) > 1.02 * static.time_of([_certificate()])


def test_what_cannot_be_modelled_is_said():
    with pytest.raises(ValueError, match="not one block fits"):
        static.time_of([_certificate(occupancy=0.0)])
    with pytest.raises(ValueError, match="no idea"):
        static.time_of([replace(_certificate(), unread="no idea")])


@pytest.mark.parametrize("arch", [a for v in ("cuda", "rocm", "xpu") for a in backend(v).known_archs()])
def test_every_architecture_has_a_pace(arch):
    target = known_target(arch)
    pace = backend(target.vendor).pace(target)
    assert 1 < pace.clock < 3 and pace.issue in (1, 4) and 400 < pace.latency < 1000


# -- the tuner -------------------------------------------------------------------------------------------------------


class FakePool:
    """A pool of compile workers; `answer(config)` has the resources that differ."""

    def __init__(self, answer) -> None:
        self.answer, self.seen = answer, {}

    def submit(self, name, call, launch):
        tensors = [i for i, arg in enumerate(launch.args) if isinstance(arg, tuple) and arg[1] == "bfloat16"]
        self.seen[name] = launch.config, tensors

    def wait(self, name):
        config, tensors = self.seen[name]  # x first, y last
        threads, tile = 32 * config.num_warps, config.blocks["BLOCK_SIZE"] * config.blocks["ROWS"]
        each = max(1, tile // threads // 8)  # accesses of 16 bytes
        found = self.answer(config)
        if "error" in found:
            return {"error": found["error"]}
        resources = {"registers": 32, "spills": 0, "scratch": 0, "shared": 32, "threads": threads, "looped": {}}
        resources["occupancy"] = max(1, 2048 // threads) * threads / 2048
        resources |= {"loads": {128: each}, "stores": {128: each}}
        resources["instructions"] = {"load": each, "store": each, "barrier": 2, "other": 80 * each}
        moved = [[tensors[0], "load", 2 * tile, False], [tensors[-1], "store", 2 * tile, False]]
        return {"resources": {**resources, **found}, "accesses": moved}


JOB = Job("rms_norm", "fwd", (4096, 14, 2), (16384, 4096), "bfloat16")


def _choose(answer, **more):
    pool, saved = FakePool(answer), {}
    tuner = static.StaticTuner(H200, pool, save=lambda name, entry: saved.setdefault(name, entry) is entry, **more)
    (result,) = tuner.run([JOB])
    return result, saved, pool


HEURISTIC = tunable().heuristic(H200, JOB.key)


@pytest.mark.aot
def test_the_best_by_the_model_is_stored():
    wanted = other_config(tunable(), H200, JOB.key)
    wanted = replace(wanted, hint=HEURISTIC.hint)
    crowd = {"load": 2, "store": 2, "barrier": 2, "other": 4000}
    result, saved, _ = _choose(lambda config: {} if config == wanted else {"instructions": crowd})
    assert result.config == wanted.to_json() and result.gain > static.MARGINS["binary"] and result.stored
    (name, entry) = saved.popitem()
    assert name == ("rms_norm", "fwd", JOB.key) and entry.version == tunable().version
    assert entry.provenance["kind"] == "static" and entry.provenance["predicted_us"] == result.winner_us
    assert {"registers", "spills", "shared", "occupancy", "triton", "date", "sizes"} <= set(entry.provenance)
    assert {k["level"] for k in result.evidence["kernels"]["winner"]} == {"binary"}
    json.dumps(result.to_json())


@pytest.mark.aot
def test_a_small_gain_is_not_kept():
    result, saved, _ = _choose(lambda config: {})
    assert (
        result.heuristic_us == result.winner_us
        and not saved
        and result.config == HEURISTIC.to_json()
        and result.note == "the heuristic stays"
    )


@pytest.mark.aot
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"error": "PassManager::run failed"}, "does not compile"),
        ({"shared": 300_000}, "illegal"),
        ({"registers": 255, "threads": 1024}, "illegal"),
        ({"spills": 64}, "spills"),
    ],
)
def test_unfit_candidates_are_dropped(bad, said):
    slow = {"load": 2, "store": 2, "barrier": 2, "other": 4000}
    result, saved, _ = _choose(lambda config: {"instructions": slow} if config == HEURISTIC else bad)
    assert not saved and result.failed == result.tried - 1 and result.config == HEURISTIC.to_json()
    assert any(said in reason for reason in result.evidence["dropped"])


@pytest.mark.aot
def test_without_a_heuristic_that_compiles_there_is_no_choice():
    result, saved, _ = _choose(lambda config: {"error": "no"})
    assert not saved and "cannot be evaluated: does not compile: no" in result.error


@pytest.mark.aot
def test_the_budget_ends_a_run(monkeypatch):
    now = [0.0]

    def answer(config):
        now[0] += 10
        return {}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tuner = static.StaticTuner(H200, FakePool(answer), candidates=2)
    results = list(tuner.run([JOB] * 3, budget=5))
    assert [bool(r.heuristic_us) for r in results] == [True, False, False]
    assert results[1].note == "skipped: the budget is spent" and not results[1].error


@pytest.mark.aot
def test_no_more_is_compiled_than_asked_for():
    result, _, pool = _choose(lambda config: {}, candidates=8)
    assert 6 <= result.tried <= 9 and len({config for config, _ in pool.seen.values()}) <= 9


@pytest.mark.aot
def test_an_interrupted_command_shows_what_it_has(capsys, clean_registry, monkeypatch):
    from liger_hw.cli import main

    def run(tuner, jobs, budget):
        yield Result(jobs[0], heuristic_us=2.0, winner_us=2.0, note="the heuristic stays")
        raise KeyboardInterrupt

    monkeypatch.setattr(static.StaticTuner, "run", run)
    words = ["autotune", "--device", "gfx942", "--ops", "relu_squared", "--shapes", "4096x4096"]
    assert main([*words, "--json"]) == 130
    data = json.loads(capsys.readouterr().out)
    assert data["interrupted"] and len(data["results"]) == 1
    assert main(words) == 130
    out, err = capsys.readouterr()
    assert "relu_squared.fwd 4096x4096: " in out and "nothing is predicted" not in err


@pytest.mark.aot
def test_a_budget_is_shared_among_architectures_and_said_once(capsys, clean_registry, monkeypatch):
    from liger_hw.backends import backend

    given = []

    def run(tuner, jobs, budget):
        given.append(budget)
        for job in jobs:
            yield Result(job, note=OUT_OF_BUDGET)

    monkeypatch.setattr(static.StaticTuner, "run", run)
    out = printed(capsys, "autotune", "--device", "xpu", "--ops", "relu_squared", "--budget", "100")
    archs = len(backend("xpu").known_archs())
    assert len(given) == archs and given[0] <= 100 / archs < given[-1]
    assert out.count("relu_squared") == 0 and "were not begun: the budget of 100 s is spent" in out


@pytest.mark.aot
def test_candidates_are_dropped_and_kernels_fail(capsys, clean_registry, monkeypatch):
    """Candidates are "dropped" and kernels "failed" in the lines, the table and the last line."""

    def run(tuner, jobs, budget):
        for job in jobs:
            yield Result(job, heuristic_us=2.0, winner_us=2.0, tried=22, failed=11, evidence={"kernels": {}})

    monkeypatch.setattr(static.StaticTuner, "run", run)
    out = printed(capsys, "autotune", "--device", "bmg", "--ops", "relu_squared", "--shapes", "4096x4096")
    assert "22 tried (11 of them dropped)" in out and "of 2 kernels and keys 0 stored, 0 failed" in out
    assert out.count("failed") == 1


@pytest.mark.aot
@pytest.mark.parametrize(("arch", "kind"), [("gfx1100", "static"), ("bmg", "modelled")])
def test_the_command(arch, kind, capsys, clean_registry):
    """A choice for a device that is not here; its entry then answers for that device."""
    import torch

    from liger_hw.cli import main

    words = ["--ops", "relu_squared", "--shapes", "4096x4096", "--candidates", "4", "--workers", "2"]
    assert main(["autotune", "--device", arch, *words, "--json"]) == 0
    said = capsys.readouterr()
    assert f"{arch} is not in this machine" in said.err and f"`{kind}`" in said.err
    found = json.loads(said.out)
    assert found["kind"] == "static" and {r["variant"] for r in found["results"]} == {"fwd", "bwd"}
    for result in found["results"]:
        assert not result["error"] and result["heuristic_us"] > 0 and result["tried"] > 1
        assert {k["level"] for k in result["evidence"]["kernels"]["heuristic"]} == {
            "binary" if kind == "static" else "ttir"
        }
    stored = [r for r in found["results"] if r["stored"]]
    for result in stored:
        registry.reload()
        target = known_target(arch)
        answers = {e.tunable: e for e in registry.explain("relu_squared", (4096, 4096), torch.bfloat16, target)}
        first = answers[f"relu_squared.{result['variant']}"].candidates[0]
        assert first.config.to_json() == result["config"] and first.provenance["kind"] == kind


# -- how good it is --------------------------------------------------------------------------------------------------


def test_the_published_regret_is_what_the_model_gives(monkeypatch, tmp_path):
    """benchmarks/results/static-regret-h200.json follows from the measurements beside it and the code's constants."""
    results = ROOT / "benchmarks" / "results"
    made = tmp_path / "regret.json"
    monkeypatch.setattr(
        sys, "argv", ["x", "report", str(results / "static-measurements-h200.json.gz"), "-o", str(made)]
    )
    static_regret.main()
    now, published = json.loads(made.read_text()), json.loads((results / "static-regret-h200.json").read_text())
    assert now["as_shipped"] == published["as_shipped"] and now["by_launch"] == published["by_launch"]
    assert now["as_shipped"]["regret"]["mean"] <= 0.05 and now["as_shipped"]["regret"]["p95"] <= 0.15


def test_the_page_has_the_published_regret():
    published = json.loads(static_regret.PUBLISHED.read_text())
    said = static_regret.PAGE.read_text().split(static_regret.MARKS[0])[1].split(static_regret.MARKS[1])[0]
    assert said.strip() == static_regret.table(published), "run: python benchmarks/static_regret.py page"
    assert f"{published['as_shipped']['regret']['mean']:.1%}" in said
