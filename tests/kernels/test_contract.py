"""Promises of every op beside its numbers: any strides, empty batches, inputs left alone, repeatable gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness import (
    ONE_OF_A_FAMILY,
    Result,
    changed,
    check,
    checked_inputs,
    few_sizes,
    forward,
    leaf,
    make,
    misaligned,
    output_grads,
    padded,
    run,
    tensors,
    verify,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint


def _every_other(t):
    wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype, device=t.device)
    return wide[..., ::2].copy_(t)


def _transposed(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t.clone()


LAYOUTS = {"padded": padded, "every_other": _every_other, "transposed": _transposed, "misaligned": misaligned}


# Padded rows keep their stride, transposed ones are copied; the other layouts take one of these two paths.
@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY, layout=("padded", "transposed", "misaligned"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(lane, op, layout, seed):
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed)
    verify(op, changed(sample, lambda t: LAYOUTS[layout](t) if t.dim() else t), seed)


OF_GRADIENTS = {
    **LAYOUTS,
    "expanded": lambda g: g[:1].expand(g.shape),
    "of a sum": lambda g: g.new_ones(()).expand(g.shape),  # as in `out.sum().backward()`
}


@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY, layout=("padded", "transposed", "expanded", "of a sum"))
@pytest.mark.parametrize("layout", OF_GRADIENTS)
def test_strided_gradients(lane, op, layout, seed):
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed)
    grads = output_grads(forward(op.function, sample), seed)
    grads = [g if g is None or not g.dim() else OF_GRADIENTS[layout](g) for g in grads]
    check(op, sample, run(op.function, sample, grads=grads))


def test_empty_batch(lane, case, seed):
    op, options = case
    sizes = (0, *few_sizes(op)[1:])
    verify(op, make(op, sizes, torch.float32, lane.device, seed, options), seed)


@pytest.mark.cpu
def test_inside_a_checkpoint(op, seed):
    """torch's checkpoint computes an op again, and hands out its saved tensors only once."""
    sample = make(op, few_sizes(op), torch.float32, "cpu", seed)
    inputs = checked_inputs(sample)
    results = []
    for call in (op.function, lambda *args, **more: checkpoint(op.function, *args, use_reentrant=False, **more)):
        outputs = [t for t in tensors(call(*sample.args, **sample.kwargs)) if t.requires_grad]
        results.append(torch.autograd.grad(outputs, inputs, output_grads(outputs, seed), allow_unused=True))
    for plain, computed_again in zip(*results):
        assert plain is None and computed_again is None or torch.equal(plain, computed_again)


@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY)
def test_one_tensor_in_two_places(lane, op, seed):
    """f(x, x): the gradient is the sum of both."""
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed)
    args = list(sample.args)
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]
    pairs = [(i, j) for i in places for j in places if i < j and args[i].shape == args[j].shape]
    if not pairs:
        args[places[0]] = leaf(args[places[0]].detach().clone(), True)
    for i, j in pairs:
        args[j] = args[i]
    verify(op, dataclasses.replace(sample, args=tuple(args)), seed)


@pytest.mark.daily("interpret", options="default", dtype="float32")
def test_nothing_is_overwritten(lane, dtype, case, seed):
    """Inputs, outputs and incoming gradients keep their bits, and a second backward (retain_graph) gives the same."""
    op, options = case
    sample = make(op, few_sizes(op), dtype, lane.device, seed, options)
    inputs = tensors((sample.args, sample.kwargs))
    copies = [t.detach().clone() for t in inputs]
    outputs = forward(op.function, sample)
    seen = [o.detach().clone() for o in outputs]
    grads = output_grads(outputs, seed)
    grad_copies = [None if g is None else g.clone() for g in grads]
    pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None]
    outs, incoming = [o for o, _ in pairs], [g for _, g in pairs]
    first = torch.autograd.grad(outs, checked_inputs(sample), incoming, retain_graph=True, allow_unused=True)
    kept = [None if g is None else g.clone() for g in first]
    second = torch.autograd.grad(outs, checked_inputs(sample), incoming, allow_unused=True)
    for name, now, then in (
        ("input", inputs, copies),
        ("output", outputs, seen),
        ("incoming gradient", grads, grad_copies),
        ("gradient", first, kept),
        ("gradient of the first backward, by the second,", second, kept),
    ):
        for i, (a, b) in enumerate(zip(now, then)):
            assert a is None or _same_bits(a.detach(), b), f"{name} {i} was overwritten"


# The interpreter runs one program after another: there this shows only that the default dtype is not read.
@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY, options="default", dtype="float32")
def test_two_runs_agree(lane, dtype, case, seed):
    """The same bits: no atomics, no order that depends on timing, no number in torch's default dtype."""
    op, options = case
    samples = [make(op, few_sizes(op), dtype, lane.device, seed, options) for _ in range(2)]
    runs = [run(op.function, samples[0], seed)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        runs.append(run(op.function, samples[1], seed))
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(runs[0].bits(), runs[1].bits()):
        assert _same_bits(a, b)


# Whether a gradient is written is a separate flag of the kernels.
@pytest.mark.daily("interpret", op=(*ONE_OF_A_FAMILY, "fused_moe"), options="default")
def test_each_gradient_alone(lane, case, seed):
    """An input gets the same gradient whether or not others require grad."""
    op, options = case
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed, options)
    full = run(op.function, sample, seed)
    for i, t in enumerate(full.inputs):
        alone = changed(sample, torch.clone)
        for j, other in enumerate(checked_inputs(alone)):
            other.requires_grad_(j == i)
        found = run(op.function, alone, grads=full.incoming)
        check_same(found, t, full.gradients[i])


