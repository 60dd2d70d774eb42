"""Cross entropy of a linear head, loss(input @ weight^T + bias, target), without the logits of all rows at once.

Shapes: input [n_rows, hidden], weight [vocab, hidden], target [n_rows] int64 or int32, bias [vocab], ce_weight [vocab]
-> loss [] or [n_rows]. The loss of a row is that of cross_entropy.py, whose row kernel runs here on chunks of rows;
use_token_scaling multiplies a row's loss by exp(s[y] - lse), its probability of the target, taken as a constant.
Dtypes: input, weight and bias share one of fp32, fp16 or bf16 (the autocast dtype under autocast). Logits are rounded
to it as a linear layer's are, before the bias, which is added in fp32. Losses, statistics and the result are fp32.

The forward computes the gradients of input, weight and bias that will be needed, chunk by chunk, in place on the
chunk's logits: they are what is saved. Backward multiplies them by the incoming gradient, as in cross_entropy.py. With
reduction="none" each row's incoming gradient is needed first: the forward saves its inputs, and backward computes the
logits again. See _linear_head.py for the chunks' size and the precision of the weight's gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ... import registry
from ...registry import Op, Sample, next_power_of_2
from ...runtime.operator import Function, autocast_dtype, check, check_tensors, define, first_order
from ..losses.cross_entropy import check_arguments, check_settings, sample_targets
from ..losses.cross_entropy_reference import (
    REDUCTIONS,
    CrossEntropyOutput,
    Options,
    absent,
    check_targets,
    fake_outputs,
    pack,
    reference_gradient,
    reference_losses,
    reference_outputs,
)
from ..losses.cross_entropy_rows import (
    RowResults,
    divides_late,
    launch_rows,
    launch_stats,
    launch_sum,
    row_buffers,
    rows_tunable,
)
from ..losses.cross_entropy_scale import scale_gradients
from .compaction import remaining_rows, spread
from .counted_rows import CountedRows
from .head_targets import TAKE
from .linear_head import HeadGradients, head_gradients, plan_chunks, sweep

# -- reference -------------------------------------------------------------------------------------------------------


def fused_linear_cross_entropy_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
    compact: bool | CountedRows = False,
) -> torch.Tensor | CrossEntropyOutput:
    """The specification in plain torch: a linear layer, then cross_entropy's reference, in fp32 (fp64 for fp64)."""
    options = Options(
        ignore_index, label_smoothing, lse_square_scale, softcap or 0.0, REDUCTIONS[reduction], use_token_scaling
    )
    outputs = reference_losses(_logits(input, weight, bias), target, ce_weight, options)
    return pack(*outputs, (return_z_loss, return_token_accuracy, return_predicted_tokens))


def _logits(input, weight, bias):
    logits = F.linear(input, weight)
    if bias is None:
        return logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide) + bias.expand_as(logits).to(wide)  # its gradient: the sum of rounded rows, as nn.Linear's


# -- tunables --------------------------------------------------------------------------------------------------------

_DIMS = ("n_rows", "hidden", "vocab")


def _key(n_rows: int, hidden: int, vocab: int, itemsize: int) -> registry.Key:
    """Columns rounded up to a power of two, bytes an element: a chunk always has enough rows to fill the device."""
    return next_power_of_2(vocab), itemsize


FWD = rows_tunable("fused_linear_cross_entropy", _key, _DIMS)

# -- launchers -------------------------------------------------------------------------------------------------------

_NAME = "liger_fused_linear_cross_entropy"


@torch.no_grad()
def _chunked(x, weight, target, bias, ce_weight, order, options, wide, scale, extra, wanted, row_grads=None):
    """(rows' results, stats, gradients of x, weight and bias): forward's work, and backward's for reduction="none"."""
    if order is not None:
        target, row_grads = target[order], row_grads if row_grads is None else row_grads[order]
    target, bias, ce_weight = (t if t is None else t.contiguous() for t in (target, bias, ce_weight))
    n_rows, (vocab, hidden), size, gradients = target.shape[0], weight.shape, x.dtype.itemsize, any(wanted)
    chunks = plan_chunks(n_rows, hidden, vocab, size, gradients=gradients, wide=wide, apart=True, scale=scale)
    stats = launch_stats(_NAME, target, ce_weight, vocab, options, x.device)
    rows = RowResults() if row_grads is not None else row_buffers(n_rows, options, torch.float32, x.device, extra)
    grads = HeadGradients(x, weight, wanted, chunks, target) if gradients else None
    plan = FWD.plan(x.device, _key(n_rows, hidden, vocab, size))
    for start, logits, _ in sweep(chunks, x, weight, grads, order=order):
        launch_rows(
            *(plan, logits, target, ce_weight, stats, options, rows, logits if gradients else None),
            bias=bias,
            row_grads=row_grads,
            row_start=start,
            owned=True,
        )
    return rows, stats, head_gradients(grads, x, bias)


