"""How calls are timed: capture, what cannot be captured, restored inputs, interleaving, budgets, floors."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice, Overwriting

from liger_hw.bench.inputs import Inputs, Work, sample_sets, tensors_in
from liger_hw.bench.timing import MIB, Budget, Calls, Meter, OutOfBudget, Replay, Stats, interleave


@pytest.fixture
def meter():
    with Meter("cpu", FakeDevice()) as found:
        found._filler = (torch.ones(4), torch.ones(4))
        yield found


def inputs(seed: int = 0, size: int = 8) -> Inputs:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    return Inputs((x,), seed=seed)


def ready(function, sets=None, backward=True) -> Work:
    work = Work(function, sets or [inputs(0), inputs(1)], backward)
    work.learn_overwrites()
    return work


def test_a_call_is_captured_once_and_replayed(meter):
    runner = meter.runner(ready(lambda x: 2 * x), floor_ms=0.1)
    assert isinstance(runner, Replay) and runner.method == "graph" and runner.why == ""
    assert runner.calls == 20 and len(runner.burst(3)) == 3
    assert (meter.module.captured, meter.module.replayed) == (1, 3)


def test_forwards_of_all_sets_run_before_their_backwards():
    order = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            order.append("fwd")
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            order.append("bwd")
            return dy

    Work(Noted.apply, [inputs(0), inputs(1), inputs(2)], backward=True).sweep()
    assert order == ["fwd"] * 3 + ["bwd"] * 3


@pytest.mark.parametrize("when", ("forward", "backward"))
def test_a_call_that_syncs_is_timed_between_events_and_says_so(meter, when):
    class Syncing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if when == "forward":
                meter.module.wait()
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            if when == "backward":
                meter.module.wait()
            return dy

    runner = meter.runner(ready(Syncing.apply), floor_ms=0.1)
    assert isinstance(runner, Calls) and (runner.method, runner.why) == ("events", "syncs")
    assert meter.module.captured == 0 and meter.module.debug == 0
    assert len(runner.burst(4)) == 4


def test_a_failing_capture_is_ended_and_falls_back(meter):
    def refuses(x):
        if meter.module.capturing:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return 2 * x

    runner = meter.runner(ready(refuses), floor_ms=0.1)
    assert isinstance(runner, Calls)
    assert runner.why == "capture failed: RuntimeError: operation not permitted"
    assert not meter.module.capturing


def test_an_error_of_the_call_itself_is_not_taken_for_a_sync(meter):
    work = ready(lambda x: 2 * x)
    work.function = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        meter.runner(work, floor_ms=0.1)


def test_overwritten_inputs_and_gradients_are_put_back(meter):
    sets = [inputs(0), inputs(1)]
    before = [each.args[0].detach().clone() for each in sets]
    work = Work(Overwriting.apply, sets, backward=True)
    work.learn_overwrites()
    assert work.overwrites_inputs
    flowing = [next(iter(each.output_grads.values())).clone() for each in sets]
    for position, each in enumerate(sets):
        assert torch.equal(each.args[0], before[position])
    work.sweep()
    assert not torch.equal(sets[0].args[0], before[0])
    work.restore()
    for position, each in enumerate(sets):
        assert torch.equal(each.args[0], before[position])
        assert torch.equal(next(iter(each.output_grads.values())), flowing[position])
    assert meter.runner(work, floor_ms=1e-3).calls == 2  # a second sweep would read what the first one wrote


@pytest.mark.parametrize("function", [lambda x: 2 * x, Overwriting.apply])
@pytest.mark.parametrize("fits", [True, False])
def test_every_arm_finds_the_same_in_l2(meter, function, fits, monkeypatch):
    """Sets that fit are left where they are; else L2 is flushed after inputs were put back, before every replay."""
    work = ready(function, [inputs(i) for i in range(4)])
    assert work.bytes == 4 * 8 * 4
    meter.l2 = 8 * work.bytes - (not fits)
    runner, order = meter.runner(work, floor_ms=0.1), []
    fill, restore = meter._fill, work.restore
    monkeypatch.setattr(meter, "busy", lambda: None)
    monkeypatch.setattr(meter, "_fill", lambda most: (order.append(most), fill(most)))
    monkeypatch.setattr(work, "restore", lambda: (order.append("restore"), restore()))
    monkeypatch.setattr(runner, "replay", lambda: order.append("replay"))
    runner.burst(2)
    assert order == ["restore", *([] if fits else [2 * meter.l2]), "replay"] * 2


def test_tiny_sets_make_one_sweep(meter):
    sets = [inputs(i) for i in range(32)]
    assert {meter.runner(ready(f, sets), floor_ms=1e-3).calls for f in (lambda x: 2 * x, Overwriting.apply)} == {32}


def test_gradients_that_flow_in_are_the_same_for_every_arm():
    one, other = inputs(), inputs()
    a = one.gradient_for(0, torch.empty(4, 8, dtype=torch.bfloat16))
    b = other.gradient_for(0, torch.empty(4, 8))
    assert torch.equal(a, b.to(torch.bfloat16)) and one.gradient_for(0, torch.empty(4, 8, dtype=torch.bfloat16)) is a
    transposed = torch.empty(8, 4).t()
    assert one.gradient_for(0, transposed).stride() == transposed.stride()
    assert torch.equal(one.gradient_for(0, torch.empty(())), torch.ones(()))


def test_clone_shares_nothing_and_keeps_the_layout():
    x = torch.randn(4, 6).t().requires_grad_()
    source = Inputs((x, torch.tensor([1, 2]), 1e-6), {"weight": None, "pair": (x, 2)})
    copy = source.clone(torch.float64)
    assert copy.args[0].stride() == x.stride() and copy.args[0].dtype == torch.float64 and copy.args[0].requires_grad
    assert copy.args[1].dtype == torch.int64 and copy.args[2] == 1e-6 and copy.kwargs["weight"] is None
    assert copy.args[0].data_ptr() != x.data_ptr()
    assert len(copy.leaves) == 2


def test_tensors_are_found_in_what_losses_return():
    class Output:
        def __init__(self):
            self.loss, self.z_loss = torch.ones(()), None

    assert len(tensors_in((torch.ones(1), [torch.ones(1), None], "text", 3))) == 2
    output = Output()
    assert tensors_in(output) == [output.loss]


def test_arms_take_turns_and_a_failing_one_is_left_out():
    order = []

    class Runner:
        calls = 1

        def __init__(self, name):
            self.name = name

        def cost_ms(self):
            return 10.0

        def burst(self, times):
            order.append(self.name)
            if self.name == "bad" and order.count("bad") == 2:
                raise RuntimeError("lost\nmore")
            return [1.0, 2.0, 3.0]

    found, errors = interleave({name: Runner(name) for name in ("a", "bad", "b")}, repeats=3)
    assert order == ["a", "bad", "b", "a", "bad", "b", "a", "b"]
    assert errors == {"bad": "RuntimeError: lost"} and set(found) == {"a", "b"}
    assert found["a"].median == 2.0 and found["a"].repeats == (2.0, 2.0, 2.0) and found["a"].samples == 9


def test_a_spent_budget_says_so():
    budget = Budget(3600)
    budget.check()
    budget.seconds = 0.0
    with pytest.raises(OutOfBudget, match="0 s"):
        budget.check()


def test_calls_made_while_the_device_settles_do_not_count():
    class Runner:
        def cost_ms(self):
            return 40.0

        def burst(self, times):
            return [33.0, 35.0, 37.0, 38.0, 38.0, 38.0, 38.0, 38.0][:times]

    found, _ = interleave({"a": Runner()}, repeats=2, settle_ms=150.0)
    assert found["a"].median == 38.0 and found["a"].samples == 6  # three of each seven
    found, _ = interleave({"a": Runner()}, repeats=2)
    assert found["a"].median == 35.0


def test_stats_of_the_backward_are_full_minus_forward():
    full, fwd = Stats.of([[3.0, 4.0, 5.0]] * 2), Stats.of([[1.0, 1.5, 2.0]] * 2)
    bwd = full.minus(fwd)
    assert bwd.median == 2.5 and bwd.p20 < 2.5 < bwd.p80 and bwd.repeats == (2.5, 2.5)
    assert set(vars(bwd)) == {"median", "p20", "p80", "repeats", "samples"}


@pytest.mark.parametrize("numel, count", [(1, 32), (MIB, 4), (3 * MIB, 2), (17 * MIB, 1)])
def test_as_many_input_sets_as_keep_a_sweep_out_of_l2(numel, count):
    made = []

    def make(seed):
        made.append(seed)
        return Inputs((torch.empty(numel, dtype=torch.uint8),))

    assert len(sample_sets(make, l2=MIB)) == count and made == list(range(count))


def test_peak_memory_counts_what_a_call_adds(meter):
    def allocates(x):
        meter.module.peak = meter.module.allocated + 3 * MIB
        return 2 * x

    assert meter.peak_mib(ready(allocates)) == 3.0


def test_the_cpu_is_timed_by_the_wall_and_has_no_peak():
    meter = Meter("cpu")
    work = ready(lambda x: 2 * x)
    runner = meter.runner(work, floor_ms=0.1)
    assert (meter.graphs, runner.method, runner.why) == (False, "wall", "no graphs")
    assert all(value > 0 for value in runner.burst(3)) and meter.peak_mib(work) is None
    assert meter.host_us(work.call, calls=2, blocks=2) > 0


def test_the_stream_is_put_back():
    device = FakeDevice()
    before = device.current
    with Meter("cpu", device):
        assert device.current is not before
    assert device.current is before
