"""An operator's launcher is called without torch's dispatcher only where no mode, profiler or transform is active."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_hw.kernels.norms import rms_norm
from liger_hw.runtime import launch
from liger_hw.runtime import operator as _op


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """Any subclass: it may handle the call itself."""


@pytest.fixture
def call(define, monkeypatch):
    """Calls an operator on tensors that claim to be on a device, and returns which of two ways it took."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(launch, "CAN_BE_FAST", False)  # a torch built for CUDA would ask for the driver
    operator = define(
        "direct_call_probe(Tensor x, Tensor? y, float z) -> Tensor",
        shapes="x; y",
        launcher=lambda x, y, z: "launcher",
        reference=lambda x, y, z: x + z,
        fake=lambda x, y, z: torch.empty_like(x),
    )
    x = torch.ones(2)

    def way(x=x, y=None) -> str:
        return "launcher" if isinstance(operator(x, y, 1.0), str) else "operator"

    return way


def test_plain_eager_code_calls_the_launcher(call):
    with torch.no_grad():
        assert call() == "launcher"
        assert call(y=torch.nn.Parameter(torch.ones(2))) == "launcher"
    with torch.inference_mode():
        assert call() == "launcher"


@pytest.mark.parametrize(
    "seen",
    [torch.enable_grad, Seeing, lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])],
)
def test_modes_and_profilers_see_the_operator(call, seen):
    with torch.no_grad(), seen():
        assert call() == "operator"


def test_subclasses_and_transforms_see_the_operator(call):
    with torch.no_grad():
        assert call(y=torch.ones(2).as_subclass(Wrapped)) == "operator"
        ways = []
        with contextlib.suppress(RuntimeError):  # the operator has no rule for it, and torch says so
            torch.func.vmap(lambda x: ways.append(call(x)) or x)(torch.ones(3, 2))
        assert "launcher" not in ways


def test_torch_compile_sees_the_operator(call):
    with torch.no_grad():
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        fwd = rms_norm.RMSNormFunction.fwd
        torch.compile(lambda x: fwd(x, None, 1e-6, 0.0, 0)[0], backend=backend, fullgraph=True)(torch.ones(2, 8))
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert "liger_hw.rms_norm_fwd.default" in targets


def test_cpu_tensors_go_through_the_operator():
    with torch.no_grad():
        assert not _op.are_plain((torch.ones(2),)) and not _op.are_plain((torch.ones(2, device="meta"),))


class Times(_op.Function):
    seen: list[bool] = []

    @staticmethod
    def forward(ctx, x, factor=2.0):
        Times.seen.append(torch._C._functorch.is_functorch_wrapped_tensor(x))
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def test_apply_does_what_torch_does():
    """A tensor that leaked from a transform is unwrapped."""
    leaked = []
    torch.func.grad(lambda x: leaked.append(x) or x.sum())(torch.ones(3))
    assert torch._C._functorch.is_functorch_wrapped_tensor(leaked[0])
    Times.seen.clear()
    assert torch.equal(Times.apply(leaked[0], 3.0), torch.full((3,), 3.0)) and Times.seen == [False]


def test_apply_takes_keywords_where_torch_does():
    """torch 2.11 does not."""

    class Plain(torch.autograd.Function):
        forward, backward = Times.forward, Times.backward

    x = torch.ones(2, requires_grad=True)
    try:
        Plain.apply(x, factor=4.0)
    except TypeError as error:
        with pytest.raises(TypeError, match=re.escape(str(error))):
            Times.apply(x, factor=4.0)
    else:
        Times.apply(x, factor=4.0).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 4.0))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda one: one.__name__
)
def test_transforms_are_refused_with_a_remedy(transform, compiled):
    """Also compiled, where torch 2.13 makes a Function's gradient zero. The remedy, the reference, takes transforms."""
    from liger_hw import registry

    op, x, w = registry.get_op("rms_norm"), torch.randn(4, 8), torch.ones(8)

    def transformed(norm):
        return transform(lambda x: norm(x, w, 1e-6).square().sum())

    torch._dynamo.reset()
    run = torch.compile(transformed(op.function), backend="aot_eager") if compiled else transformed(op.function)
    with pytest.raises(RuntimeError, match="LigerRMSNormFunction: .*torch.func.*autograd.grad.*reference"):
        run(x)
    assert transformed(op.reference)(x).isfinite().all()


_LOSSES = {
    "cross_entropy": lambda f, x: f(x, torch.arange(x.shape[0])),
    "kl_div": lambda f, x: f(x, torch.full_like(x, 0.125)),
    "fused_linear_cross_entropy": lambda f, x: f(x, torch.eye(16, 8), torch.arange(x.shape[0])),
}


@pytest.mark.parametrize("loss", _LOSSES)
def test_a_transform_around_vmap_is_refused_too(loss):
    """Inside vmap a tensor does not show that a gradient is needed outside, so a loss would apply no Function and its
    gradient would be zero; vmap of a backward would read foreign memory."""
    from liger_hw import registry

    x, one = torch.randn(3, 4, 8), lambda x: _LOSSES[loss](registry.get_op(loss).function, x)

    def each(x):
        return torch.func.vmap(one)(x).sum()

    for run in (torch.func.grad(each), torch.func.jacrev(each), lambda x: torch.func.jvp(each, (x,), (x,))):
        with pytest.raises(RuntimeError, match=f"(liger_hw::{loss}|Liger[A-Za-z]+Function).*torch.func.*reference"):
            run(x)
    with pytest.raises(RuntimeError, match=f"(liger_hw::{loss}|Liger[A-Za-z]+Function).*torch.func.*reference"):
        each(x.clone().requires_grad_())
    leaf = x[0].clone().requires_grad_()
    value = one(leaf)
    for run in (
        torch.no_grad()(each),
        lambda x: torch.func.vmap(lambda g: torch.autograd.grad(value, leaf, g))(x[:, 0, 0]),
    ):
        with pytest.raises(RuntimeError, match="(liger_hw::|Liger).*torch.func.*reference"):
            run(x)
