"""The local measurer on the real kernels, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from liger_hw import private, registry
from liger_hw.autotune import check, jobs, measure
from liger_hw.autotune.jobs import Job
from liger_hw.autotune.measure import LocalMeasurer
from liger_hw.autotune.record import Rejected
from liger_hw.backends import LaunchConfig

pytestmark = [pytest.mark.interpret, pytest.mark.unpoisoned]
SIZES = {
    "rms_norm": (8, 64),
    "fused_add_rms_norm": (8, 64),
    "swiglu": (8, 64),
    "rope": (1, 8, 2, 1, 16),
    "cross_entropy": (8, 64),
    "fused_linear_cross_entropy": (8, 16, 32),
}


@pytest.fixture
def measurer(clean_registry):
    one = LocalMeasurer("cpu")
    yield one
    one.close()


def launched(measurer: LocalMeasurer, op: str, sizes: tuple[int, ...]) -> list[Job]:
    """Jobs of the op's own kernels at these sizes."""
    found = [(*name.split("."), key) for name, key in jobs.launched(op, sizes, "float32", measurer.target)]
    return [Job(op, variant, key, sizes, "float32") for owner, variant, key in found if owner == op]


def opened(
    measurer: LocalMeasurer, op: str, variant: str, sizes: tuple[int, ...] | None = None
) -> tuple[LaunchConfig, int]:
    job = next(job for job in launched(measurer, op, sizes or SIZES[op]) if job.variant == variant)
    return measurer.open(job, job.sizes)


@pytest.mark.parametrize("name", SIZES)
def test_every_kernel_of_an_op_can_be_measured(measurer, name):
    found = launched(measurer, name, SIZES[name])
    assert {job.variant for job in found} <= {t.variant for t in registry.get_op(name).tunables}
    for job in found:
        baseline, moved = measurer.open(job, job.sizes)
        assert moved > 0
        measurer.prepare(baseline)
        (samples,) = measurer.time([baseline], 2)
        assert len(samples) == 2 and min(samples) > 0


def test_a_wrong_candidate_is_rejected_before_it_is_timed(measurer, monkeypatch):
    baseline, _ = opened(measurer, "rms_norm", "fwd")
    again = measure.Call.again

    def wrong(call):
        outputs = again(call)
        outputs[0][-1] = float("nan")
        return outputs

    monkeypatch.setattr(measure.Call, "again", wrong)
    with pytest.raises(Rejected, match="wrong result"):
        measurer.prepare(baseline)


def test_a_candidate_that_leaves_elements_unwritten_is_rejected(measurer):
    """The element is still NaN, as `poisoned` left it."""
    baseline, _ = opened(measurer, "fused_linear_cross_entropy", "fwd")
    measurer._stage.expected[0].fill_(7.0)
    with pytest.raises(Rejected, match="wrong result"):
        measurer.prepare(baseline)


def test_an_illegal_candidate_is_rejected_with_the_reason(measurer):
    baseline, _ = opened(measurer, "rms_norm", "fwd")
    with pytest.raises(Rejected, match="not a power of two"):
        measurer.prepare(replace(baseline, num_warps=3))


def test_a_failing_launch_is_a_rejection_not_a_fallback(measurer, monkeypatch):
    from liger_hw.runtime import launch as _launch

    baseline, _ = opened(measurer, "rms_norm", "fwd")
    ordinary = _launch.launch_ordinary

    def fails(plan, *args):
        if plan.config.hint == "stream":
            raise _launch.LaunchFailed(plan, RuntimeError("out of resource"))
        return ordinary(plan, *args)

    monkeypatch.setattr(_launch, "launch_ordinary", fails)
    with pytest.raises(Rejected, match="out of resource"):
        measurer.prepare(replace(baseline, hint="stream"))
    assert not registry.quarantined()
    measurer.prepare(baseline)
    assert measurer.time([baseline], 1)


def test_what_is_overwritten_is_restored_before_each_replay(measurer):
    opened(measurer, "cross_entropy", "bwd")
    stage = measurer._stage
    assert stage._overwritten, "the gradient is scaled in place"
    arm = stage.prepare(stage.baseline)
    kept = {place: before.clone() for place, before in stage._overwritten.items()}
    stage.time([arm], 3)
    arm.restore()
    for (name, i), before in kept.items():
        assert torch.equal(stage._sets[0][name][i], before)


def test_the_time_includes_what_the_choice_decides_for_other_kernels(measurer):
    """The backward's grid decides how many partial sums another kernel adds."""
    rows = (64, 64)
    opened(measurer, "rms_norm", "bwd", rows)
    assert len(measurer._stage.timed) == 2
    opened(measurer, "rms_norm", "dw", rows)
    assert len(measurer._stage.timed) == 1
    opened(measurer, "rms_norm", "fwd", rows)
    assert len(measurer._stage.timed) == 1


