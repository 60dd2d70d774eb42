"""Cross entropy of a linear head, loss(input @ weight^T + bias, target), without the logits of all rows.

The loss of a row is defined in cross_entropy.py, whose row kernel runs here on chunks of rows (`linear_head.py`).
use_token_scaling multiplies a row's loss by its probability of the target, taken as a constant.

Logits are rounded to the dtype of input and weight (autocast's under autocast) as a linear layer's are. The bias is
added in fp32; losses, statistics and the result are fp32.

Saved for backward: the gradients of input, weight and bias, which the forward computes chunk by chunk. Backward
multiplies them by the incoming gradient, as in cross_entropy.py. With reduction="none" each row has its own incoming
gradient, so the forward saves its inputs, and backward computes the logits again. See linear_head.py for the chunks'
size and the precision of the weight's gradient.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ... import registry
from ...registry import Sample, columns_key
from ...runtime.operator import Function, check, define, dense, first_order
from ...runtime.sharding import LossRule
from ..losses.cross_entropy import reference_gradient, reference_losses, reference_outputs
from ..losses.cross_entropy_rows import (
    NONE,
    CrossEntropyOutput,
    Options,
    RowResults,
    absent,
    check_arguments,
    check_in_range,
    cross_entropy_options,
    launch_rows,
    launch_stats,
    launch_sum,
    pack,
    row_buffers,
    rows_tunable,
)
from ..losses.log_prob_rows import HEAD_DIMS
from ..losses.options_module import OptionsModule
from .head_reference import reference_gradients, reference_logits, sample_head
from .head_targets import TAKE
from .linear_head import (
    CountedRows,
    HeadGradients,
    Needs,
    checked_head,
    plan_chunks,
    remaining_rows,
    scale_gradients,
    scatter_rows,
    sums_in_fp32,
    sweep,
)


def fused_linear_cross_entropy_reference(
    input, weight, target, bias=None, ce_weight=None, accum_dtype=None, chunk_mem_const=1, compact=False, **settings
):
    """The specification in plain torch: a linear layer, then cross_entropy's reference, in fp32 (fp64 for fp64)."""
    options = cross_entropy_options("fused_linear_cross_entropy_reference", **settings)
    return pack(reference_losses(reference_logits(input, weight, bias), target, ce_weight, options), options)


FWD = rows_tunable("fused_linear_cross_entropy", columns_key, HEAD_DIMS)
_NAME = "liger_fused_linear_cross_entropy"


class HeadCall(NamedTuple):
    """The operators' numbers, in the order of their schema. wide: the weight's gradient is accumulated in fp32."""

    options: Options
    wide: bool
    chunk_mem_const: int
    needs: Needs = Needs()


@torch.no_grad()
def _fwd(x, weight, target, bias, ce_weight, order, call: HeadCall, row_grads=None):
    """row_grads: each row's incoming gradient, in the backward of reduction="none", which returns only gradients."""
    full_target, row_grads = target, dense(row_grads)
    if order is not None:
        target, row_grads = target[order], row_grads if row_grads is None else row_grads[order]
    target, bias, ce_weight = dense(target), dense(bias), dense(ce_weight)
    n_rows, (vocab, hidden), itemsize, options = target.shape[0], weight.shape, x.dtype.itemsize, call.options
    chunks = plan_chunks(
        *(n_rows, hidden, vocab, itemsize),
        gradients=any(call.needs),
        wide=call.wide,
        with_targets=True,
        scale=call.chunk_mem_const,
    )
    stats = launch_stats(_NAME, target, ce_weight, vocab, options, x.device)
    rows = RowResults() if row_grads is not None else row_buffers(n_rows, options, torch.float32, x.device)
    grads = HeadGradients(x, weight, call.needs, chunks, target)
    plan = FWD.plan(x.device, columns_key(vocab, itemsize))
    for start, logits, _ in sweep(chunks, x, weight, grads, order=order):
        launch_rows(
            *(plan, logits, target, ce_weight, stats, options, rows, logits if any(call.needs) else None),
            bias=bias,
            row_grads=row_grads,
            row_start=start,
            uses_padding=True,
        )
    if row_grads is not None:
        return grads.results(bias)
    ignored_results = 0, 0, -1
    rows = RowResults(*(scatter_rows(t, order, x.shape[0], fill) for t, fill in zip(rows, ignored_results)))
    outputs = launch_sum(rows, stats, options, torch.float32, dense(full_target))
    return *outputs, *grads.results(bias), stats if options.scales_in_backward(x.dtype) else absent(stats)


