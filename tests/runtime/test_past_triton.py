"""Launches past Triton: what plain eager code on a GPU launches, on which device and stream; and failures.

On the CPU there is a stand-in for the driver: tensors say they are on the current device, compiled kernels note their
arguments.
"""

from __future__ import annotations

import pytest
import torch

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.norms import rms_norm
from liger_hw.kernels.norms.forward import _norm_fwd_kernel
from liger_hw.runtime import launch as _launch
from liger_hw.runtime import operator as _op
from liger_hw.runtime.observe import Observer, observers, observing

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("no_failed_configuration")]


class Driver:
    """The device that tensors are on and the current one; every launch past Triton, as the compiled kernel sees it."""

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


def norm(x, w, eps=1e-6):
    with torch.no_grad():
        return rms_norm.rms_norm_fwd(x, w, eps, 0.0, 0)


def inputs(rows=3, columns=64, dtype=torch.float32):
    return torch.randn(rows, columns, dtype=dtype), torch.randn(columns, dtype=dtype)


def last(driver) -> tuple:
    """(grid and stream, pointers, the rest) of the last launch of rms_norm's forward: x, w, y, rstd of x, residual, w,
    b, y, sum, rstd; then numbers, of which the sixth is eps."""
    _, *args = driver.seen[-1]
    assert args[4] == "head"
    return tuple(args[:4]), tuple(args[5:12][i] for i in (0, 2, 4, 6)), tuple(args[12:])


def test_a_device_that_is_not_the_current_one_goes_through_triton(driver, monkeypatch):
    x, w = inputs()
    ordinary = []
    monkeypatch.setattr(_launch, "launch_ordinary", lambda *args: ordinary.append(args))
    driver.tensors_on = driver.current = 1
    norm(x, w)
    assert last(driver)[0][3] == driver.stream + 1 and not ordinary
    driver.tensors_on = 0
    norm(x, w)
    assert len(ordinary) == 1, "on 0, while 1 is current"
    driver.current = 0
    norm(x, w)
    assert last(driver)[0][3] == driver.stream and len(ordinary) == 1


def test_the_stream_is_asked_at_every_call(driver):
    x, w = inputs()
    streams = []
    for driver.stream in range(70, 75):
        norm(x, w)
        streams.append(last(driver)[0][3])
    assert streams == [70, 71, 72, 73, 74]


def test_an_observer_and_a_profiler_get_every_launch(driver, monkeypatch):
    x, w = inputs()
    norm(x, w)
    launches = []

    class Taker(Observer):
        def launch(self, proceed, *launch):
            launches.append(launch)

    with observing(Taker()):
        norm(x, w)
    assert len(launches) == 1 and not observers
    monkeypatch.setattr(_launch, "launch_ordinary", lambda *launch: launches.append(launch))
    monkeypatch.setattr(_launch, "is_profiled", lambda: True)
    norm(x, w)
    assert len(launches) == 2


@pytest.fixture
def probe(driver, monkeypatch):
    """An operator of any launcher."""
    library = torch.library.Library("liger_hw", "FRAGMENT")
    monkeypatch.setattr(_op, "_library", library)
    names = []

    def define(launcher, **how):
        name = f"probe_{len(names)}"
        names.append(name)
        how |= {"reference": launcher, "fake": launcher}
        return _op.define(f"{name}(Tensor x, Tensor? y, float z) -> Tensor", shapes="x; y", launcher=launcher, **how)

    yield define
    for name in names:
        _op.launchers.pop(name)
        _op.declared.pop(name)
    library._destroy()


def _launched(x, y, out, z=0.0):
    plan = rms_norm.FWD.plan(x.device, rms_norm.FWD.key(3, 64, 4))
    args = x, y, None, None, out, None, None, 1, None, 2, 3, None, z, 0.0
    _launch.launch(plan, _norm_fwd_kernel, (3,), args, (0, False, True, 0, 1, False))
    return out


def test_tuples_of_numbers_are_plain_and_lists_are_not(driver):
    x = torch.randn(3)
    assert _op.plain_layout((x, None, (1, 2), ())) and _op.plain_layout((x, [1, 2])) is None
    assert _op.plain_layout((x, (1, x))) is None and _op.plain_layout((x, ((1, 2),))) is None


@pytest.mark.parametrize("calls", range(2))
def test_a_launch_refused_later_is_quarantined(driver, calls, clean_registry):
    """At the first launch past Triton, or later: the next layer answers."""
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
        (why,) = registry.quarantined().values()
        assert "cooperative launch" in why


@pytest.mark.parametrize("calls", range(2))
def test_a_broken_device_is_not_the_configurations_fault(driver, calls, clean_registry):
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


def test_a_tensor_in_place_of_a_number_is_of_this_call(probe, driver):
    call, x = probe(lambda x, y, z: _launched(x, y, torch.empty_like(x), z)), torch.randn(3, 64)
    with torch.no_grad():
        for value in (1.0, 1.0, 2.0, 3.0):
            call(x, None, torch.tensor(value))
            assert last(driver)[2][5] == value


def test_launchers_see_numbers_as_the_schema_has_them(probe, driver):
    """An int for a float is a float to the kernel."""
    seen = []
    call = probe(lambda x, y, z: seen.append(z) or _launched(x, y, torch.empty_like(x), z))
    x = torch.randn(3, 64)
    with torch.no_grad():
        for value in (1, True, 1.0, 1):
            call(x, None, value)
            assert type(last(driver)[2][5]) is float
        with torch.enable_grad():
            call.overload(x, None, 1)
    assert [type(z) for z in seen] == [float] * 5


def test_batched_gradients_go_by_the_dispatcher(driver):
    """Their tensors have no memory of their own: no launch is made with them."""
    x, w = inputs()
    dy, rstd = torch.randn(2, *x.shape), torch.rand(x.shape[0])
    exact = [rms_norm.rms_norm_bwd.overload(g, x, w, rstd, 0.0, 0, False)[0] for g in dy]

    def backward(g):
        with torch.no_grad():
            return rms_norm.rms_norm_bwd(g, x, w, rstd, 0.0, 0, False)[0]

    torch.testing.assert_close(torch._vmap_internals._vmap(backward)(dy), torch.stack(exact))
    assert not driver.seen
