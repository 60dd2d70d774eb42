"""Compiling ahead: each kernel that is foreseen compiles once, and a launch takes what is ready."""

from __future__ import annotations

import contextlib
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


def _job(rows: int):
    def job():
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, requires_grad=True)
        rms_norm.liger_rms_norm(x, torch.empty(4096, dtype=torch.bfloat16), 1e-6).sum().backward()

    return job


def test_a_job_that_fails_is_left_out(on_sm90):
    def fails():
        raise RuntimeError("no kernel of ours")

    alone, beside = set(), set()
    compile_ahead.note_launches([_job(64)], noted(alone))
    compile_ahead.note_launches([fails, _job(64)], noted(beside))
    assert {name for name, *_ in alone} == {"rms_norm.fwd", "rms_norm.bwd"} and beside == alone


def test_the_first_kernel_compiles_alone(monkeypatch, on_sm90):
    """Nobody begins before it is done, and then everybody does; each kernel compiles once."""
    begun, first_is_done, lock = [], threading.Event(), threading.Lock()
    together = threading.Barrier(2, timeout=30)

    def compile_only(plan, kernel, args, flags):
        with lock:
            begun.append(plan.tunable.name)
            alone = len(begun) == 1
        if alone:
            assert not first_is_done.wait(0.2) and len(begun) == 1
            first_is_done.set()
            raise RuntimeError("a first kernel that fails holds nobody up")
        assert first_is_done.is_set()
        together.wait()

    plans = {}

    def plan_of(tunable):
        return types.SimpleNamespace(tunable=tunable, compiled=plans.setdefault(tunable.name, {}))

    def note_launches(jobs, note):
        for plan in map(plan_of, (rms_norm.FWD, *rms_norm.BACKWARD[:2])):
            for _ in range(2):
                note(plan, _norm_fwd_kernel, (1,), (), ())

    monkeypatch.setattr(compile_ahead, "note_launches", note_launches)
    monkeypatch.setattr(_launch, "compile_only", compile_only)
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(device=contextlib.nullcontext))
    compile_ahead.start([], torch.device("cpu")).result(60)
    assert begun[0] == "rms_norm.fwd" and sorted(begun) == sorted(plans) and len(begun) == 3
    failed, *others = plans.values()
    assert not failed and all(future.result() is None for found in others for future in found.values())


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
    launch.join(30)
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
    compile_ahead._compile(future, future, "alike", plan, None, (), (), x.device)
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