def _bwd(grad_output, *arguments):
    return _fwd(*arguments, row_grads=grad_output)


def _reference_grads(x, weight, target, bias, ce_weight, call: HeadCall, row_grads=None):
    if not any(call.needs):
        return reference_gradients(None, x, weight, bias, call.needs)
    dlogits = reference_gradient(reference_logits(x, weight, bias), target, ce_weight, call.options, row_grads)
    return reference_gradients(dlogits, x, weight, bias, call.needs)


@torch.no_grad()
def _fwd_reference(x, weight, target, bias, ce_weight, order, call: HeadCall):
    check_in_range(_NAME, target, weight.shape[0], call.options.ignore_index)
    outputs = reference_losses(reference_logits(x, weight, bias), target, ce_weight, call.options)
    outputs = reference_outputs(outputs, torch.promote_types(x.dtype, torch.float32), call.options)
    grads = _reference_grads(x, weight, target, bias, ce_weight, call)
    return *outputs, *grads, outputs[0].new_ones(8 if call.options.scales_in_backward(x.dtype) else 0)


@torch.no_grad()
def _bwd_reference(grad_output, x, weight, target, bias, ce_weight, order, call: HeadCall):
    return _reference_grads(x, weight, target, bias, ce_weight, call, grad_output)


_TENSORS = "Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight, Tensor? order"
_SHAPES = (
    "T input [n_rows, hidden]; T weight [vocab, hidden]; int target [n_rows]; T bias [vocab]; float ce_weight [vocab]; "
    "int order [n_counted]"
)
fused_linear_cross_entropy_fwd = define(
    f"fused_linear_cross_entropy_fwd({_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    shapes=_SHAPES,
    launcher=_fwd,
    reference=_fwd_reference,
    numbers=HeadCall,
    recorded=False,
)
fused_linear_cross_entropy_bwd = define(
    f"fused_linear_cross_entropy_bwd(Tensor grad_output, {_TENSORS}) -> (Tensor, Tensor, Tensor)",
    shapes=f"{_SHAPES}; grad_output [n_rows]",
    launcher=_bwd,
    reference=_bwd_reference,
    numbers=HeadCall,
    recorded=False,
)


def run_forward(ctx, operator, tensors: tuple[torch.Tensor | None, ...], call: Any) -> tuple[torch.Tensor, ...]:
    """A Function's forward: (loss, z_loss, token_accuracy, predicted_tokens); results that are off are empty tensors.

    Saves the gradients; for reduction="none" the operator's row tensors and `tensors` (input, weight, target, bias, ..)
    operator: returns these four results, row tensors for its backward, the three gradients, and stats
    """
    dinput, dweight, _, dbias = ctx.needs_input_grad[:4]
    ctx.needs = Needs(dinput, dweight, dbias)
    with_gradients = call._replace(needs=ctx.needs)
    ctx.backward_call = with_gradients if call.options.reduction == NONE else None
    outputs = operator(*tensors, call if ctx.backward_call else with_gradients)
    loss, z_loss, hits, top, *row_tensors, dx, dw, db, stats = outputs
    ctx.save_for_backward(*((*row_tensors, *tensors) if ctx.backward_call else (dx, dw, db, stats)))
    ctx.mark_non_differentiable(z_loss, hits, top)
    ctx.set_materialize_grads(False)
    return loss, z_loss, hits, top


