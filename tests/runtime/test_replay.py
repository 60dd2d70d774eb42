"""The replay cache: a replayed call launches what its launcher would launch, on its own tensors.

On the CPU, a stand-in for the driver puts tensors on the current device and records the arguments of compiled kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import sys
import weakref
from pathlib import Path

import pytest
import torch
from harness import few_sizes, in_threads, make, python, run, tensors

import liger_hw
from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.norms import rms_norm
from liger_hw.kernels.norms.forward import _norm_fwd_kernel
from liger_hw.runtime import launch as _launch
from liger_hw.runtime import recording
from liger_hw.runtime.checks import are_plain
from liger_hw.runtime.launch import Observer, observers, observing
from liger_hw.transformers import functional
from liger_hw.transformers.tiny import tiny_model

cpu = pytest.mark.cpu
WHOLLY_RECORDED = "rms_norm fused_add_rms_norm layer_norm rope swiglu geglu softmax dyt cross_entropy".split()
pytestmark = pytest.mark.usefixtures("no_failed_configuration")


class Driver:
    """The device of tensors, the current device, and the launches of compiled kernels without Triton."""

    def __init__(self) -> None:
        self.tensors_on = self.current = 0
        self.stream = 70
        self.seen: list[tuple] = []
        self.kernel = lambda *pointers: None

    def find(self, plan, kernel, grid, args, flags, key):
        def run(*args):
            self.seen.append((kernel, *args))
            self.kernel(*args[5:])

        entry = plan.compiled[key] = run, ("head",), (*flags, "tunables")
        return entry


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: made.tensors_on)
    monkeypatch.setattr(_launch, "CAN_BE_FAST", True)
    monkeypatch.setattr(_launch, "current_device", lambda: made.current)
    monkeypatch.setattr(_launch, "current_stream", lambda index: made.stream + index)
    monkeypatch.setattr(_launch, "_find_or_compile", made.find)
    with registry.pretend(known_target("sm90")):
        yield made


@pytest.fixture
def asked(monkeypatch):
    """Names of the operators whose launchers ran."""
    names = []

    def noting(name, launcher):
        return lambda *args: names.append(name) or launcher(*args)

    for name, call in (("rms_norm_fwd", rms_norm.RMSNormFunction.fwd), ("rms_norm_bwd", rms_norm.RMSNormFunction.bwd)):
        cells = _cells(call)
        record = _cells(cells["replayed"].cell_contents)["record"].cell_contents
        for cell in (cells["run_launcher"], _cells(record)["launcher"]):
            monkeypatch.setattr(cell, "cell_contents", noting(name, cell.cell_contents))
    return names


def _cells(function) -> dict:
    return dict(zip(function.__code__.co_freevars, function.__closure__))


def norm(x, w, eps=1e-6):
    with torch.no_grad():
        return rms_norm.RMSNormFunction.fwd(x, w, eps, 0.0, 0)


def inputs(rows=3, columns=64, dtype=torch.float32):
    return torch.randn(rows, columns, dtype=dtype), torch.randn(columns, dtype=dtype)


def last(driver) -> tuple:
    """(grid and stream, pointers to x, w, y and rstd, the rest) of the last launch of rms_norm's forward.

    The fifth number of the rest is eps.
    """
    _, *args = driver.seen[-1]
    assert args[4] == "head"
    return tuple(args[:4]), tuple(args[5:12][i] for i in (0, 2, 4, 6)), tuple(args[12:])


def pointers(*tensors) -> tuple:
    return tuple(t.data_ptr() for t in tensors)


@cpu
def test_every_op_launches_again_what_its_launchers_launched(driver, case, seed, monkeypatch):
    """Five times forward and backward launch the same, except for pointers to new tensors."""
    op, options = case
    monkeypatch.setattr(torch, "_assert_async", lambda *args: None)
    sample = make(op, few_sizes(op), torch.float32, "cpu", seed, options)
    grads = run(op.function, sample, seed).incoming
    own = {t.data_ptr() for t in tensors((sample.args, sample.kwargs, [g for g in grads if g is not None]))}
    registry.invalidate()
    rounds = []
    for _ in range(5):
        driver.seen.clear()
        run(op.function, sample, seed, grads)
        rounds.append([_without_fresh(launch, own) for launch in driver.seen])
    for again in rounds[1:]:
        assert again == rounds[0]
    assert rounds[0]
    if op.name in WHOLLY_RECORDED:
        assert registry.replay_cache and {type(entry) for entry in registry.replay_cache.values()} == {tuple}


def _without_fresh(launch: tuple, own: set) -> tuple:
    """A launch with the addresses of tensors that are not the caller's replaced by one word."""
    return tuple(a if not isinstance(a, int) or a < 1 << 32 or a in own else "fresh" for a in launch)


