"""No thread but the caller's touches a model: every attribute of a module or parameter raises on any other."""

from __future__ import annotations

import threading
import traceback
import types
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import liger_hw
import liger_hw.transformers as patches
from liger_hw.autotune import compile_ahead
from liger_hw.transformers.tiny import tiny_config

PACKAGE = str(Path(liger_hw.__file__).parent)
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM"}


class _CallersOnly(Exception):
    """A module or a parameter was touched on another thread than the caller's."""


@pytest.fixture
def touched(monkeypatch):
    """Where another thread touched a module or a parameter; it got an error for it."""
    caller, places = threading.get_ident(), []

    def guard(cls):
        plain_get, plain_set = cls.__getattribute__, cls.__setattr__

        def check(name):
            if threading.get_ident() != caller:
                places.append((name, "".join(traceback.format_stack(limit=8))))
                raise _CallersOnly(name)

        def get(self, name):
            check(name)
            return plain_get(self, name)

        def put(self, name, value):
            check(name)
            plain_set(self, name, value)

        monkeypatch.setattr(cls, "__getattribute__", get, raising=False)
        monkeypatch.setattr(cls, "__setattr__", put)

    guard(nn.Module)
    guard(nn.Parameter)
    return places


@pytest.fixture
def threads(monkeypatch):
    """The threads that liger_hw starts, as on a device that compiles beside the first step. In place of a compilation
    the kernel's name joins `kernels`."""
    started, kernels = [], []
    start, note_launch = threading.Thread.start, compile_ahead.FirstForward._note_launch

    def noted_start(self):
        if any(frame.filename.startswith(PACKAGE) for frame in traceback.extract_stack()):
            started.append(self)
        start(self)

    def note(self, plan, *launch):
        plan.compiled = {} if plan.compiled is None else plan.compiled  # as on a device with the fast launcher
        note_launch(self, plan, *launch)

    def compile_one(self, future, compile_key, plan, kernel, args, flags):
        assert not any(isinstance(arg, (torch.Tensor, nn.Module)) for arg in args)
        kernels.append(plan.tunable.name)
        future.set_result(None)

    monkeypatch.setattr(threading.Thread, "start", noted_start)
    monkeypatch.setattr(compile_ahead, "is_wanted", lambda device: True)
    monkeypatch.setattr(compile_ahead, "_load_driver", lambda device: None)
    monkeypatch.setattr(compile_ahead, "_hash_triton", lambda: None)
    monkeypatch.setattr(compile_ahead, "give_launchers_unique_names", lambda: None)
    monkeypatch.setattr(compile_ahead.FirstForward, "_note_launch", note)
    monkeypatch.setattr(compile_ahead.FirstForward, "_compile", compile_one)
    return types.SimpleNamespace(started=started, kernels=kernels)


def _class(model, kind, **options):
    return getattr(patches, f"apply_liger_kernel_to_{kind}")(**options)


def _live(model, kind, **options):
    return getattr(patches, f"apply_liger_kernel_to_{kind}")(model=model, **options)


def _generic(model, kind, **options):
    return patches.patch(model, **options)


def _deterministic(model, kind, **options):
    liger_hw.set_deterministic(True)  # until `clean_registry` ends
    return _live(model, kind, **options)


FORMS = {
    "classes": (_class, "llama", {}),
    "a live model": (_live, "llama", {}),
    "patch": (_generic, "qwen3", {}),
    "experts": (_class, "mixtral", {}),
    "experts of a live model": (_live, "mixtral", {}),
    "deterministic": (_deterministic, "llama", {}),
    **{f"activations={level}": (_live, "llama", {"activations": level}) for level in ("keep", "cheap", "mlp", "full")},
    "activations by layer": (_live, "llama", {"activations": ["mlp", "cheap"]}),
}


def _plain(model):
    return model


def _ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def _checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


ENGINES = {"plain": _plain, "ddp": _ddp, "checkpointed": _checkpointed}


def _small(kind):
    cls = getattr(transformers, CLASSES[kind])
    return cls(tiny_config(cls.config_class, num_hidden_layers=2)).train()


def test_another_thread_that_reads_a_model_is_noticed(touched):
    model = _small("llama")
    weight = model.lm_head.weight

    def reads():
        for read in (lambda: model.lm_head, lambda: weight.shape, lambda: setattr(model, "training", False)):
            pytest.raises(_CallersOnly, read)

    thread = threading.Thread(target=reads)
    thread.start()
    thread.join()
    assert [name for name, _ in touched] == ["lm_head", "shape", "training"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_touches_the_model_on_the_callers_thread_only(form, engine, touched, threads, on_sm90, request):
    if engine == "ddp":
        request.getfixturevalue("one_rank")
    patch, kind, options = FORMS[form]
    model = _small(kind)
    hooked: set[int] = set()
    model.register_forward_pre_hook(lambda *_: hooked.add(threading.get_ident()))
    model.lm_head.weight.register_hook(lambda _: hooked.add(threading.get_ident()))
    report = patch(model, kind, **options)
    try:
        wrapped = ENGINES[engine](model)
        ids = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            wrapped(input_ids=ids, labels=ids).loss.backward()
    finally:
        report.revert()
    for thread in threads.started:
        thread.join(60)
    assert not touched, touched[0]
    assert hooked == {threading.get_ident()}
    assert all(p.grad is not None for p in model.parameters())
    assert threads.started and not any(thread.is_alive() for thread in threads.started)
    assert {"rms_norm.fwd", "rms_norm.bwd"} <= set(threads.kernels)
