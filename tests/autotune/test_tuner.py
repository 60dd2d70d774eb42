"""The search, on a made-up device."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from liger_hw import registry
from liger_hw.autotune import space, store
from liger_hw.autotune.record import Rejected
from liger_hw.autotune.tuner import Effort, Job, Tuner
from liger_hw.autotune.workers import WorkerDied, WorkerError
from liger_hw.backends import LaunchConfig
from tests.autotune.fakes import FACTS, H200, FakeMeasurer, tunable

KEY = (4096, 13, 2)
JOB = Job("rms_norm", "bwd", KEY, (8192, 4096), "bfloat16")
BWD = tunable("rms_norm.bwd")
START = BWD.heuristic(H200, KEY)
SPACE, _ = space.legal(BWD, H200, KEY)
BEST = next(c for c in reversed(SPACE) if c != START)


def cost(config: LaunchConfig) -> float:
    """Each option that differs from the best configuration's costs 10%."""
    return 10.0 * 1.1 ** space.distance(config, BEST)


class Kept(dict):
    """The lines that a run stored: winners by name, and `lines` in their order."""

    def __init__(self, winners=()):
        super().__init__(winners)
        self.lines = []

    def save(self, name, entry):
        self.lines.append((name, entry))
        if entry.kind == "measured":
            self[name] = entry
        elif entry.kind == "heuristic":
            self.pop(name, None)
        return True

    def of_kind(self, kind):
        return [entry for _, entry in self.lines if entry.kind == kind]


def tune(measure=cost, jobs=(JOB,), kept=None, measurer=None, **kwargs):
    kept = Kept() if kept is None else kept
    measurer = measurer or FakeMeasurer(START, measure, kwargs.pop("noise", 0.0), kwargs.pop("verify", lambda c: ""))
    budget = kwargs.pop("budget", None)
    tuner = Tuner(H200, measurer, facts=kwargs.pop("facts", FACTS), save=kept.save, **kwargs)
    return list(tuner.run(list(jobs), budget=budget)), kept, measurer


def test_it_finds_the_best_and_keeps_its_evidence():
    (result,), kept, measurer = tune()
    assert result.config == BEST.to_json() and result.stored and not result.error
    assert measurer.prepared < len(SPACE), "a search, not a sweep"
    entry = kept["rms_norm", "bwd", KEY]
    assert entry.config == BEST and entry.version == BWD.version
    p = entry.provenance
    assert (
        p["kind"] == "measured" and p["median_us"] == 10.0 and p["heuristic_us"] == pytest.approx(cost(START), abs=1e-3)
    )
    assert p["gain"] == pytest.approx(1 - 10 / cost(START), abs=1e-3)
    assert {"p20", "p80", "device", "driver", "torch", "triton", "date", "noise"} <= set(p)
    assert result.floor_us == 1.0 and result.floor_share == pytest.approx(0.1), "4 MB at 4000 GB/s"


def test_a_gain_within_the_noise_is_not_stored():
    def nearly(config):
        return 10.0 if config == START else 9.8

    (result,), kept, _ = tune(nearly, noise=0.1)
    assert not result.stored and not kept and "heuristic" in result.note
    (result,), kept, _ = tune(nearly, noise=0.001)
    assert result.stored


def test_a_gain_under_one_percent_is_not_stored():
    (result,), kept, _ = tune(lambda config: 10.0 if config == START else 9.95)
    assert not result.stored and not kept


def test_a_winner_must_win_at_other_sizes_of_its_key_too():
    """The best at (8192, 4096) loses at the other sizes, the second best does not and is stored."""
    second = min((c for c in SPACE if c not in (BEST, START)), key=cost)

    def at_both(config):
        return 2 * cost(START) if config == BEST and measurer.sizes != (8192, 4096) else cost(config)

    measurer = FakeMeasurer(START, at_both)
    (result,), kept, _ = tune(measurer=measurer)
    stored = kept["rms_norm", "bwd", KEY]
    assert result.stored and cost(stored.config) == cost(second) and result.note == ""
    also = stored.provenance["also"]
    assert BWD.key(*also["sizes"], 2) == KEY and also["sizes"] != [8192, 4096] and also["gain"] > also["noise"]

    def only_here(config):
        return 10.0 if config == START and measurer.sizes != (8192, 4096) else cost(config)

    measurer = FakeMeasurer(START, only_here)
    (result,), kept, _ = tune(measurer=measurer)
    assert not result.stored and not kept and "same key" in result.note and measurer.sizes == (8192, 4096)