def test_a_kernel_launched_with_two_keys_is_measured_with_either(measurer):
    """dyt adds up dgamma and dbeta, then dalpha, by the same kernel."""
    jobs = [job for job in launched(measurer, "dyt", (512, 64)) if job.variant == "dw"]
    assert len(jobs) == 2
    for job in jobs:
        baseline, _ = measurer.open(job, job.sizes)
        measurer.prepare(baseline)
        assert min(measurer.time([baseline], 1)[0]) > 0 and len(measurer._stage.timed) == 1


def test_a_wrong_heuristic_stops_the_job(measurer, monkeypatch):
    monkeypatch.setattr(check, "against_reference", lambda *args: "result 1: relative error 0.5")
    with pytest.raises(Rejected, match="disagrees with the reference"):
        opened(measurer, "swiglu", "fwd")


def test_where_the_heuristic_does_not_launch_the_safe_one_is_the_baseline(measurer, monkeypatch):
    tunable = registry.get_op("swiglu").tunables[0]
    job = launched(measurer, "swiglu", SIZES["swiglu"])[0]
    heuristic = tunable.heuristic
    broken = replace(heuristic(measurer.target, job.key), num_warps=64)
    monkeypatch.setattr(tunable, "heuristic", lambda target, k: broken)
    assert measurer.open(job, job.sizes)[0] == tunable.safe(measurer.target, job.key)


def test_verify_uses_the_candidate_whatever_the_rows(measurer, monkeypatch):
    baseline, _ = opened(measurer, "rms_norm", "fwd")
    used = []
    tunable = registry.get_op("rms_norm").tunables[0]
    device, keys = torch.device("cpu"), [registry.row_key(rows, 64, 4) for rows in (8, 4096)]

    def against_reference():
        used.extend(tunable.plan(device, key).config for key in keys)
        return ""

    monkeypatch.setattr(measurer._bench, "against_reference", against_reference)
    config = replace(baseline, hint="stream")
    assert measurer.verify(config) == "" and used == [config] * 2
    assert tunable.plan(device, keys[0]).config == baseline


@pytest.mark.full  # it measures a whole mixture of experts
def test_a_library_s_routine_is_a_candidate_like_any(measurer, monkeypatch):
    """fused_moe's products by torch._grouped_mm (on a CPU a loop), whether the heuristic chooses it or not."""
    from liger_hw.kernels.moe import products

    sizes, grouped, library = (24, 16, 8, 3, 2), [], products.LIBRARY
    original = private.grouped_matmul
    monkeypatch.setattr(private, "grouped_matmul", lambda *args, **more: grouped.append(1) or original(*args, **more))
    monkeypatch.setattr(products, "_uses_library", lambda plan, *_: plan.config.blocks["ENGINE"] == library)
    jobs = {job.variant: job for job in launched(measurer, "fused_moe", sizes)}
    for variant in ("down", "up_weights"):
        tunable = registry.get_tunable(f"fused_moe.{variant}")
        kernels = tunable.heuristic(measurer.target, jobs[variant].key)
        by_library = replace(kernels, blocks={**kernels.blocks, "ENGINE": library})
        for baseline in (kernels, by_library):
            with monkeypatch.context() as patch:
                patch.setattr(tunable, "heuristic", lambda target, key: baseline)  # noqa: B023
                patch.setattr(tunable, "space", lambda target, key: [kernels, by_library])  # noqa: B023
                found, moved = measurer.open(jobs[variant], sizes)
                assert found == baseline and moved > 0
                for config in (kernels, by_library):
                    measurer.prepare(config)
                for config, calls in ((kernels, 0), (by_library, 2)):
                    grouped.clear()
                    assert min(measurer.time([config], 2)[0]) > 0
                    assert len(grouped) == calls, "what is timed is the one product, by its engine"
                measurer.close()
                measurer._arms.clear()


def test_tuning_end_to_end_in_the_interpreter(measurer):
    from liger_hw.autotune.tuner import Effort, Tuner

    saved = {}
    effort = Effort(first=3, refine=0, finalists=1, coarse_rounds=1, final_rounds=2, confirm_rounds=2)
    tuner = Tuner(
        measurer.target, measurer, facts=measurer.facts(), save=lambda n, e: saved.update({n: e}) or True, effort=effort
    )
    results = list(tuner.run(launched(measurer, "swiglu", (8, 64))))
    assert [r.error for r in results] == ["", ""] and all(r.heuristic_us > 0 and r.tried == 3 for r in results)