@cpu
def test_results_are_new_tensors_of_the_launchers_layout(driver, asked):
    x, w = inputs()
    results = [norm(x, w) for _ in range(4)]
    assert asked == ["rms_norm_fwd"] * 2
    assert last(driver)[1] == pointers(x, w, *results[-1])
    assert len({t.data_ptr() for pair in results for t in pair}) == 8
    for y, rstd in results:
        assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride())
        assert (rstd.shape, rstd.dtype) == ((3,), torch.float32)


@cpu
def test_one_tensor_passed_twice_is_two_arguments(driver, asked):
    """Recorded with dy and x the same tensor, replayed with two."""
    x, w = inputs()
    rstd = torch.ones(3)

    def back(dy):
        driver.seen.clear()
        with torch.no_grad():
            rms_norm.RMSNormFunction.bwd(dy, x, w, rstd, 1e-6, 0.0, 0, False)
        return driver.seen[0][6:9]

    assert [back(x) for _ in range(3)] == [pointers(x, x, w)] * 3
    other = torch.randn_like(x)
    assert back(other) == pointers(other, x, w) and asked == ["rms_norm_bwd"] * 2


@cpu
def test_layouts_that_differ_are_recorded_apart(driver, asked):
    """By alignment, dtype, strides and numbers."""
    x, w = inputs()
    moved = torch.randn(3 * 64 + 1)[1:].view(3, 64)
    wide = torch.randn(3, 128)[:, :64]
    x16, w16 = inputs(dtype=torch.float16)
    assert moved.data_ptr() % 16 and not x.data_ptr() % 16
    calls = [(x, w), (moved, w), (x, moved[0]), (wide, w), (x16, w16), (x, None), (x, w, 1e-5)]
    for number, call in enumerate(calls, 1):
        for _ in range(3):
            norm(*call)
        assert len(asked) == 2 * number
    for call in calls:
        y, rstd = norm(*call)
        pointers_in = [None if t is None else t.data_ptr() for t in call[:2]]
        _, found, rest = last(driver)
        assert found == (*pointers_in, *pointers(y, rstd)) and y.dtype is call[0].dtype
        assert rest[0] == call[0].stride(0) and rest[4] == (call[2] if len(call) > 2 else 1e-6)
    assert len(asked) == 2 * len(calls)


@cpu
def test_a_device_that_is_not_the_current_one_goes_through_the_launcher(driver, asked, monkeypatch):
    x, w = inputs()
    ordinary = []
    monkeypatch.setattr(_launch, "launch_ordinary", lambda *args: ordinary.append(args))
    driver.tensors_on = driver.current = 1
    for _ in range(3):
        norm(x, w)
    assert asked == ["rms_norm_fwd"] * 2 and last(driver)[0][3] == driver.stream + 1 and not ordinary
    driver.tensors_on = 0
    for _ in range(3):
        norm(x, w)
    assert asked == ["rms_norm_fwd"] * 5 and len(ordinary) == 3, "on 0, while 1 is current"
    driver.current = 0
    for _ in range(3):
        norm(x, w)
    assert asked == ["rms_norm_fwd"] * 7 and last(driver)[0][3] == driver.stream, "0 has a recording of its own"


@cpu
def test_the_stream_is_asked_at_every_call(driver, asked):
    x, w = inputs()
    streams = []
    for driver.stream in range(70, 75):
        norm(x, w)
        streams.append(last(driver)[0][3])
    assert streams == [70, 71, 72, 73, 74] and len(asked) == 2


