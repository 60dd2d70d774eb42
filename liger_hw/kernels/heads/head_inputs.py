"""Inputs of a linear head: the checks that its losses share, the rows that count, and random inputs for their samples.

A fused linear loss can leave ignored rows (prompts, padding) out of its matrix products, but a product's size must be
known on the host. Labels are there long before the logits. `CountedRows(labels)` at the start of a forward counts them
on the device and starts the copy of one number; by the time the loss asks, the forward's own work is queued behind that
copy, and the host does not wait for the device to drain. The patched models do so by themselves; a training loop of
your own says

    counted = liger_hw.CountedRows(labels)                                    # first thing in the step
    hidden = model(...)
    loss = liger_fused_linear_cross_entropy(hidden, weight, labels, compact=counted)

Inside torch.compile and while a graph is captured nothing is counted, and every row is computed, as without it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ... import private
from ...registry import Sample, is_quiet, normal
from ...runtime.operator import autocast_dtype, check, check_tensors, to_flatten
from ..losses.cross_entropy import sample_targets

MAX_SHARE = 31 / 32
"""Share of rows that count above which none is left out: gathering rows and scattering their gradient has its price."""


def checked_head(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    names: tuple[str, str, str] = ("input", "weight", "bias"),
    rows: str = "n_rows",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [rows, hidden], weight [vocab, hidden] and bias [vocab] or None, cast to autocast's dtype where it is on.

    Under torch.no_grad they are detached, so that a Function's forward computes no gradients.

    names: what the caller calls them; rows: names of the leading dimensions of x ("batch, length")
    Raises `TypeError` for an argument that is not a tensor, `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_tensors(op, optional=names[2:], **dict(zip(names, (x, weight, bias))))
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    if not torch.is_grad_enabled():
        x, weight, bias = x.detach(), weight.detach(), bias if bias is None else bias.detach()
    dims = 2 + rows.count(",")
    if x.dim() != dims or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not weight.numel():
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        expected = f"{names[0]} must be [{rows}, hidden] and {names[1]} [vocab, hidden]"
        check(False, op, f"{expected}, got {got}{_misfit(x, weight, dims, names)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        pairs = [(name, str(t.dtype)) for name, t in zip(names, (x, weight, bias)) if t is not None]
        present, dtypes = (", ".join(words) for words in zip(*pairs))
        check(False, op, f"{present} must share one dtype, got {dtypes}; cast them or use autocast")
    if bias is not None and bias.shape != weight.shape[:1]:
        check(False, op, f"{names[2]} must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    return x, weight, bias


def _misfit(x: torch.Tensor, weight: torch.Tensor, dims: int, names: tuple[str, ...]) -> str:
    """What the shapes look like, and what to do; "" where that is not clear."""
    if x.dim() == 2 and weight.dim() == max(3, dims) and x.shape[1] == weight.shape[-1]:
        return f": {names[0]} and {names[1]} are swapped"
    if x.dim() == 3 and dims == 2 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]:
        return to_flatten(**{names[0]: x})
    if x.dim() == dims and weight.dim() == 2 and x.shape[-1] == weight.shape[0]:
        return f": {names[1]} is transposed, pass {names[1]}.T"
    return ""


def sums_in_fp32(op: str, accum_dtype: torch.dtype | None, weight: torch.Tensor) -> bool:
    """Whether `accum_dtype` asks for an fp32 buffer that the weight's own dtype is not."""
    if accum_dtype not in (None, torch.float32, weight.dtype):
        check(False, op, f"accum_dtype must be None, torch.float32 or the weight's dtype, got {accum_dtype}")
    return accum_dtype is torch.float32 and weight.dtype.itemsize < 4


# -- rows that count -------------------------------------------------------------------------------------------------


