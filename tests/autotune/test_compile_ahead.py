"""Compiling ahead: what is foreseen is what the patched model then launches, and a launch takes what is ready."""

from __future__ import annotations

import contextlib
import threading
import types
from concurrent.futures import Future

import pytest
import torch

from liger_hw import registry
from liger_hw.autotune import compile_ahead
from liger_hw.backends import known_target
from liger_hw.kernels.norms import rms_norm
from liger_hw.kernels.norms.core import _norm_fwd_kernel
from liger_hw.runtime import launch as _launch
from liger_hw.runtime.observe import observing
from liger_hw.runtime.operator import LauncherMode

pytestmark = pytest.mark.cpu


@pytest.fixture
def target(clean_registry):
    with registry.pretend(known_target("sm90")):
        yield


def _noted(launches: set):
    def note(plan, kernel, grid, args, flags):
        launches.add((plan.tunable.name, plan.key, _launch.likeness(kernel, args, flags)))

    return note


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gemma2"])
def test_a_model_launches_what_was_foreseen(kind, target):
    transformers = pytest.importorskip("transformers")
    from torch._subclasses.fake_tensor import FakeTensorMode

    import liger_hw.transformers as patches

    name = kind.capitalize()
    sizes = dict(vocab_size=512, num_hidden_layers=1, hidden_size=256, intermediate_size=512, head_dim=64)
    config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=4, num_key_value_heads=2)
    foreseen, launched = set(), set()
    jobs = compile_ahead.foresee(config, 2, 32)
    compile_ahead.note_launches(jobs, torch.bfloat16, torch.device("cpu"), _noted(foreseen))
    report = getattr(patches, f"apply_liger_kernel_to_{kind}")()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(), LauncherMode(), observing(compile_ahead.Foreseen(_noted(launched))):
            model = getattr(transformers, f"{name}ForCausalLM")(config).train()
            ids = torch.randint(0, 512, (2, 32))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
        report.revert()
    assert launched and launched <= foreseen, sorted(n[0] for n in launched - foreseen)


def test_nothing_is_started_where_nothing_compiles():
    class Config:
        def to_dict(self):
            raise AssertionError("asked for although the CPU compiles nothing")

    assert compile_ahead.start(Config(), 1, 8, torch.float32, torch.device("cpu")) is None


def test_a_launch_waits_for_the_kernel_being_compiled(monkeypatch, target):
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


def test_a_kernel_that_fails_ahead_is_left_to_its_launch(monkeypatch, target):
    x = torch.ones(2, 16)
    plan = rms_norm.FWD.plan(x.device, registry.row_key(2, 16, 4))
    plan.compiled = {}
    future = Future()
    plan.compiled["alike"] = future
    monkeypatch.setattr(_launch, "compile_only", lambda *a: (_ for _ in ()).throw(RuntimeError("no")))
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(device=contextlib.nullcontext))
    compile_ahead._compile(future, "alike", plan, None, (), (), x.device)
    assert "alike" not in plan.compiled and future.exception() is not None
