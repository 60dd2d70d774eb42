"""torch.compile over every op: one graph, no recompilation when batch, rows or sequence length change."""

from __future__ import annotations

import inspect

import pytest
import torch
from harness import ONE_OF_A_FAMILY, Result, checked_inputs, few_sizes, make, run, small_sizes, tensors

ROWS = "n_rows n_tokens tokens rows batch batch_size seq_len".split()
COUNTS = (5, 6, 8, 13, 32, 63)


def _backend(lane) -> str:
    return "inductor" if lane.name == "gpu" else "aot_eager"


def _compiled(op, backend):
    torch._dynamo.reset()
    return torch.compile(lambda *args, **kwargs: op.function(*args, **kwargs), backend=backend, fullgraph=True)


def _close(a: Result, b: Result) -> None:
    for x, y in zip(a.bits(), b.bits()):
        scale = float(y.abs().max()) if y.is_floating_point() and y.numel() else 0.0
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)


# An op's other option sets are arguments of the same operators, and the next test compiles every op.
@pytest.mark.daily(op=ONE_OF_A_FAMILY, options="default")
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.unpoisoned
def test_one_graph(lane, case, seed):
    op, options = case
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed, options)
    _close(run(_compiled(op, _backend(lane)), sample, seed), run(op.function, sample, seed))


# Sizes are symbols in the checks and the operator, which runtime/ makes alike for all ops.
@pytest.mark.daily(op=ONE_OF_A_FAMILY)
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.unpoisoned
def test_no_recompilation(lane, op, seed):
    """Several row counts (and sequence lengths), marked dynamic as users do: one compilation forward and backward."""
    from torch._dynamo.testing import CompileCounterWithBackend

    sizes = few_sizes(op)
    dims = op.tunables[0].dims
    varying = [i for i, name in enumerate(dims) if name in ROWS]
    assert varying, f"{op.name}: none of its sizes {dims} counts rows; name it one of {', '.join(ROWS)}"

    def sample_of(count):
        return make(
            op, tuple(count if i in varying else s for i, s in enumerate(sizes)), torch.float32, lane.device, seed
        )

    first, second = sample_of(5), sample_of(7)
    shapes = zip(tensors((first.args, first.kwargs)), tensors((second.args, second.kwargs)))
    dynamic = [[d for d in range(a.dim()) if a.shape[d] != b.shape[d]] for a, b in shapes]
    counter = CompileCounterWithBackend(_backend(lane))
    function = _compiled(op, counter)
    for count in COUNTS:
        sample = sample_of(count)
        for t, changing in zip(tensors((sample.args, sample.kwargs)), dynamic):
            for d in changing:
                torch._dynamo.mark_dynamic(t, d)
        _close(run(function, sample, seed), run(op.function, sample, seed))
    assert counter.frame_count == 1, f"{counter.frame_count - 1} recompilations over {len(COUNTS)} row counts"


# Dynamo's symbols go through the checks and the operator, which runtime/ makes alike for all ops.
@pytest.mark.daily(op=("cross_entropy", "softmax"))
@pytest.mark.lanes("cpu")
def test_a_number_that_changes(lane, op, seed):
    """For example a schedule of a temperature: from its second value on Dynamo has a symbol for it."""
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed)
    bound = inspect.signature(op.function).bind(*sample.args, **sample.kwargs)
    bound.apply_defaults()
    numbers = [name for name, value in bound.arguments.items() if type(value) is float]
    if not numbers:
        return
    compiled = _compiled(op, _backend(lane))
    for value in (0.3, 0.4, 0.5):
        call = {**bound.arguments, **dict.fromkeys(numbers, value)}
        torch.testing.assert_close(compiled(**call), op.function(**call))


# The operators' common checks handle the layout of inputs.
@pytest.mark.daily(op=ONE_OF_A_FAMILY)
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.unpoisoned
def test_inside_a_model(lane, op, seed):
    """Between other operations, so that the compiler cannot assume the layout of the input."""
    sample = make(op, small_sizes(op)[0], torch.float32, lane.device, seed)
    first = checked_inputs(sample)[0]

    def model(x):
        args = [torch.sin(x).transpose(-1, -2).contiguous().transpose(-1, -2) if a is first else a for a in sample.args]
        return sum(
            (o * 2).square().mean() for o in tensors(op.function(*args, **sample.kwargs)) if o.is_floating_point()
        )

    torch._dynamo.reset()
    expected = torch.autograd.grad(model(first), first)[0]
    found = torch.autograd.grad(torch.compile(model, backend=_backend(lane), fullgraph=True)(first), first)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
