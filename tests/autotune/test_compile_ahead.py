"""Compiling ahead: each kernel that is foreseen compiles once, and a launch takes what is ready."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import shutil
import subprocess
import sysconfig
import threading
import types
from concurrent.futures import Future

import pytest
import torch
from harness import noted

from liger_hw import registry
from liger_hw.autotune import compile_ahead
from liger_hw.kernels.norms import rms_norm
from liger_hw.kernels.norms.forward import _norm_fwd_kernel
from liger_hw.runtime import launch as _launch

pytestmark = pytest.mark.cpu

KERNEL = copy.copy(_norm_fwd_kernel)
"""A kernel that these tests launch without arguments; how many of a kernel's are tensors is remembered by kernel."""


def _job(rows: int):
    def job():
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, requires_grad=True)
        y = rms_norm.liger_rms_norm(x, torch.empty(4096, dtype=torch.bfloat16), 1e-6)
        return lambda: y.sum().backward()

    return job


def test_a_job_that_fails_is_left_out(on_sm90):
    def fails():
        raise RuntimeError("no kernel of ours")

    alone, beside = {}, {}
    compile_ahead.note_launches([_job(64)], noted(alone))
    compile_ahead.note_launches([fails, lambda: fails, _job(64), lambda: fails], noted(beside))
    assert [name for name, *_ in alone] == ["rms_norm.fwd", "rms_norm.bwd"] and beside == alone


def test_every_forward_is_noted_before_any_backward_and_the_last_jobs_first(on_sm90):
    order = []

    def job(name):
        def forward():
            order.append(name)
            return lambda: order.append(f"{name}'s backward")

        return forward

    compile_ahead.note_launches([job("norm"), job("mlp"), job("loss")], lambda *_: None)
    assert order == ["norm", "mlp", "loss", "loss's backward", "norm's backward", "mlp's backward"]


@pytest.fixture
def compiled(monkeypatch):
    """What `compile_ahead.start` compiles: `list` has (tunable's name, event that ends it) in the order of beginning,
    `wait(n)` returns once n have begun."""
    begun, condition = [], threading.Condition()

    def compile_only(plan, kernel, args, flags):
        end = threading.Event()
        with condition:
            begun.append((plan.tunable.name, end))
            condition.notify_all()
        assert end.wait()

    def wait(n):
        with condition:
            assert condition.wait_for(lambda: len(begun) >= n)

    monkeypatch.setattr(_launch, "compile_only", compile_only)
    monkeypatch.setattr(compile_ahead, "_in_turn", lambda kernel: None)
    monkeypatch.setattr(compile_ahead, "_load_driver", lambda device: None)
    monkeypatch.setattr(compile_ahead, "_hash_triton", lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(device=contextlib.nullcontext))
    return types.SimpleNamespace(list=begun, wait=wait)


def _note_plans(monkeypatch, plans):
    def note_launches(jobs, note):
        for plan in plans:
            note(plan, KERNEL, (1,), (), ())

    monkeypatch.setattr(compile_ahead, "note_launches", note_launches)


def _plan(tunable, **constexprs):
    names = KERNEL.arg_names
    return types.SimpleNamespace(tunable=tunable, compiled={}, options={}, constexprs=dict.fromkeys(names) | constexprs)


def test_nothing_compiles_before_triton_is_ready(monkeypatch, compiled):
    """Else each thread would build its driver and hash its files again. Meanwhile the launches are noted, and the step
    goes on as soon as they are."""
    tasks, lock = [], threading.Lock()
    ready, seen = threading.Event(), threading.Event()

    def prepare(*_):
        with lock:
            tasks.append(len(tasks))
        assert ready.wait()

    monkeypatch.setattr(compile_ahead, "_load_driver", prepare)
    monkeypatch.setattr(compile_ahead, "_hash_triton", prepare)
    plan = _plan(rms_norm.FWD)
    _note_plans(monkeypatch, [plan])
    done = compile_ahead.start([], torch.device("cpu"))  # returns although Triton is not ready
    assert len(plan.compiled) == 1 and not seen.wait(0.2) and not compiled.list
    assert tasks == [0, 1]  # side by side
    ready.set()
    compiled.wait(1)
    compiled.list[0][1].set()
    done.result()


def test_the_step_does_not_wait_for_the_rehearsal_where_triton_is_ready(monkeypatch, compiled):
    rehearsed = threading.Event()
    monkeypatch.setattr(compile_ahead, "note_launches", lambda jobs, note: rehearsed.wait())
    done = compile_ahead.start([], torch.device("cpu"))
    assert not done.done()
    rehearsed.set()
    done.result()


def test_a_rehearsal_that_fails_holds_nobody_up(monkeypatch, compiled):
    def fails(jobs, note):
        raise RuntimeError("no rehearsal")

    monkeypatch.setattr(compile_ahead, "note_launches", fails)
    monkeypatch.setattr(compile_ahead, "_hash_triton", lambda: threading.Event().wait(0.2))
    with pytest.raises(RuntimeError, match="no rehearsal"):
        compile_ahead.start([], torch.device("cpu")).result()


def test_kernels_begin_in_the_order_noted_and_each_compiles_once(monkeypatch, compiled):
    """Also one that two tunables launch alike: its other plan takes the same Future."""
    monkeypatch.setattr(compile_ahead, "_threads", lambda: 2)
    tunables = rms_norm.FWD, *rms_norm.BACKWARD[:2]
    plans = [_plan(tunable, ROWS=number) for number, tunable in enumerate(tunables)]
    alike = _plan(types.SimpleNamespace(name="alike"), ROWS=0)
    _note_plans(monkeypatch, [plans[0], plans[0], alike, *plans[1:]])
    done = compile_ahead.start([], torch.device("cpu"))
    for number in range(3):
        compiled.wait(number + 1)
        compiled.list[number][1].set()
    done.result()
    assert [name for name, _ in compiled.list] == [tunable.name for tunable in tunables]
    (future,), (other,) = plans[0].compiled.values(), alike.compiled.values()
    assert future is other and future.result() is None


