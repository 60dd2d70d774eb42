"""Edges of the cross entropies: ignored rows, ties, extreme logits, targets out of range, the accuracy of gradients."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import changed, few_sizes, make, oracle, run

from liger_hw import registry
from liger_hw.kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_hw.kernels.losses.cross_entropy import FWD, liger_cross_entropy
from liger_hw.kernels.losses.log_probs import liger_log_probs

ROWS, COLS = 6, 37


def _logits_loss(x, target, **options):
    return liger_cross_entropy(x, target, **options)


def _fused_loss(x, target, **options):
    return liger_fused_linear_cross_entropy(x, torch.eye(COLS, dtype=x.dtype, device=x.device), target, **options)


LOSSES = pytest.mark.parametrize("loss", [_logits_loss, _fused_loss], ids=["cross_entropy", "fused_linear"])


def _made(generator, lane, rows=ROWS):
    x = torch.randn(rows, COLS, generator=generator).to(lane.device).requires_grad_()
    return x, torch.randint(COLS, (rows,), generator=generator).to(lane.device)


def _labels(sample):
    """The argument that says which rows count, or None."""
    return next((t for t in sample.args if isinstance(t, torch.Tensor) and t.dtype is torch.int64), None)


def _relabelled(op, options, lane, seed, change):
    """A sample whose labels are change(labels, the ignored label)."""
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed, options)
    labels, ignored = _labels(sample), sample.kwargs.get("ignore_index", -100)
    return dataclasses.replace(sample, args=tuple(change(a, ignored) if a is labels else a for a in sample.args))


FAMILIES = ("liger_hw.kernels.losses.", "liger_hw.kernels.heads.")
LABELLED = [
    (op, options)
    for op in registry.ops().values()
    if op.function.__module__.startswith(FAMILIES)
    for options in op.options
    if _labels(op.sample(few_sizes(op), torch.float32, torch.device("cpu"), torch.Generator(), **options)) is not None
]
"""Losses with each option set that has labels."""
COMPACT = [
    (registry.get_op("fused_linear_cross_entropy"), {"compact": True, "reduction": r}) for r in ("mean", "sum", "none")
]


@pytest.mark.parametrize("case", LABELLED + COMPACT, ids=lambda case: f"{case[0].name}-{case[1]}")
def test_no_row_counts(lane, case, seed):
    """What torch gives: nan for a mean over nothing, zero otherwise, and a gradient of exactly zero."""
    op, options = case
    sample = _relabelled(op, options, lane, seed, torch.full_like)
    result = run(op.function, sample, seed)
    expected = oracle(op, sample, result.incoming).outputs
    torch.testing.assert_close(result.outputs, expected, equal_nan=True, check_dtype=False)
    assert not any(gradient.any() for gradient in result.gradients if gradient is not None)


@pytest.mark.parametrize(
    "case",
    [case for case in LABELLED if "heads" not in case[0].function.__module__],
    ids=lambda case: f"{case[0].name}-{case[1]}",
)
def test_what_an_ignored_row_holds_does_not_matter(lane, case, seed):
    op, options = case
    sample = _relabelled(op, options, lane, seed, lambda t, ignored: torch.cat((t[:2], t[2:3] * 0 + ignored, t[3:])))
    whole, broken = run(op.function, sample, seed), changed(sample, torch.clone)
    with torch.no_grad():
        broken.args[0][2] = float("nan")
    found = run(op.function, broken, grads=whole.incoming)
    torch.testing.assert_close(found.bits(), whole.bits(), equal_nan=True)


@pytest.mark.parametrize("cols", [9000, 9001])
def test_the_loss_alone(lane, generator, cols, clean_registry):
    """Without a gradient, wide rows are read by another launch, once, those too that do not all begin at 16 bytes."""
    x = (torch.randn(5, cols, generator=generator) * 3).to(lane.device)
    target = torch.randint(cols, (5,), generator=generator).to(lane.device)
    target[3] = -100
    with torch.no_grad():
        found = liger_cross_entropy(x, target, reduction="none", label_smoothing=0.1)
    expected = F.cross_entropy(x.double(), target, reduction="none", label_smoothing=0.1)
    tolerance = cols**0.5 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    keys = {plan.key for plan in registry.plans() if plan.tunable is FWD}
    assert lane.name == "cpu" or keys == {(16384, 3, 4, 1)}


@LOSSES
def test_ties_go_to_the_first(lane, loss):
    x = torch.zeros(4, COLS, device=lane.device)
    x[1, 5], x[1, 9] = 2.0, 2.0
    x[2, COLS - 1] = 1.0
    target = torch.tensor([0, 9, COLS - 1, -100], device=lane.device)
    found = loss(x, target, return_token_accuracy=True, return_predicted_tokens=True)
    assert found.predicted_tokens.tolist() == [0, 5, COLS - 1, -1]
    torch.testing.assert_close(found.token_accuracy.float().cpu(), torch.tensor(2 / 3))


@pytest.mark.parametrize("cols", [3, 128, 4097])
def test_rows_that_are_not_numbers_predict_what_torch_does(lane, cols):
    """The first NaN; of a row of -inf alone, the first class. Rows of 4097 and of 3 have edges."""
    x = torch.zeros(7, cols, device=lane.device)
    x[0], x[1], x[2, 1:], x[3, -1] = float("nan"), -float("inf"), float("nan"), float("nan")
    x[4], x[4, -1], x[5, 1], x[6, -2] = -float("inf"), float("nan"), float("nan"), float("inf")
    target = torch.zeros(7, dtype=torch.int64, device=lane.device)
    found = liger_cross_entropy(x, target, reduction="none", return_predicted_tokens=True)
    assert found.loss.isnan().all()
    assert found.predicted_tokens.tolist() == x.argmax(-1).tolist() == [0, 0, 1, cols - 1, cols - 1, 1, cols - 2]
    capped = liger_cross_entropy(x, target, softcap=2.0, reduction="none", return_predicted_tokens=True)
    assert capped.loss[[0, 2, 3, 4, 5]].isnan().all() and torch.equal(capped.predicted_tokens, found.predicted_tokens)
    found = liger_log_probs(x, target, return_entropy=True, return_top1=True)
    assert found.log_probs[:6].isnan().all() and found.entropy[:6].isnan().all()
    assert found.is_top1.tolist() == [True, True, *5 * [False]]


@LOSSES
def test_narrow_targets(lane, generator, loss):
    x, target = _made(generator, lane)
    torch.testing.assert_close(loss(x, target.int()), loss(x, target))


@LOSSES
@pytest.mark.parametrize("size", [1e4, 1e25])
def test_extreme_logits(lane, generator, loss, size):
    """No overflow on the way.

    At logits of 1e4 their log-sum-exp is rounded to 1e-3: probabilities are as exact as that.
    """
    x, target = _made(generator, lane)
    x = (x.detach().sign() * size * torch.rand(x.shape, generator=generator).to(lane.device)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    found, expected = loss(x, target, reduction="sum"), F.cross_entropy(exact, target, reduction="sum")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    (grad,), (exact_grad,) = torch.autograd.grad(found, x), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=min(1e-3, size * torch.finfo(x.dtype).eps))


def test_masked_logits(lane, generator):
    """Minus infinity is a class that cannot be: no probability, no gradient, no nan."""
    x, target = _made(generator, lane)
    mask = torch.rand(x.shape, generator=generator).to(lane.device) < 0.3
    mask[torch.arange(ROWS), target] = False
    x = x.detach().masked_fill(mask, float("-inf")).requires_grad_()
    found, expected = liger_cross_entropy(x, target), F.cross_entropy(x, target)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


@LOSSES
@pytest.mark.lanes("cpu", "interpret")
@pytest.mark.parametrize("bad", [COLS, -1, 1 << 40])
def test_targets_out_of_range_name_the_row(lane, generator, loss, bad):
    x, target = _made(generator, lane)
    target[3] = bad
    with pytest.raises(AssertionError, match="out of bounds"):
        loss(x, target)
    with pytest.raises(IndexError, match=rf"liger_.*cross_entropy: target\[3\] = {bad} is out of bounds"):
        loss(x, target)


_ASSERT = """
import torch
from liger_hw.kernels.losses.cross_entropy import liger_cross_entropy
x = torch.zeros(4, 8, device={device!r})
target = torch.tensor([0, 1, 8, 2], device={device!r})
try:
    loss = liger_cross_entropy(x, target)
    torch.accelerator.synchronize()
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.mark.lanes("gpu")
@pytest.mark.parametrize("checked", [False, True])
def test_targets_out_of_range_on_a_gpu(lane, checked):
    """Without a host synchronisation an assertion on the device that names the op; the checking mode names the row."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    environment["LIGER_HW_CHECK_TARGETS"] = str(int(checked))
    code = _ASSERT.format(device=lane.device)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert "liger_cross_entropy" in said, said
    assert not checked or "TargetError" in said and "target[2] = 8 is out of bounds" in said


@pytest.mark.lanes("gpu")
def test_weight_gradient_is_as_good_as_one_gemm(lane, generator):
    """bf16, more rows than a chunk, also with an fp32 buffer: the error against fp64 is within 1.5 times that of one
    unchunked GEMM. test_losses_head.py asks the same of its parts without a GPU."""
    rows, hidden, vocab = 8 * 1024, 1024, 32000
    x = torch.randn(rows, hidden, generator=generator).to(lane.device, torch.bfloat16).requires_grad_()
    w = (
        (torch.randn(vocab, hidden, generator=generator) * hidden**-0.5)
        .to(lane.device, torch.bfloat16)
        .requires_grad_()
    )
    target = torch.randint(vocab, (rows,), generator=generator).to(lane.device)

    def error_of(loss, x, w):
        grads = torch.autograd.grad(loss, (x, w))
        return [float((g.double() - e).norm() / e.norm()) for g, e in zip(grads, exact)]

    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, w))
    exact = torch.autograd.grad(F.cross_entropy(wide_x @ wide_w.t(), target), (wide_x, wide_w))
    plain = error_of(F.cross_entropy((x @ w.t()).float(), target), x, w)
    chunked = error_of(liger_fused_linear_cross_entropy(x, w, target), x, w)
    buffered = error_of(liger_fused_linear_cross_entropy(x, w, target, accum_dtype=torch.float32), x, w)
    for got in (chunked, buffered):
        assert all(a <= 1.5 * b for a, b in zip(got, plain)), f"{got} against {plain} of one GEMM"


@pytest.mark.lanes("interpret")
def test_no_gradient_work_for_evaluation(lane, generator, monkeypatch):
    """Without gradients the fused loss multiplies once a chunk."""
    x, target = _made(generator, lane)
    calls = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    with torch.no_grad():
        _fused_loss(x, target)
    assert len(calls) == 1


def test_outputs_asked_for_and_no_others(lane, generator):
    x, target = _made(generator, lane)
    assert isinstance(liger_cross_entropy(x, target), torch.Tensor)
    found = liger_cross_entropy(x, target, return_token_accuracy=True)
    assert found.token_accuracy is not None and found.z_loss is None and found.predicted_tokens is None


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"reduction": "avg"}, "reduction must be one of"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"ignore_index": 1.5}, "ignore_index must be an int"),
    ],
)
def test_loss_modules_refuse_wrong_settings_when_made(settings, message):
    from liger_hw.kernels.heads.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    from liger_hw.kernels.losses.cross_entropy import LigerCrossEntropyLoss

    for kind in (LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss):
        with pytest.raises(ValueError, match=f"{kind.__name__}: {message}"):
            kind(**settings)
