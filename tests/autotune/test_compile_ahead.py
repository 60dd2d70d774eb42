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
import weakref
from concurrent.futures import Future

import pytest
import torch
from harness import noted, python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import liger_hw
from liger_hw import registry
from liger_hw.autotune import compile_ahead
from liger_hw.autotune.fake import FakeTensors
from liger_hw.kernels.norms import rms_norm
from liger_hw.kernels.norms.forward import _norm_fwd_kernel
from liger_hw.runtime import launch as _launch
from liger_hw.runtime import operator
from liger_hw.runtime.launch import LaunchTracer, Routine, call_routine, observing


class LauncherMode(TorchDispatchMode):
    """Runs the launchers of liger_hw's operators, under torch's own fake tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        launcher = operator.launchers.get(func._schema.name.removeprefix("liger_hw::"))
        if launcher is None or func.namespace != "liger_hw":
            return func(*args, **(kwargs or {}))
        with self:
            return launcher(*args, **(kwargs or {}))


KERNEL = copy.copy(_norm_fwd_kernel)
"""A copy of the kernel, launched without arguments: `_tensor_counts` remembers each kernel's number of tensors."""


@pytest.fixture
def compiled(monkeypatch):
    """The compilations of a `FirstForward`: `list` has (tunable's name, event that ends it) in their order, `wait(n)`
    returns once n have begun."""
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
    monkeypatch.setattr(compile_ahead, "_load_driver", lambda device: None)
    monkeypatch.setattr(compile_ahead, "_hash_triton", lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(device=contextlib.nullcontext))
    return types.SimpleNamespace(list=begun, wait=wait)


def _plan(tunable, **constexprs):
    names = KERNEL.arg_names
    return types.SimpleNamespace(tunable=tunable, compiled={}, options={}, constexprs=dict.fromkeys(names) | constexprs)


def _note(first, *plans):
    for plan in plans:
        first._note_launch(plan, KERNEL, (1,), (), ())


def test_nothing_compiles_before_triton_is_ready(monkeypatch, compiled):
    """Else each thread would build Triton's driver and hash Triton's files."""
    ready = threading.Event()
    monkeypatch.setattr(compile_ahead, "_load_driver", lambda device: ready.wait())
    plan = _plan(rms_norm.FWD)
    first = compile_ahead.FirstForward(torch.device("cpu"))
    _note(first, plan)
    assert len(plan.compiled) == 1 and not compiled.list
    ready.set()
    compiled.wait(1)
    compiled.list[0][1].set()
    first.pool.shutdown()


def test_each_kernel_compiles_once(monkeypatch, compiled):
    """Also a kernel that two tunables launch alike: both plans have the same Future."""
    tunables = rms_norm.FWD, *rms_norm.BACKWARD[:2]
    plans = [_plan(tunable, ROWS=number) for number, tunable in enumerate(tunables)]
    alike = _plan(types.SimpleNamespace(name="alike"), ROWS=0)
    first = compile_ahead.FirstForward(torch.device("cpu"))
    _note(first, plans[0], plans[0], alike, *plans[1:])
    for number in range(3):
        compiled.wait(number + 1)
        compiled.list[number][1].set()
    first.pool.shutdown()
    assert sorted(name for name, _ in compiled.list) == sorted(tunable.name for tunable in tunables)
    (future,), (other,) = plans[0].compiled.values(), alike.compiled.values()
    assert future is other and future.result() is None


def test_a_call_that_is_not_foreseen_is_no_failure(compiled):
    class Fails:
        @staticmethod
        def apply(*args):
            raise RuntimeError("no kernel of ours")

    first = compile_ahead.FirstForward(torch.device("cpu"))
    first.note_call(Fails, (torch.ones(2),))
    first.pool.shutdown()
    assert not first.compiling