def test_triton_is_hashed_where_it_asks_for_the_hash():
    pytest.importorskip("triton")
    modules = [importlib.import_module(name) for name in ("triton.runtime.cache", "triton.compiler.compiler")]
    (hashed,) = {module.triton_key for module in modules if hasattr(module, "triton_key")}
    compile_ahead._hash_triton()
    assert hashed.cache_info().currsize == 1


def test_front_ends_run_one_at_a_time():
    """Of kernels that compile side by side."""
    pytest.importorskip("triton")
    running, most, lock = [], [], threading.Lock()

    class Source:
        def make_ir(self):
            with lock:
                running.append(0)
                most.append(len(running))
            threading.Event().wait(0.05)
            with lock:
                running.pop()
            return "module"

    class Kernel:
        compile = staticmethod(lambda source, **options: (source.make_ir(), options))
        device_caches = {0: None}

    driver = types.SimpleNamespace(get_current_device=lambda: 0)
    kernels, found = [Kernel() for _ in range(3)], []

    def compile_one(kernel):
        source = Source()
        compile_ahead._in_turn(kernel)
        compile_ahead._in_turn(kernel)  # changes nothing more
        found.append(kernel.compile(source, target=1))
        assert not vars(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch.triton.runtime.driver, "_active", driver)
        threads = [threading.Thread(target=compile_one, args=(kernel,)) for kernel in kernels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1, 1, 1] and found == [("module", {"target": 1})] * 3


def test_a_launch_waits_for_the_kernel_being_compiled(monkeypatch, on_sm90):
    """The second thread's launch comes while the kernel compiles: it waits, then takes the ordinary way, once."""
    x, y = torch.ones(2, 16), torch.empty(2, 16)
    key = registry.row_key(2, 16, 4)
    plan = rms_norm.FWD.plan(x.device, key)
    plan.compiled = {}
    flags = 0, False, True, 0, 1, False
    args = x, None, None, None, y, None, torch.empty(2), 16, None, 2, 16, None, 1e-6, 0.0
    future, ran = Future(), []
    plan.compiled[_launch.likeness(_norm_fwd_kernel, args, flags)] = future
    monkeypatch.setattr(_launch, "CAN_BE_FAST", True)
    monkeypatch.setattr(_launch, "current_device", lambda: -1)
    monkeypatch.setattr(_launch, "current_stream", lambda index: 0)
    monkeypatch.setattr(_launch, "is_profiled", lambda: False)
    compiled = types.SimpleNamespace(run=lambda *a: ran.append("fast"), function="function", packed_metadata=())
    monkeypatch.setattr(_launch, "launch_ordinary", lambda *a: ran.append("ordinary") or compiled)
    launch = threading.Thread(target=_launch.launch, args=(plan, _norm_fwd_kernel, (2,), args, flags))
    launch.start()
    launch.join(0.2)
    assert launch.is_alive() and not ran  # it waits
    future.set_result(None)
    launch.join()
    assert ran == ["ordinary"]
    _launch.launch(plan, _norm_fwd_kernel, (2,), args, flags)
    assert ran == ["ordinary", "fast"]


def test_a_kernel_that_fails_ahead_is_left_to_its_launch(monkeypatch, on_sm90):
    x = torch.ones(2, 16)
    plan = rms_norm.FWD.plan(x.device, registry.row_key(2, 16, 4))
    plan.compiled = {}
    future = Future()
    plan.compiled["alike"] = future
    monkeypatch.setattr(_launch, "compile_only", lambda *a: (_ for _ in ()).throw(RuntimeError("no")))
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(device=contextlib.nullcontext))
    monkeypatch.setattr(compile_ahead, "_in_turn", lambda kernel: None)
    compile_ahead._compile(future, [], "alike", plan, None, (), (), x.device)
    assert "alike" not in plan.compiled and future.exception() is not None


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) { return PyModule_Create(&module); }
"""


def test_a_launcher_that_is_loaded_again_stays_itself(tmp_path, monkeypatch):
    """Two launchers of one name, as Triton up to 3.6 builds them, each loaded again while the other is."""
    build = pytest.importorskip("triton.runtime.build")
    headers, compiler = sysconfig.get_paths()["include"], shutil.which("cc")
    if compiler is None or not os.path.exists(os.path.join(headers, "Python.h")):
        pytest.skip("needs a C compiler and Python's headers")
    paths = []
    for number in (1, 2):
        folder = tmp_path / f"hash{number}"
        folder.mkdir()
        (folder / "launcher.c").write_text(LAUNCHER.replace("NUMBER", str(number)))
        paths.append(str(folder / f"launcher_of_a_test{sysconfig.get_config_var('EXT_SUFFIX')}"))
        command = [compiler, "-shared", "-fPIC", f"-I{headers}", str(folder / "launcher.c"), "-o", paths[-1]]
        subprocess.run(command, check=True)

    def loaded() -> list[int]:
        return [
            module.launch() for module in [build._load_module_from_path("launcher_of_a_test", p) for p in paths * 2]
        ]

    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)  # put back afterwards
    compile_ahead.name_launchers_apart()
    compile_ahead.name_launchers_apart()  # changes nothing more
    assert loaded() == [1, 2, 1, 2]