def _fwd(x, weight, target, bias, ce_weight, order, *call):
    options, (wide, const, *wanted) = Options(*call[:6]), call[6:]
    extra, wanted = tuple(wanted[:3]), tuple(wanted[3:])
    rows, stats, grads = _chunked(x, weight, target, bias, ce_weight, order, options, wide, const, extra, wanted)
    rows = spread(rows, order, x.shape[0])
    late = any(wanted) and divides_late(x.dtype, options)
    return *launch_sum(rows, stats, options, torch.float32), *grads, stats if late else absent(stats)


def _bwd(grad_output, x, weight, target, bias, ce_weight, order, *call):
    options, (wide, const, *wanted) = Options(*call[:6]), call[6:]
    inputs = x, weight, target, bias, ce_weight, order
    return _chunked(*inputs, options, wide, const, (False, False, False), tuple(wanted), grad_output)[2]


# -- the operators ---------------------------------------------------------------------------------------------------


def _no_grads(x):
    return absent(x), absent(x), absent(x)


def _reference_grads(x, weight, target, bias, ce_weight, options, wanted, row_grads=None):
    """What autograd gives through `_logits`: the gradient of the logits is rounded to their dtype before it is summed."""
    wide = reference_gradient(_logits(x, weight, bias), target, ce_weight, options, row_grads)
    dlogits = wide.to(x.dtype)
    return (
        dlogits @ weight if wanted[0] else absent(x),
        dlogits.t() @ x if wanted[1] else absent(x),
        dlogits.sum(0, dtype=wide.dtype).to(bias.dtype) if wanted[2] else absent(x),
    )


@torch.no_grad()
def _fwd_reference(x, weight, target, bias, ce_weight, order, *call):
    options, (_, _, *wanted) = Options(*call[:6]), call[6:]
    extra, wanted = wanted[:3], wanted[3:]
    check_targets(_NAME, target, weight.shape[0], options.ignore_index)
    outputs = reference_losses(_logits(x, weight, bias), target, ce_weight, options)
    grads = _reference_grads(x, weight, target, bias, ce_weight, options, wanted) if any(wanted) else _no_grads(x)
    stats = torch.ones(5) if any(wanted) and divides_late(x.dtype, options) else torch.empty(0)
    return *reference_outputs(outputs, torch.promote_types(x.dtype, torch.float32), extra), *grads, stats


@torch.no_grad()
def _bwd_reference(grad_output, x, weight, target, bias, ce_weight, order, *call):
    return _reference_grads(x, weight, target, bias, ce_weight, Options(*call[:6]), call[8:], grad_output)


def _fake_grads(x, weight, bias, wanted):
    shapes = ((x.shape, x), (weight.shape, weight), (weight.shape[:1], weight if bias is None else bias))
    return tuple(like.new_empty(shape) if w else absent(x) for (shape, like), w in zip(shapes, wanted))


def _fwd_fake(x, weight, target, bias, ce_weight, order, *call):
    options, (_, _, *wanted) = Options(*call[:6]), call[6:]
    extra, wanted = wanted[:3], wanted[3:]
    wide = torch.promote_types(x.dtype, torch.float32)
    outputs = fake_outputs(x, x.shape[0], options.reduction, wide, extra)
    late = any(wanted) and divides_late(x.dtype, options)
    stats = x.new_empty(5 if late else 0, dtype=torch.float32)
    return *outputs, *_fake_grads(x, weight, bias, wanted), stats


def _bwd_fake(grad_output, x, weight, target, bias, ce_weight, order, *call):
    return _fake_grads(x, weight, bias, call[8:])