def test_where_the_heuristic_wins_an_older_entry_goes():
    kept = Kept({("rms_norm", "bwd", KEY): "old"})
    (result,), kept, _ = tune(lambda config: 10.0 if config == START else 20.0, kept=kept)
    assert not result.stored and not kept and result.winner_us == 10.0
    (end,) = kept.of_kind("heuristic")
    assert end.config == START and end.provenance["heuristic_us"] == 10.0


def test_a_winner_that_fails_the_reference_is_not_stored():
    (result,), kept, _ = tune(verify=lambda config: "relative error" if config == BEST else "")
    assert result.stored and kept["rms_norm", "bwd", KEY].config != BEST
    (result,), kept, _ = tune(verify=lambda config: "relative error")
    assert not result.stored and not kept


def test_when_every_candidate_fails_nothing_is_stored():
    (result,), kept, _ = tune(lambda config: "out of shared memory")
    assert result.error and not kept
    (result,), kept, _ = tune(lambda config: 10.0 if config == START else "out of shared memory")
    assert not result.error and not kept


@pytest.mark.parametrize("how", ["crash in prepare", "crash in time", "error in prepare", "rejected here"])
def test_a_deadly_candidate_costs_itself_only(how):
    deadly = space.neighbours(SPACE, START)[0]

    def measure(config):
        if config != deadly:
            return cost(config)
        if how == "crash in time":
            return lambda: WorkerDied("crashed (signal 11)")
        if how == "rejected here":
            return Rejected("ValueError: bad")
        return WorkerDied("hung for 90 s") if how == "crash in prepare" else WorkerError("ValueError: bad")

    (result,), kept, measurer = tune(measure)
    assert result.stored and kept["rms_norm", "bwd", KEY].config == BEST
    assert [entry.config for entry in kept.of_kind("refused")] == [deadly]
    assert measurer.opened == (
        2 if how in ("error in prepare", "rejected here") else 3 if "prepare" in how else measurer.opened
    )


def test_a_worker_that_always_dies_ends_the_job_not_the_run():
    second = Job("rms_norm", "fwd", KEY, (8192, 4096), "bfloat16")
    fwd = tunable("rms_norm.fwd")

    class Mixed(FakeMeasurer):
        def open(self, job, sizes):
            self.baseline = START if job.variant == "bwd" else fwd.heuristic(H200, KEY)
            self.cost = (lambda c: WorkerDied("crashed")) if job.variant == "bwd" else (lambda c: 5.0)
            return super().open(job, sizes)

    results, _, _ = tune(jobs=(JOB, second), measurer=Mixed(START, cost))
    assert results[0].error and not results[1].error and results[1].heuristic_us == 5.0


@pytest.mark.parametrize("stage", ["final", "confirm"])
@pytest.mark.parametrize("how", [WorkerDied, WorkerError])
def test_a_heuristic_that_can_no_longer_be_timed_ends_the_job_not_the_run(stage, how):
    """It passed the coarse round, then fails: there is nothing to compare with, so nothing is stored."""
    second = Job("rms_norm", "bwd", (4096, 14, 2), (16384, 4096), "bfloat16")

    class Fading(FakeMeasurer):
        faded = False

        def time(self, arms, rounds):
            late = len(arms) > 1 if stage == "final" else arms.count(START) > 1
            self.faded |= late and self.opened_key == KEY
            if self.faded and START in arms and self.opened_key == KEY:
                self.alive = how is not WorkerDied
                raise how("the device reported an error")
            return super().time(arms, rounds)

        def open(self, job, sizes):
            self.opened_key = job.key
            return super().open(job, sizes)

    results, kept, _ = tune(jobs=(JOB, second), measurer=Fading(START, cost))
    assert "the baseline cannot be timed" in results[0].error and "reported an error" in results[0].error
    assert not results[0].stored and not results[1].error and results[1].stored
    assert set(kept) == {("rms_norm", "bwd", second.key)}
    assert not kept.of_kind("heuristic")