class CountedRows:
    """The number of rows of `labels` (any shape) that are not ignore_index, on its way to the host.

    labels: a tensor, or several of which the loss takes one: the largest of their counts.
    The labels of the loss may be these, or these with some more rows ignored (shifted by one, say): what counts is that
    no other row counts. A loss in which more rows count raises on the device.
    """

    def __init__(self, labels: Any, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index
        self._count = self._arrived = None
        several = labels if isinstance(labels, tuple) else (labels,)
        if is_quiet() or not all(type(t) is torch.Tensor and not t.is_meta for t in several):
            return  # a fake tensor has no number to read
        count = functools.reduce(torch.maximum, [(t.detach() != ignore_index).sum() for t in several])
        if count.is_cpu:
            self._count = count
            return
        self._count = torch.empty((), dtype=count.dtype, pin_memory=True).copy_(count, non_blocking=True)
        self._arrived = torch.get_device_module(count.device.type).Event()
        self._arrived.record()

    def most(self) -> int | None:
        """The count, waiting for its copy if it must; None where nothing was counted, or this is no moment to wait.

        It waits for what was queued on the device before the copy, not for what was queued after it.
        """
        if self._count is None or is_quiet():
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._count)


def among_all(rows: torch.Tensor | None, order: torch.Tensor | None, n_rows: int, left_out: int = 0) -> Any:
    """Results [k, ...] of the rows `order` (None: all) among n_rows rows; the others have `left_out`."""
    if rows is None or order is None:
        return rows
    return rows.new_full((n_rows, *rows.shape[1:]), left_out).index_copy_(0, order, rows)


def remaining_rows(
    op: str, target: torch.Tensor, ignore_index: int, compact: bool | CountedRows
) -> torch.Tensor | None:
    """Indices of the rows that count, in their order, or None for all rows.

    compact: True counts now, which waits for the device; a `CountedRows` from earlier in the step does not. All
    rows are taken where too few are ignored, while a graph is captured, inside torch.compile, and for a count of
    another ignore_index.
    """
    if not isinstance(compact, (bool, CountedRows)):
        check(False, op, f"compact must be a bool or a CountedRows, got {type(compact).__name__}")
    if compact is False or is_quiet():
        return None
    counted = CountedRows(target, ignore_index) if compact is True else compact
    most = counted.most() if counted.ignore_index == ignore_index else None
    if most is None or most > MAX_SHARE * target.shape[0]:
        return None
    ignored = target == ignore_index
    order = torch.argsort(ignored.to(torch.uint8), stable=True)  # the rows that count first, each part in order
    if compact is not True:
        fits = (target.shape[0] - ignored.sum()) <= most
        private.assert_async(fits, f"{op}: more rows count than the CountedRows given as compact has")
    return order[:most]


def random_head(sizes, dtype, device, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n_rows, hidden] and weight [vocab, hidden] whose logits are of unit variance; leaves with gradients."""
    n_rows, hidden, vocab = sizes
    draw = normal(torch.float32, device, generator)
    x, weight = draw(n_rows, hidden).detach(), draw(vocab, hidden).detach() * hidden**-0.5
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def sample_head(
    sizes, dtype, device, generator, *, passes: tuple[int, int], ignored=0.1, biased=False, frozen=False, **options: Any
) -> Sample:
    """A `Sample` (x, weight, target, bias or None) for a loss with targets, of which a share `ignored` is -100.

    passes: reads and writes of x and of the weight; frozen: the weight has no gradient
    """
    n_rows, hidden, vocab = sizes
    x, weight = random_head(sizes, dtype, device, generator)
    bias = normal(dtype, device, generator)(vocab) if biased else None
    target = sample_targets(n_rows, vocab, device, generator, ignored)
    return Sample(
        args=(x, weight.requires_grad_(not frozen), target, bias),
        kwargs=options,
        reduction=max(hidden, vocab),
        grad_reduction=max(n_rows, hidden, vocab),
        moved=(passes[0] * n_rows * hidden + passes[1] * vocab * hidden) * dtype.itemsize,
    )
