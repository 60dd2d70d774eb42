"""The peers: every arm that runs here computes what the op's reference computes; absent ones say so."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types

import more_peers  # noqa: F401  adds them to peers.PEERS
import pytest
import torch

from liger_hw import registry
from liger_hw.bench import ops, peers
from liger_hw.bench.inputs import tensors_in

OPS = sorted(registry.ops())


def few(name: str):
    op = registry.get_op(name)
    sizes = tuple(min(size, 16) for size in next(iter(op.workloads.values())))
    return op, ops.make_inputs(ops.Case(op, "few", sizes, torch.float32), sizes, torch.device("cpu"), 0)


def pairs():
    for name in OPS:
        for arm in ("torch", "aten", peers.OURS):
            with contextlib.suppress(peers.Absent):
                peers.arm(arm, registry.get_op(name))
                yield name, arm


@pytest.mark.parametrize("name, arm", list(pairs()))
def test_an_arm_computes_what_the_reference_does(name, arm):
    op, inputs = few(name)
    function = peers.arm(arm, op)
    found = tensors_in(function(*inputs.args, **inputs.kwargs))
    exact = inputs.clone(torch.float64)
    wanted = tensors_in(op.reference(*exact.args, **exact.kwargs, **exact.exact))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_a_peer_that_is_not_installed_is_absent(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(peers.Absent, match="quack-kernels is not installed"):
        peers.arm("quack", registry.get_op("rms_norm"))


def test_a_peer_without_the_op_is_absent():
    with pytest.raises(peers.Absent, match="aten has no swiglu"):
        peers.arm("aten", registry.get_op("swiglu"))


def test_an_option_a_peer_has_not_is_unsupported():
    op, inputs = few("rms_norm")
    with pytest.raises(peers.Unsupported, match="has no offset=1.0"):
        peers.arm("aten", op)(inputs.args[0], inputs.args[1], 1e-6, 1.0)


class Liger:
    """Liger's rotary functions in plain torch, with its argument lists: they read the first half of cos and sin."""

    @staticmethod
    def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return registry.get_op("rope").reference(q, k, cos, sin, None, unsqueeze_dim, None, True)

    @staticmethod
    def liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        return registry.get_op("qwen2vl_mrope").reference(q, k, cos, sin, mrope_section, unsqueeze_dim, True)

    @staticmethod
    def liger_rotary_pos_emb_vision(q, k, cos, sin):
        return registry.get_op("vision_rope").reference(q, k, cos, sin, True)


@pytest.mark.parametrize("name", ("rope", "qwen2vl_mrope", "vision_rope"))
def test_liger_is_not_told_that_halves_are_equal(name, monkeypatch):
    for module in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    for module in ("functional", "rope"):
        monkeypatch.setitem(sys.modules, f"liger_kernel.transformers.{module}", Liger)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    op, inputs = few(name)
    assert inputs.kwargs["shared_halves"]
    found = peers.arm("liger", op)(*inputs.args, **inputs.kwargs)
    torch.testing.assert_close(found, op.function(*inputs.args, **inputs.kwargs))


def test_the_implementation_that_liger_chooses_is_noted(monkeypatch):
    """Liger 0.8.5 resolves an op to one of its implementations in each call; older ones have Triton alone."""
    dispatch = types.ModuleType("liger_kernel.backends.dispatch")

    def resolve_impl(op, requested=None, device=None):
        return types.SimpleNamespace(impl_name={"rope": "nvidia-cutedsl"}.get(op, "nvidia-triton"))

    dispatch.resolve_impl = resolve_impl
    dispatch.dispatch = lambda op: dispatch.resolve_impl(op).impl_name
    packages = {name: types.ModuleType(name) for name in ("liger_kernel", "liger_kernel.backends")}
    for name, module in {**packages, dispatch.__name__: dispatch}.items():
        monkeypatch.setitem(sys.modules, name, module)
    with peers.liger.chosen() as names:
        assert dispatch.dispatch("rope") == "nvidia-cutedsl" and dispatch.dispatch("jsd") == "nvidia-triton"
    assert names == {"nvidia-cutedsl", "nvidia-triton"} and dispatch.resolve_impl is resolve_impl
    with peers.liger.chosen() as names:
        pass
    assert names == {"triton"}
    monkeypatch.setitem(sys.modules, "liger_kernel.backends.dispatch", None)
    with peers.liger.chosen() as names:
        pass
    assert names == {"triton"}


def test_what_decides_the_implementation_is_in_the_machine_s_entry(monkeypatch):
    from liger_hw.bench import report

    monkeypatch.setattr(peers.liger.metadata, "version", lambda name: "0.8.5")
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "triton")
    facts = report.machine(torch.device("cpu"))["liger"]
    assert facts == {"version": "0.8.5", "cutlass.cute": False, "LIGER_KERNEL_IMPL": "triton"}
    row = {"arm": "liger", "op": "rope", "implementation": "nvidia-cutedsl"}
    others = [{**row, "implementation": "triton", "op": name} for name in ("swiglu", "geglu")]
    assert report._implementations([row, *others])[:2] == [
        "liger ran nvidia-cutedsl: rope",
        "liger ran triton: swiglu, geglu",
    ]