def test_later_keys_start_from_what_was_best_nearby():
    later = Job("rms_norm", "bwd", (4096, 14, 2), (16384, 4096), "bfloat16")
    effort = Effort(first=160, later=12, refine=4)
    results, kept, measurer = tune(jobs=(JOB, later), effort=effort)
    assert [r.config for r in results] == [BEST.to_json()] * 2
    assert results[1].tried <= 12 + 2 * 4 < results[0].tried


def test_the_budget_is_kept_and_time_short_means_less_is_tried(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(FakeMeasurer):
        def prepare(self, config):
            now[0] += 1.0
            return super().prepare(config)

    jobs = [Job("rms_norm", "bwd", (4096, rows, 2), (1 << rows, 4096), "bfloat16") for rows in range(9, 17)]
    results, kept, measurer = tune(jobs=jobs, measurer=Slow(START, cost), budget=100.0)
    assert now[0] < 200 and results[0].heuristic_us
    assert all(r.heuristic_us or "budget" in r.note for r in results)


class Killed(BaseException):
    pass


def test_a_killed_run_resumes_where_it_was(clean_registry):
    """The cache has every measurement, and the second run repeats none of them."""

    class Fragile(FakeMeasurer):
        left = 40

        def time(self, arms, rounds):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return super().time(arms, rounds)

    def again(measurer):
        tuner = Tuner(
            H200,
            measurer,
            facts={**FACTS, "triton": store.triton_version()},
            save=lambda name, entry: store.add(H200, [(name, entry)]),
            known=store.lines_of(H200),
        )
        return next(tuner.run([JOB]))

    with pytest.raises(Killed):
        again(Fragile(START, cost))
    assert [entry.kind for _, entry in store.lines_of(H200)] == ["timed"] * 40
    second = FakeMeasurer(START, cost)
    result = again(second)
    assert result.stored and result.config == BEST.to_json()
    _, _, whole = tune()
    assert second.timed <= whole.timed - 40 + 2
    ((_, entry),) = store.lines_of(H200)
    assert entry.kind == "measured" and entry.config == BEST, "the measurements went with the end of the search"
    # a third run has nothing left to do
    third = FakeMeasurer(START, cost)
    result = again(third)
    assert third.opened == 0 and result.note == "measured by an earlier run" and result.config == BEST.to_json()
    assert result.stored and result.gain == pytest.approx(1 - 10 / cost(START), abs=1e-3)


def test_a_search_that_the_heuristic_won_is_not_repeated():
    _, kept, _ = tune(lambda config: 10.0 if config == START else 20.0)
    (result,), again, measurer = tune(known=kept.lines)
    assert measurer.opened == 0 and not again.lines and not result.stored and result.config == START.to_json()


def test_the_lines_of_another_version_or_triton_do_not_count(monkeypatch):
    _, kept, _ = tune()
    opened = 2  # at the job's sizes, and the winner at other sizes of its key
    _, _, measurer = tune(known=kept.lines)
    assert measurer.opened == 0
    _, _, measurer = tune(known=kept.lines, facts={**FACTS, "triton": "9.9.0"})
    assert measurer.opened == opened
    monkeypatch.setattr(BWD, "version", 99)
    _, _, measurer = tune(known=kept.lines)
    assert measurer.opened == opened


def test_a_cache_that_cannot_be_written_stops_nothing():
    kept = Kept()
    kept.save = lambda name, entry: False
    (result,), _, _ = tune(kept=kept)
    assert not result.stored and "cannot be written" in result.note and result.config == BEST.to_json()


class Pool:
    """Compiles nothing; the best candidate 'crashes the compiler', another needs too much shared memory."""

    def __init__(self, answers):
        self.answers = answers
        self.submitted: dict[str, LaunchConfig] = {}

    def submit(self, name, call, *request):
        self.submitted[name] = request[-1]

    def wait(self, name):
        return self.answers(self.submitted[name])


def test_what_does_not_compile_or_fit_is_never_run():
    greedy = space.neighbours(SPACE, BEST)[0]

    def answers(config):
        if config == BEST:
            return {"error": "the compiler crashed (signal 6)"}
        return {"resources": SimpleNamespace(shared=300_000 if config == greedy else 1000, registers=32, threads=128)}

    ran = []

    def measure(config):
        ran.append(config)
        return cost(config)

    (result,), kept, _ = tune(measure, pool=Pool(answers))
    assert result.stored and BEST not in ran and greedy not in ran


def test_a_pool_that_knows_nothing_changes_nothing():
    (result,), _, _ = tune(pool=Pool(lambda config: {"unknown": "no compiler"}))
    assert result.config == BEST.to_json()


def test_sizes_are_found_for_recorded_keys():
    for name, sizes in (
        ("rms_norm.bwd", (8192, 4096)),
        ("rope.fwd", (4, 4096, 32, 8, 128)),
        ("cross_entropy.fwd", (8192, 128256)),
        ("rms_norm.fwd", (8192, 8191)),
        ("rms_norm.bwd", (8192, 5120)),
        ("layer_norm.fwd", (4096, 5121)),
        ("layer_norm.dw", (8192, 512)),
        ("rope.bwd", (1, 1000, 5, 1, 96)),
    ):
        of, op = tunable(name), registry.get_op(name.split(".")[0])
        for rows in (sizes[0], 2 * sizes[0]):
            key = of.key(rows, *sizes[1:], 2)
            found, dtype = space.sizes_for(op, of, key)
            assert of.key(*found, 2) == key and dtype == "bfloat16"
    assert space.sizes_for(registry.get_op("rms_norm"), tunable("rms_norm.bwd"), (4096, 13, 4))[1] == "float32"
    assert space.sizes_for(registry.get_op("rms_norm"), tunable("rms_norm.bwd"), (3, 3, 3)) is None


def test_the_shortlist_leads_with_the_start_and_stays_in_bounds():
    for scores in ({}, {c: 1.0 + i for i, c in enumerate(SPACE)}):
        chosen = space.shortlist(SPACE, START, 20, scores, "seed")
        assert chosen[0] == START and len(chosen) == len(set(chosen)) == 20
        assert chosen == space.shortlist(SPACE, START, 20, scores, "seed"), "the same list in every run"
    assert set(space.shortlist(SPACE, START, 10_000, {}, "x")) == set(SPACE)


def test_a_space_leaves_out_what_a_thread_or_a_multiprocessor_cannot_hold():
    tiles = [{"BLOCK_SIZE": 1024}, {"BLOCK_SIZE": 4096}]
    found = registry.tile_space(H200, tiles, (1, 4, 32), per_thread=(8, 32), hints=("none", "stream"))
    blocks = {(c.blocks["BLOCK_SIZE"], c.num_warps) for c in found}
    assert blocks == {(1024, 1), (1024, 4), (4096, 4)} and len(found) == 2 * len(blocks)
    doubled = registry.tile_space(H200, tiles, (1, 4, 32), per_thread=(8, 32), width=2)
    assert {(c.blocks["BLOCK_SIZE"], c.num_warps) for c in doubled} == {(1024, 4), (4096, 32)}

    persistent = {"per_thread": (1, 4096), "stages": (1, 3), "ctas": (1, 3)}
    found = registry.tile_space(H200, tiles[1:], (4, 32), staged_bytes=H200.shared_memory // 2 // 4096, **persistent)
    # 3 programs of 1024 threads are too many; so are 3 that each keep two stages of half the shared memory
    assert [(c.num_warps, c.num_stages, c.ctas_per_mp) for c in found] == [
        (4, 1, 1),
        (4, 1, 3),
        (4, 3, 1),
        (32, 1, 1),
        (32, 3, 1),
    ]