def test_what_is_the_callers_stays_the_callers(compiled, on_sm90):
    """A call on fake tensors draws no random number, keeps the grad mode, and no hook of saved tensors sees it."""
    x, weight = torch.ones(4, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    state, launches = torch.get_rng_state(), {}
    first = compile_ahead.FirstForward(torch.device("cpu"))
    first._note_launch = noted(launches)
    refuse = lambda t: pytest.fail("a hook ran")  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        first.note_call(rms_norm.RMSNormFunction, (x, weight, 1e-6, 0.0, rms_norm.CASTING_MODES["llama"]))
    first.pool.shutdown()
    assert {name for name, *_ in launches} >= {"rms_norm.fwd", "rms_norm.bwd"}
    assert torch.is_grad_enabled() and torch.equal(state, torch.get_rng_state())
    assert x.grad is None and weight.grad is None
    with torch.no_grad():
        again = {}
        first._note_launch = noted(again)
        first._calls.clear()
        first.note_call(rms_norm.RMSNormFunction, (x, weight, 1e-6, 0.0, rms_norm.CASTING_MODES["llama"]))
    assert {name for name, *_ in again} == {"rms_norm.fwd"}


def test_nothing_slow_is_imported():
    """torch._dynamo and sympy take seconds of a process's first call."""
    code = """
import sys, torch
from liger_hw import registry
from liger_hw.autotune import compile_ahead
from liger_hw.backends import known_target
from liger_hw.kernels.moe.fused_moe import FusedMoEFunction, sample
from liger_hw.kernels.moe.reference import ExpertOptions, Gate
from liger_hw.runtime.launch import LaunchTracer, observing
args = sample((64, 64, 48, 8, 2), torch.bfloat16, torch.device("cpu"), torch.Generator()).args
names = []
tracer = LaunchTracer(lambda plan, *launch: names.append(plan.tunable.name))
with registry.pretend(known_target("sm90")), observing(tracer):
    compile_ahead.run_on_fakes(FusedMoEFunction, (*args, None, None, ExpertOptions(Gate.checked(""), False)))
assert names[-1] == "fused_moe.down_weights", names
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""
    assert python("-c", code) == "[]\n"


def test_a_librarys_routine_is_not_run():
    """torch's grouped product would import sympy on fake tensors: two seconds of a first call."""
    routine = Routine(lambda t: pytest.fail("it ran"), lambda t: t.new_empty(len(t), 3))
    with observing(LaunchTracer(lambda *launch: None)):
        assert call_routine(None, routine, (torch.ones(2),)).shape == (2, 3)


def test_a_fake_tensors_address_is_its_offset():
    """fused_moe asks whether an operand is aligned for the library's product."""
    with FakeTensors():
        t = torch.empty(8, 16, dtype=torch.bfloat16)
        assert (t.data_ptr(), t[:, 3:].data_ptr()) == (0, 6)


def test_linears_in_float8_that_are_alike_are_foreseen_once(monkeypatch, compiled, on_sm90):
    """Each layer has another object for its scales, and takes its input in FP8 as a tuple of tensors."""
    calls, launches, run_on_fakes = [], {}, compile_ahead.run_on_fakes
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({n: torch.nn.Linear(32, 32) for n in "ab"}) for _ in range(3))
    liger_hw.float8(layers, smallest=16)
    first = compile_ahead.FirstForward(torch.device("cpu"))
    first._note_launch = noted(launches)
    monkeypatch.setattr(operator, "before_apply", first.note_call)
    monkeypatch.setattr(compile_ahead, "run_on_fakes", lambda *call: calls.append(call) or run_on_fakes(*call))
    x = torch.randn(16, 32, requires_grad=True)
    for layer in layers:
        for linear in layer.values():
            linear(x)
            scales = linear.float8.scales
            assert type(scales.input) is type(scales.weight) is torch.Tensor and scales.gradient is None
    first.pool.shutdown()
    assert len(calls) == 1
    assert {name for name, *_ in launches} == {"float8_linear.rows", "float8_linear.transposed"}


def test_one_forward_of_a_configuration_compiles_ahead(monkeypatch, compiled):
    monkeypatch.setattr(compile_ahead, "is_wanted", lambda device: True)
    config, device = type("Config", (), {})(), torch.device("cpu")
    with compile_ahead.during_first_forward(config, device) as first:
        assert operator.before_apply == first.note_call
        with compile_ahead.during_first_forward(type(config)(), device) as inner:  # of a model around this one
            assert inner is None
    assert operator.before_apply is None
    with compile_ahead.during_first_forward(config, device) as again:
        assert again is None and operator.before_apply is None
    kept = weakref.ref(config)
    del config
    assert kept() is None, "a configuration lives as long as its model"
    with compile_ahead.during_first_forward({"hidden_size": 8}, device) as first:  # no weak references to a dict
        assert first is None


def test_the_first_call_of_an_op_of_many_kernels_compiles_ahead(monkeypatch, compiled, on_sm90):
    """Outside a model's first forward too, and only the first call: all launches of forward and backward."""
    op, foreseen = registry.get_op("fused_moe"), {}
    sample = op.sample((19, 32, 16, 5, 3), torch.bfloat16, torch.device("cpu"), torch.Generator().manual_seed(0))
    monkeypatch.setattr(compile_ahead, "begun", {})
    monkeypatch.setattr(compile_ahead, "is_wanted", lambda device: True)
    monkeypatch.setattr(compile_ahead.FirstForward, "_note_launch", lambda first, *launch: noted(foreseen)(*launch))
    op.function(*sample.args)
    without_biases = {tunable.name for tunable in op.tunables} - {"fused_moe.bias"}
    assert {name for name, *_ in foreseen} == without_biases and operator.before_apply is None
    foreseen.clear()
    op.function(*sample.args)
    assert not foreseen