@cpu
def test_whoever_takes_launches_gets_them(driver, asked, monkeypatch):
    x, w = inputs()
    for _ in range(3):
        norm(x, w)
    asked.clear()
    taken = []

    class Taker(Observer):
        def launch(self, proceed, *launch):
            taken.append(launch)

    with observing(Taker()):
        norm(x, w)
    assert len(taken) == 1 and len(asked) == 1
    monkeypatch.setattr(_launch, "launch_ordinary", lambda *launch: taken.append(launch))
    with monkeypatch.context() as hooked:
        hooked.setattr(_launch, "is_profiled", lambda: True)
        norm(x, w)
    assert len(taken) == 2 and len(asked) == 2
    norm(x, w)
    assert len(asked) == 2 and not observers


@cpu
def test_the_cache_goes_with_the_plans(driver, asked):
    """An override, a quarantine and `invalidate` are each seen by the next call."""
    x, w = inputs()

    def configured():
        norm(x, w)
        return registry.plans()[0].config

    for _ in range(3):
        before = configured()
    asked.clear()
    config = LaunchConfig({"BLOCK_SIZE": 64, "ROWS": 2}, 1)
    assert config != before
    with registry.override("rms_norm.fwd", config):
        assert [configured() for _ in range(3)] == [config] * 3 and last(driver)[0][0] == 2
        assert len(asked) == 2
        plan = registry.plans()[0]
        assert registry.quarantine(plan, RuntimeError("out of resource"))
        assert configured() == before and last(driver)[0][0] != 2 and len(asked) == 3
        registry._failed.clear()
    assert configured() == before and len(asked) == 4
    configured()
    registry.invalidate()
    norm(x, w)
    assert len(asked) == 6


@cpu
def test_a_recording_made_while_plans_change_is_lost(driver, asked, monkeypatch):
    x, w = inputs()
    norm(x, w)
    stale = registry.replay_cache
    monkeypatch.setattr(_launch, "current_stream", lambda index: registry.invalidate() or 0)
    norm(x, w)
    assert not registry.replay_cache and registry.replay_cache is not stale


@pytest.fixture
def probe(driver, define):
    """An operator of any launcher."""
    numbers = itertools.count()

    def define_probe(launcher, **how):
        how |= {"reference": launcher, "fake": launcher}
        schema = f"recorded_probe_{next(numbers)}(Tensor x, Tensor? y, float z) -> Tensor"
        return define(schema, shapes="x; y", launcher=launcher, **how)

    return define_probe


def _launched(x, y, out, z=0.0):
    plan = rms_norm.FWD.plan(x.device, rms_norm.FWD.key(3, 64, 4))
    args = x, y, None, None, out, None, None, 1, None, 2, 3, None, z, 0.0
    _launch.launch(plan, _norm_fwd_kernel, (3,), args, (0, False, True, 0, 1, False))
    return out


@cpu
@pytest.mark.parametrize(
    "launcher",
    [
        lambda x, y, z: _launched(x.t().contiguous(), y, torch.empty_like(x)),
        lambda x, y, z: _launched(x, y, torch.zeros_like(x)),
        lambda x, y, z: _launched(x, y, torch.empty_like(x), x[0, 0].item()),
        lambda x, y, z: _launched(x, _KEPT, torch.empty_like(x)),
        lambda x, y, z: _launched(x, y, torch.empty(2, *x.shape))[1],
        lambda x, y, z: _launched(x, y, x),
        lambda x, y, z: _launched(x, torch.empty(64, device="meta"), torch.empty_like(x)),
    ],
    ids="copy,zeros,a value read,another tensor,part of an allocation,an argument,memory elsewhere".split(","),
)
def test_a_launcher_that_does_more_is_always_asked(probe, launcher):
    calls = []
    call = probe(lambda *args: calls.append(args) or launcher(*args))
    x = torch.randn(3, 64)
    with torch.no_grad():
        for _ in range(4):
            call(x, None, 1.0)
    assert len(calls) == 4