def run_backward(ctx, operator, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """(dx, dweight, None, dbias) after `run_forward`. operator: computes the gradients for reduction="none"."""
    if grad_output is None:
        return (None,) * 4
    if ctx.backward_call:
        grads = operator(grad_output, *ctx.saved_tensors, ctx.backward_call)
        dx, dweight, dbias = (g if w else None for g, w in zip(grads, ctx.needs))
    else:
        *grads, stats = ctx.saved_tensors
        dx, dweight, dbias = scale_gradients(grads, ctx.needs, grad_output, stats)
    return dx, dweight, None, dbias


class FusedLinearCrossEntropyFunction(Function):
    sharding = LossRule("linear_cross_entropy")

    @staticmethod
    def forward(ctx, _input, weight, target, bias, ce_weight, order, call: HeadCall):
        tensors = _input, weight, target, bias, ce_weight, order
        return run_forward(ctx, fused_linear_cross_entropy_fwd, tensors, call)

    @staticmethod
    @first_order
    def backward(ctx, grad_output, *_not_differentiable):
        return *run_backward(ctx, fused_linear_cross_entropy_bwd, grad_output), None, None, None


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
    use_token_scaling multiplies each row's loss by the target's probability, taken as a constant. compact leaves
    ignored rows out of the matrix products: a `CountedRows` of the labels made early in the step, or True to count now,
    which waits for the device; the results are the same, unless ignored rows have nan or inf. The other arguments are
    explained at `liger_cross_entropy`.
    Returns the loss in fp32, [] or [n_rows] with reduction="none", or a `CrossEntropyOutput` when any return_* is set.
    Raises as `liger_cross_entropy` does.
    """
    input, weight, bias = checked_head(_NAME, input, weight, bias)
    wide = sums_in_fp32(_NAME, accum_dtype, weight)
    if type(chunk_mem_const) is not int or chunk_mem_const < 1:
        check(False, _NAME, f"chunk_mem_const must be a positive int, got {chunk_mem_const!r}")
    check_arguments(_NAME, input, target, weight.shape[0], ce_weight)
    numbers = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    flags = return_z_loss, return_token_accuracy, return_predicted_tokens, use_token_scaling
    options = cross_entropy_options(_NAME, *numbers, *flags)
    order = remaining_rows(_NAME, target, ignore_index, compact)
    tensors = input, weight, target, bias, ce_weight, order
    call = HeadCall(options, wide, chunk_mem_const)
    return pack(FusedLinearCrossEntropyFunction.apply(*tensors, call), options)


class LigerFusedLinearCrossEntropyLoss(OptionsModule):
    """`liger_fused_linear_cross_entropy` as a module, with the same arguments."""

    option_names = *Options._fields, "accum_dtype", "chunk_mem_const"

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
        self.register_buffer("ce_weight", ce_weight)
        numbers = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
        flags = return_z_loss, return_token_accuracy, return_predicted_tokens, use_token_scaling
        self.set_options(*numbers, *flags, accum_dtype, chunk_mem_const)

    def check(self) -> None:
        options = {name: getattr(self, name) for name in Options._fields}
        cross_entropy_options("LigerFusedLinearCrossEntropyLoss", **options)

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | CrossEntropyOutput:
        """lin_weight: [vocab, hidden]; _input: [n_rows, hidden]; target: [n_rows]; bias: [vocab] or None."""
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, self.ce_weight, **self.options())


WORKLOADS = {
    "mistral_7b": (8192, 4096, 32768),
    "llama3_8b": (8192, 4096, 128256),
    "qwen3_8b": (8192, 4096, 151936),
    "gemma2_2b": (4096, 2304, 256000),
}


def sample(sizes, dtype, device, generator, *, weighted=False, **options: Any) -> Sample:
    sample, vocab = sample_head(sizes, dtype, device, generator, passes=(2, 3), **options), sizes[2]
    x, weight, target, bias = sample.args
    ce_weight = torch.rand(vocab, generator=generator, dtype=torch.float32, device=device) if weighted else None
    if options.get("use_token_scaling"):  # targets get large logits: else their probabilities and gradients underflow
        x = (0.3 * x + math.log(vocab) * weight[target.clamp_min(0)]).detach().requires_grad_()
    return replace(sample, args=(x, weight, target, bias, ce_weight))


OP = registry.register_file(
    __name__,
    tunables=(FWD, TAKE),
    options=(
        {},
        {"biased": True, "weighted": True, "label_smoothing": 0.1},
        {"softcap": 30.0, "lse_square_scale": 1e-4, "return_z_loss": True, "accum_dtype": torch.float32},
        {"reduction": "sum", "return_token_accuracy": True, "return_predicted_tokens": True, "frozen": True},
        {"reduction": "none", "biased": True},
        {"use_token_scaling": True},
    ),
)