def test_triton_is_hashed_where_it_asks_for_the_hash():
    pytest.importorskip("triton")
    modules = [importlib.import_module(name) for name in ("triton.runtime.cache", "triton.compiler.compiler")]
    (hashed,) = {module.triton_key for module in modules if hasattr(module, "triton_key")}
    compile_ahead._hash_triton()
    assert hashed.cache_info().currsize == 1


# Norms that cast as Llama's, Gemma's and OLMo's do, over heads and over projections, and LayerNorm; gate and up in
# one product, GeGLU, relu squared; angles in fp32, of half the width, of part of it, and of neighbours.
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "phi3", "glm4", "nemotron")


@pytest.mark.daily(batch="1", kind=("llama", "gemma2", "olmo2", "phi3"))
@pytest.mark.daily(batch="2", kind=("qwen3", "glm4", "nemotron"))
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_what_is_compiled_ahead(kind, batch, compiled, on_sm90, monkeypatch):
    """Exactly the same kernels; with one sequence too, whose shifted labels have another alignment."""
    transformers = pytest.importorskip("transformers")
    import liger_hw.transformers as patches
    from liger_hw.transformers.models import specs
    from liger_hw.transformers.tiny import tiny_config

    cls = getattr(transformers, specs()[kind].models[0], None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config, foreseen, launched = tiny_config(cls.config_class), {}, {}
    ids = torch.zeros(batch, 32, dtype=torch.long)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with getattr(patches, f"apply_liger_kernel_to_{kind}")(activations="keep"):
            model = cls(config).train()
            first = compile_ahead.FirstForward(torch.device("cpu"))
            first._note_launch = noted(foreseen)
            monkeypatch.setattr(operator, "before_apply", first.note_call)
            model(input_ids=ids, labels=ids, use_cache=False)
            monkeypatch.setattr(operator, "before_apply", None)
            with FakeTensorMode(), LauncherMode(), observing(LaunchTracer(noted(launched))):
                model = cls(config).train()
                ids = torch.zeros(batch, 32, dtype=torch.long)
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        torch.set_default_dtype(before)
    assert len(launched) >= 9
    missed, in_vain = launched.keys() - foreseen.keys(), foreseen.keys() - launched.keys()
    assert not missed and not in_vain, ([name for name, *_ in missed], [name for name, *_ in in_vain])


def test_a_launch_waits_for_the_kernel_being_compiled(monkeypatch, on_sm90):
    """A launch in another thread waits until the kernel is compiled, then goes through Triton once."""
    x, y = torch.ones(2, 16), torch.empty(2, 16)
    key = registry.row_key(2, 16, 4)
    plan = rms_norm.FWD.plan(x.device, key)
    plan.compiled = {}
    flags = 0, False, True, 0, 1, False
    args = x, None, None, None, y, None, torch.empty(2), 16, None, 2, 16, None, 1e-6, 0.0
    future, ran = Future(), []
    plan.compiled[_launch.compile_key(_norm_fwd_kernel, args, flags)] = future
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


def test_a_kernel_that_fails_ahead_is_left_to_its_launch(monkeypatch, compiled, on_sm90):
    x = torch.ones(2, 16)
    plan = rms_norm.FWD.plan(x.device, registry.row_key(2, 16, 4))
    plan.compiled = {}
    future = Future()
    plan.compiled["alike"] = future
    monkeypatch.setattr(_launch, "compile_only", lambda *a: (_ for _ in ()).throw(RuntimeError("no")))
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(device=contextlib.nullcontext))
    first = compile_ahead.FirstForward(x.device)
    first._compile(future, "alike", plan, None, (), ())
    first.pool.shutdown()
    assert "alike" not in plan.compiled and future.exception() is not None


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) { return PyModule_Create(&module); }
"""


def test_a_launcher_that_is_loaded_again_stays_itself(tmp_path, monkeypatch):
    """Two launchers of one name, as Triton up to 3.6 builds them, each loaded twice."""
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
    compile_ahead.give_launchers_unique_names()
    compile_ahead.give_launchers_unique_names()  # changes nothing more
    assert loaded() == [1, 2, 1, 2]


def test_a_fake_shift_has_the_shape_of_both_operands():
    """The name `__lshift__` ends in an underscore, as names of in-place operators do."""
    with FakeTensors():
        row, column = torch.empty(1, 8, dtype=torch.int32), torch.empty(4, 1, dtype=torch.int32)
        assert (column << row).shape == (4, 8)
        assert column.add_(1) is column