@cpu
@pytest.mark.parametrize("through_dispatcher", [False, True])
def test_parts_of_an_operator_that_does_more_are_repeated(probe, driver, through_dispatcher):
    """From the third call on, in eager and below the dispatcher."""
    parts, calls = [], []

    @recording.repeated
    def part(x, y, z):
        parts.append(z)
        return _launched(x, y, torch.empty_like(x), z)

    def launcher(x, y, z):
        calls.append(z)
        return part(part(x, y, z) * 2, y, z)

    driver.kernel = lambda x, y, w, b, out, *rest: ctypes.memmove(out, x, 3 * 64 * 4)
    call = probe(launcher, recorded=False)
    with torch.set_grad_enabled(through_dispatcher):  # grad mode alone sends a call there
        for _ in range(4):
            x = torch.randn(3, 64)
            assert torch.equal(call(x, None, 1.0), 2 * x)
    assert len(calls) == 4 and len(parts) == 2 and len(driver.seen) == 8
    assert {key[0].rpartition(".")[2]: type(kept) for key, kept in registry.replay_cache.items()} == {"part": tuple}


@cpu
def test_tuples_of_numbers_are_plain_and_lists_are_not(driver):
    x = torch.randn(3)
    assert are_plain((x, None, (1, 2), ())) and not are_plain((x, [1, 2]))
    assert not are_plain((x, (1, x))) and not are_plain((x, ((1, 2),)))


_KEPT = torch.randn(64)


@cpu
def test_an_assertion_on_the_device_is_made_again(probe, driver, monkeypatch):
    asserted, calls = [], []

    def launcher(x, y, z):
        calls.append(x)
        ok = torch.empty(1, dtype=torch.int32)
        out = _launched(x, ok, torch.empty_like(x))
        torch._assert_async(ok, "said")
        return out

    real, call, x = torch._assert_async, probe(launcher), torch.randn(3, 64)
    monkeypatch.setattr(torch, "_assert_async", lambda ok, said: asserted.append(said) or real(ok, said))
    monkeypatch.setitem(recording._REPEATED, torch.ops.aten._assert_async.msg, torch._assert_async)
    for _ in range(4):
        for value in (1, 0):
            driver.kernel = lambda x, ok, *rest, value=value: ctypes.memset(ok, value, 4)
            with torch.no_grad(), contextlib.nullcontext() if value else pytest.raises(RuntimeError, match="said"):
                call(x, None, 1.0)
    assert len(calls) == 3 and asserted == ["said"] * 8, "the second call raised, and was not recorded"


@cpu
def test_zeros_are_written_again(probe, driver):
    def launcher(x, y, z):
        return _launched(x, y, torch.empty_like(x).zero_())

    def add_one(x, y, w, b, out, *rest):
        values = (ctypes.c_float * 192).from_address(out)
        values[:] = [value + 1 for value in values]

    driver.kernel, call, x = add_one, probe(launcher), torch.randn(3, 64)
    with torch.no_grad():
        kept = [call(x, None, 0.0) for _ in range(5)]
    assert all(torch.equal(out, torch.ones(3, 64)) for out in kept)
    assert any(type(found) is tuple for found in registry.replay_cache.values())


@cpu
@pytest.mark.parametrize("calls", range(4))
def test_a_launch_refused_later_is_quarantined(driver, asked, calls, clean_registry):
    """At the first launch without Triton, while recorded, or later: the next layer's configuration is recorded."""
    x, w = inputs()
    config = LaunchConfig({"BLOCK_SIZE": 64, "ROWS": 2}, 1)
    with registry.pretend(known_target("sm90")), registry.override("rms_norm.fwd", config):
        for _ in range(calls):
            norm(x, w)

        def refuse(*pointers):
            if last(driver)[0][0] == 2:
                raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

        driver.kernel = refuse
        for _ in range(4):
            y, _ = norm(x, w)
            assert last(driver)[1][2] == y.data_ptr() and last(driver)[0][0] == 3
            assert not observers and not torch._C._len_torch_dispatch_stack()
        (why,) = registry.quarantined().values()
        assert "cooperative launch" in why
        asked.clear()
        norm(x, w)
        assert not asked