_CALL = (
    "Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight, Tensor? order, int ignore_index, "
    "float label_smoothing, float lse_square_scale, float softcap, int reduction, bool token_scaling, bool wide, "
    "int chunk_mem_const, "
)
_WANTED = "bool dinput, bool dweight, bool dbias"
fused_linear_cross_entropy_fwd = define(
    f"fused_linear_cross_entropy_fwd({_CALL} bool z_loss, bool token_accuracy, bool predicted_tokens, {_WANTED}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
fused_linear_cross_entropy_bwd = define(
    f"fused_linear_cross_entropy_bwd(Tensor grad_output, {_CALL} {_WANTED}) -> (Tensor, Tensor, Tensor)",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class LigerFusedLinearCrossEntropyFunction(Function):
    """Autograd for the fused head: saves the finished gradients, or the inputs for reduction="none"."""

    @staticmethod
    def forward(
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
        chunk_mem_const=1,
        order=None,
    ):
        tensors = _input, weight, target, bias, ce_weight, order
        options = weight, ignore_index, label_smoothing, lse_square_scale, softcap, reduction, use_token_scaling
        call = _call(*options, accum_dtype, chunk_mem_const)
        wanted = *ctx.needs_input_grad[:2], ctx.needs_input_grad[3]
        ctx.call, ctx.wanted, ctx.per_row = call, wanted, reduction == "none"
        now = (False, False, False) if ctx.per_row else wanted
        extra = return_z_loss, return_token_accuracy, return_predicted_tokens
        *results, stats = fused_linear_cross_entropy_fwd(*tensors, *call, *extra, *now)
        outputs, grads = results[:4], results[4:]
        ctx.save_for_backward(*(tensors if ctx.per_row else (*grads, stats)))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @first_order
    def backward(ctx, grad_output, *_not_differentiable):
        if grad_output is None:
            return (None,) * 17
        if ctx.per_row:
            grads = fused_linear_cross_entropy_bwd(grad_output, *ctx.saved_tensors, *ctx.call, *ctx.wanted)
        else:
            *grads, stats = ctx.saved_tensors
            grads = scale_wanted(grads, ctx.wanted, grad_output, stats)
        dx, dweight, dbias = (g if w else None for g, w in zip(grads, ctx.wanted))
        return dx, dweight, None, dbias, *(None,) * 13


def scale_wanted(grads, wanted, grad_output, stats):
    """`scale_gradients` of those that are wanted; the others are empty."""
    scaled = iter(scale_gradients([g for g, w in zip(grads, wanted) if w], grad_output, stats))
    return tuple(next(scaled) if w else g for g, w in zip(grads, wanted))


def _call(weight, ignore_index, smoothing, lse_scale, softcap, reduction, scaling, accum_dtype, const) -> tuple:
    """The operators' arguments from ignore_index to chunk_mem_const."""
    options = Options(
        ignore_index, float(smoothing), float(lse_scale), float(softcap or 0.0), REDUCTIONS[reduction], scaling
    )
    return *options, accum_dtype is torch.float32 and weight.dtype.itemsize < 4, const


# -- public ----------------------------------------------------------------------------------------------------------


def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
    compact: bool | CountedRows = False,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy of input @ weight^T + bias with class indices, without materialising the logits.

    input: [n_rows, hidden]; weight: [vocab, hidden]; bias: [vocab]; one dtype, fp32, fp16 or bf16 (fp64 on the CPU),
    or any under autocast. target: [n_rows] int64 or int32; ce_weight: [vocab] class weights. accum_dtype=torch.float32
    sums the weight's gradient in an fp32 buffer. chunk_mem_const multiplies the budget LIGER_HW_LOSS_MEMORY_MIB.
    use_token_scaling multiplies each row's loss by its predicted probability of the target, without gradient.
    compact leaves ignored rows out of the matrix products: a `CountedRows` of the labels made early in the step, or True
    to count now, which waits for the device. The results are the same, unless ignored rows hold nan or inf.
    Returns the loss in fp32, [] or [n_rows] with reduction="none", or a `CrossEntropyOutput` when any return_* is set.
    Raises as `liger_cross_entropy` does.
    """
    check_tensors(_NAME, optional=("bias",), input=input, weight=weight, bias=bias)
    dtype = autocast_dtype(input.device.type)
    if dtype is not None and torch.float64 not in (input.dtype, weight.dtype):
        input, weight, bias = input.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1] or not weight.numel():
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        check(False, _NAME, f"input must be [n_rows, hidden] and weight [vocab, hidden], got {shapes}")
    if input.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        kinds = ", ".join(str(t.dtype) for t in (input, weight, bias) if t is not None)
        check(False, _NAME, f"input, weight and bias must share one dtype, got {kinds}; cast them or use autocast")
    if bias is not None and bias.shape != weight.shape[:1]:
        check(False, _NAME, f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    if accum_dtype not in (None, torch.float32, weight.dtype):
        check(False, _NAME, f"accum_dtype must be None, torch.float32 or the weight's dtype, got {accum_dtype}")
    if type(chunk_mem_const) is not int or chunk_mem_const < 1:
        check(False, _NAME, f"chunk_mem_const must be a positive int, got {chunk_mem_const!r}")
    settings = ignore_index, label_smoothing, reduction, softcap, lse_square_scale
    extra = return_z_loss, return_token_accuracy, return_predicted_tokens
    check_arguments(_NAME, input, target, weight.shape[0], ce_weight, *settings, *extra, use_token_scaling)
    order = remaining_rows(_NAME, target, ignore_index, compact)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias)):
        options = ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype
        more = use_token_scaling, return_token_accuracy, return_predicted_tokens, chunk_mem_const, order
        outputs = LigerFusedLinearCrossEntropyFunction.apply(input, weight, target, bias, ce_weight, *options, *more)
    else:
        options = weight, ignore_index, label_smoothing, lse_square_scale, softcap, reduction, use_token_scaling
        call = _call(*options, accum_dtype, chunk_mem_const)
        wanted = *extra, False, False, False
        outputs = fused_linear_cross_entropy_fwd(input, weight, target, bias, ce_weight, order, *call, *wanted)[:4]
    return pack(*outputs, extra)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """`liger_fused_linear_cross_entropy` as a module, with the same arguments.

    forward(lin_weight [vocab, hidden], _input [n_rows, hidden], target [n_rows], bias [vocab] or None)
    """

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        chunk_mem_const: int = 1,
    ) -> None:
        super().__init__()
        settings = ignore_index, label_smoothing, reduction, softcap, lse_square_scale
        extra = return_z_loss, return_token_accuracy, return_predicted_tokens
        check_settings("LigerFusedLinearCrossEntropyLoss", *settings, *extra, use_token_scaling)
        self.register_buffer("ce_weight", ce_weight)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.accum_dtype = reduction, softcap, accum_dtype
        self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens = extra
        self.use_token_scaling, self.chunk_mem_const = use_token_scaling, chunk_mem_const

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            self.ce_weight,
            ignore_index=self.ignore_index,
            lse_square_scale=self.lse_square_scale,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            accum_dtype=self.accum_dtype,
            use_token_scaling=self.use_token_scaling,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
            chunk_mem_const=self.chunk_mem_const,
        )

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, label_smoothing={self.label_smoothing}"


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "mistral_7b": (8192, 4096, 32768),
    "llama3_8b": (8192, 4096, 128256),
    "qwen3_8b": (8192, 4096, 151936),
    "gemma2_2b": (4096, 2304, 256000),
}
"""Problem sizes (n_rows, hidden, vocab) of real models."""


def _sample(
    sizes, dtype, device, generator, *, ignored=0.1, weighted=False, biased=False, frozen=False, **options: Any
) -> Sample:
    n_rows, hidden, vocab = sizes

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        return (values * scale).to(dtype)

    x, weight = random(n_rows, hidden).requires_grad_(), random(vocab, hidden, scale=hidden**-0.5)
    bias = random(vocab).requires_grad_() if biased else None
    ce_weight = torch.rand(vocab, generator=generator, dtype=torch.float32, device=device) if weighted else None
    target = sample_targets(n_rows, vocab, device, generator, ignored)
    if options.get("use_token_scaling"):  # of a model that has learnt: else p, and with it every gradient, underflows
        x = (0.3 * x + math.log(vocab) * weight[target.clamp_min(0)]).detach().requires_grad_()
    return Sample(
        args=(x, weight.requires_grad_(not frozen), target, bias, ce_weight),
        kwargs=options,
        reduction=max(hidden, vocab),
        grad_reduction=max(n_rows, hidden, vocab),
        moved=(2 * n_rows * hidden + 3 * vocab * hidden) * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="fused_linear_cross_entropy",
        function=liger_fused_linear_cross_entropy,
        reference=fused_linear_cross_entropy_reference,
        tunables=(FWD, TAKE),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"biased": True, "weighted": True, "label_smoothing": 0.1},
            {"softcap": 30.0, "lse_square_scale": 1e-4, "return_z_loss": True, "accum_dtype": torch.float32},
            {"reduction": "sum", "return_token_accuracy": True, "return_predicted_tokens": True, "frozen": True},
            {"reduction": "none", "biased": True},
            {"use_token_scaling": True},
        ),
    )
)