def check_same(found: Result, t: torch.Tensor, expected: torch.Tensor | None) -> None:
    (got,) = found.gradients
    assert (got is None) == (expected is None)
    if got is not None:
        torch.testing.assert_close(
            got, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()) if t.numel() else 0
        )


# The forward of every option set is held against fp64 in test_numerics.py.
@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY, options="default")
def test_without_gradients(lane, case, seed):
    """Under no_grad, and with inputs that need none, the outputs are the same bits."""
    op, options = case
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed, options)
    expected = [o.detach() for o in forward(op.function, sample)]
    with torch.no_grad():
        found = forward(op.function, sample)
    frozen = changed(sample, torch.clone)
    for t in checked_inputs(frozen):
        t.requires_grad_(False)
    for a, b, c in zip(expected, found, forward(op.function, frozen)):
        assert not b.requires_grad and not c.requires_grad
        torch.testing.assert_close((b, c), (a, a), rtol=1e-6, atol=1e-6, equal_nan=True)


# -- the operators under torch ---------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Keeps one call of every liger_hw operator for each set of arguments that are not None."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger_hw":
            there = tuple(a is None for a in args)
            copy = tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)
            self.calls.setdefault((func, there), copy)
        return func(*args, **(kwargs or {}))


class _Written(TorchDispatchMode):
    """Asserts that every liger_hw operator wrote all of its outputs."""

    called = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == "liger_hw":
            self.called += 1
            for i, output in enumerate(outputs if isinstance(outputs, (tuple, list)) else (outputs,)):
                assert output is None or not output.isnan().any(), f"{func} left part of output {i} unwritten"
        return outputs


@pytest.mark.daily("interpret", options="default")
def test_every_output_of_an_operator_is_written(lane, case, seed):
    """Also those that only backward reads, and ignored rows: opcheck and torch.compile compare their bits. Unwritten
    memory is nan here."""
    op, options = case
    with _Written() as written:
        run(op.function, make(op, few_sizes(op), torch.float32, lane.device, seed, options), seed)
    assert written.called, f"{op.name} calls no operator of liger_hw"


_NO_SCHEMA = tuple(name for name in DEFAULT_TEST_UTILS if name != "test_schema")


# An op's other option sets are arguments of the same operators.
@pytest.mark.daily(op=ONE_OF_A_FAMILY, options="default")
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.unpoisoned
def test_operators(lane, case, seed):
    """torch.library.opcheck: schema (mutation, aliasing), fake tensors, AOT dispatch with dynamic shapes."""
    op, options = case
    with _Recorder() as recorder:
        run(op.function, make(op, few_sizes(op), torch.float32, lane.device, seed, options), seed)
    assert recorder.calls, f"{op.name} calls no operator of liger_hw"
    for (func, _), args in recorder.calls.items():
        outputs = tensors(func(*args))
        has_float8 = any(t.is_floating_point() and t.itemsize == 1 for t in (*outputs, *tensors(args)))
        # torch's schema check multiplies tensors, which fails in FP8; overwriting is tested above
        torch.library.opcheck(func, args, test_utils=_NO_SCHEMA if has_float8 else DEFAULT_TEST_UTILS)


@pytest.mark.cpu
def test_fakes_run_no_autograd(op, seed, monkeypatch):
    """On a GPU backward runs in another thread, where torch's mode of fake tensors is not active."""
    with _Recorder() as recorder:
        run(op.function, make(op, few_sizes(op), torch.float32, "cpu", seed), seed)
    monkeypatch.setattr(torch.autograd, "grad", None)
    mode = FakeTensorMode()
    for (func, _), args in recorder.calls.items():
        fakes = tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t.detach()), args)
        with mode:
            func(*fakes)


def test_forward_mode_is_refused(lane, op, seed):
    """A tangent is never dropped silently, whether or not the inputs require grad."""
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed)
    places = [i for i, a in enumerate(sample.args) if isinstance(a, torch.Tensor) and a.requires_grad]

    def function(*inputs):
        args = list(sample.args)
        for i, t in zip(places, inputs):
            args[i] = t
        return op.function(*args, **sample.kwargs)

    for kept in (False, True):
        inputs = tuple(sample.args[i].detach().clone().requires_grad_(kept) for i in places)
        with pytest.raises((NotImplementedError, RuntimeError), match="forward|functorch"):
            torch.func.jvp(function, inputs, tuple(torch.ones_like(t) for t in inputs))
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) for t in inputs]
            with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
                function(*duals)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))