@cpu
@pytest.mark.parametrize("calls", range(4))
def test_a_broken_device_is_nobodys_configuration(driver, calls, clean_registry):
    x, w = inputs()
    with registry.pretend(known_target("sm90")):
        for _ in range(calls):
            norm(x, w)

        def broken(*pointers):
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

        driver.kernel = broken
        with pytest.raises(RuntimeError, match="illegal memory access"):
            norm(x, w)
        assert not registry.quarantined()


@cpu
def test_a_tensor_in_place_of_a_number_is_of_this_call(probe, driver):
    call, x = probe(lambda x, y, z: _launched(x, y, torch.empty_like(x), z)), torch.randn(3, 64)
    with torch.no_grad():
        for value in (1.0, 1.0, 2.0, 3.0):
            call(x, None, torch.tensor(value))
            assert last(driver)[2][5] == value


@cpu
def test_launchers_see_numbers_as_the_schema_has_them(probe, driver):
    """Launched, recorded and replayed: an int for a float is a float to the kernel."""
    seen = []
    call = probe(lambda x, y, z: seen.append(z) or _launched(x, y, torch.empty_like(x), z))
    x = torch.randn(3, 64)
    with torch.no_grad():
        for value in (1, True, 1.0, 1):
            call(x, None, value)
            assert type(last(driver)[2][5]) is float
        with torch.enable_grad():
            call.overload(x, None, 1)
    assert [type(z) for z in seen] == [float] * 3


@cpu
def test_cpu_tensors_do_not_ask_for_the_current_device(monkeypatch):
    """torch raises without a driver, and in a process forked after CUDA was used."""

    def no_driver():
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(_launch, "CAN_BE_FAST", True)
    monkeypatch.setattr(_launch, "current_device", no_driver)
    x, w = inputs()
    torch.testing.assert_close(norm(x, w)[0], rms_norm.rms_norm_reference(x, w, 1e-6))
    assert not registry.replay_cache


@cpu
def test_results_are_inference_tensors_where_they_would_be(driver, asked):
    x, w = inputs()
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            found = rms_norm.RMSNormFunction.fwd(x, w, 1e-6, 0.0, 0)
        assert [t.is_inference() for t in found] == [mode is torch.inference_mode] * 2
    assert len(asked) == 2


@cpu
def test_a_recording_holds_no_tensor(driver):
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            x, w = inputs()
            results = norm(x, w)
            known = [weakref.ref(t) for t in (x, w, *results)]
            del x, w, results
            assert [t() for t in known] == [None] * 4
    finally:
        gc.enable()


@cpu
def test_recording_does_not_import_the_compiler():
    code = """
import sys, torch
from liger_hw.runtime import recording
with recording._Recorder((torch.ones(2),)) as seen:
    torch.empty(2)
assert len(seen.allocated) == 1 and "torch._dynamo" not in sys.modules
"""
    python("-c", code)


@cpu
def test_threads_record_each_for_itself(driver):
    def work():
        for number in range(100):
            x, w = inputs(1 + number % 5)
            y, rstd = norm(x, w)
            assert (y.shape, rstd.shape) == (x.shape, x.shape[:1])
            if number % 37 == 0:
                registry.invalidate()

    in_threads(*[work] * 4)
    assert not observers


@cpu
def test_layouts_that_never_repeat_are_not_kept_without_end(driver, monkeypatch):
    monkeypatch.setattr(_launch, "_MAX_LAYOUTS", 8)
    for rows in range(1, 40):
        norm(*inputs(rows))
    assert len(registry.replay_cache) <= 8


@pytest.mark.lanes("gpu")
def test_recorded_calls_give_the_same_bits(lane, case, seed, clean_registry, monkeypatch):
    """Four calls of a layout with different values, the last two on another stream, against Triton's launcher."""
    op, options = case
    module = torch.get_device_module(torch.device(lane.device).type)

    # as many channels as can be last in memory
    sizes = (1, 9, 8) if op.name == "multi_token_attention" else few_sizes(op)
    first = make(op, sizes, torch.bfloat16, lane.device, seed, options)
    grads = run(op.function, first, seed).incoming

    def all_of_them():
        found, stream = [], module.Stream()
        for number in range(4):
            sample = make(op, sizes, torch.bfloat16, lane.device, seed + number, options)
            module.synchronize()
            with module.stream(stream if number > 1 else module.current_stream()):
                found += run(op.function, sample, grads=grads).bits()
            module.synchronize()
        return found

    recorded = all_of_them()
    monkeypatch.setenv("LIGER_HW_FAST_LAUNCH", "0")
    clean_registry.reload()
    torch.testing.assert_close(recorded, all_of_them(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.lanes("gpu")
def test_recorded_while_a_graph_is_captured(lane, seed, clean_registry):
    if torch.device(lane.device).type != "cuda":
        pytest.skip("torch captures graphs on its cuda device type")
    x, w = torch.randn(5, 64, device=lane.device), torch.randn(64, device=lane.device)
    expected = norm(x, w)[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [norm(x, w)[0] for _ in range(3)]
    x.copy_(torch.randn_like(x))
    graph.replay()
    wanted = norm(x, w)[0]
    assert not torch.equal(wanted, expected)
    for y in captured:
        assert torch.equal(y, wanted)


@cpu
def test_batched_gradients_go_by_the_dispatcher(driver, asked):
    """Their tensors have no memory: nothing is launched with them or recorded."""
    x, w = inputs()
    dy, rstd = torch.randn(2, *x.shape), torch.rand(x.shape[0])
    exact = [rms_norm.RMSNormFunction.bwd.overload(g, x, w, rstd, 1e-6, 0.0, 0, False)[0] for g in dy]

    def backward(g):
        with torch.no_grad():
            return rms_norm.RMSNormFunction.bwd(g, x, w, rstd, 1e-6, 0.0, 0, False)[0]

    for _ in range(4):
        found = torch._vmap_internals._vmap(backward)(dy)
        torch.testing.assert_close(found, torch.stack(exact))
    assert not driver.seen and not asked


def _files_entered(call) -> set[str]:
    """Files of the package in which a call runs a function."""
    package, files = str(Path(liger_hw.__file__).parent), set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def _mistral():
    transformers = pytest.importorskip("transformers")
    model, ids = tiny_model(transformers.MistralForCausalLM), torch.arange(24).view(2, 12)
    liger_hw.patch(model)
    return lambda: model(input_ids=ids, labels=ids)


def _head():
    x, weight, target = torch.randn(8, 64), torch.randn(128, 64), torch.arange(8)
    return lambda: functional.liger_fused_linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), target)


def _rms_norm():
    x, w = inputs()
    return lambda: functional.liger_rms_norm(x.requires_grad_(), w.requires_grad_(), 1e-6)


@cpu
@pytest.mark.parametrize(
    "walk, calls, most",
    [(_rms_norm, 1, 9), (_rms_norm, 2, 5), (_head, 2, 7), (_mistral, 2, 14)],
    ids=["the second rms_norm", "the third rms_norm", "a fused linear cross entropy", "a patched Mistral"],
)
def test_a_walk_enters_no_more_files(driver, walk, calls, most):
    """docs/internals.md has the walks, and these numbers."""
    call = walk()
    for _ in range(calls):
        call()
    files = _files_entered(call)
    assert len(files) <= most, sorted(files)


@cpu
@pytest.mark.parametrize(
    "name, kernel",
    [("fused_moe", "_fused_moe_gate_bwd_kernel"), ("multi_token_attention", "_causal_softmax_bwd_kernel")],
)
def test_a_backward_that_is_told_what_is_needed_goes_by_its_launcher(driver, name, kernel, seed, monkeypatch):
    """Not by torch's dispatcher, which costs time on a GPU and would call the reference here."""
    monkeypatch.setattr(torch, "_assert_async", lambda *args: None)
    op = registry.ops()[name]
    run(op.function, make(op, few_sizes(op), torch.float32, "cpu", seed), seed)
    assert kernel in {launched.__name__ for launched, *_ in driver.seen}
