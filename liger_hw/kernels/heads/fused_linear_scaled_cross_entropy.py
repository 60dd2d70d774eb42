"""Per-token negative log-likelihood of a linear head at a temperature, with entropy and chosen log-probabilities.

With p = softmax(input @ weight^T / temperature) of a row and its target y:
    nll = -log p[y]       entropy = -sum p log p       selected[k] = log p[selected_token_ids[k]], for all rows
Rows whose target is ignore_index have nll, entropy, selected and gradient of exactly zero.

Shapes: input [n_rows, hidden], weight [vocab, hidden], target [n_rows] int64 or int32, selected_token_ids [k] int64
-> nll [n_rows], entropy [n_rows], selected [n_rows, k].

Dtypes: input and weight share one of fp32, fp16 or bf16 (the autocast dtype under autocast). Logits are rounded to it
as a linear layer's are; everything after is fp32, and so are the results. Every result is differentiable.

Saved for backward: the inputs, one log-sum-exp a row (and the results, small), and logits, since each row's incoming
gradients are not known in the forward. `kept_logits.py` says which logits are kept; backward computes the others again.
None are kept where the weight has no gradient, with selected_token_ids, with accum_dtype, under torch.compile, and in a
second backward (retain_graph): there backward computes all of them again, chunk by chunk (`chunk_plan.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ... import registry
from ...registry import Op, Sample
from ...runtime.operator import Function, check, check_flags, check_floats, define, first_order
from ...runtime.saved_tensors import graph_is_kept
from ..losses.cross_entropy import check_arguments, sample_targets
from ..losses.cross_entropy_reference import NONE, Options, absent, check_targets
from ..losses.cross_entropy_rows import launch_stats
from ..losses.log_prob_rows import (
    LOGP,
    LOGP_GRAD,
    LogProbs,
    log_prob_buffers,
    log_probs_reference,
    row_log_prob_gradients,
    row_log_probs,
)
from .chunk_plan import plan_chunks
from .head_inputs import checked_head, random_head, sums_in_fp32
from .kept_logits import KeptLogits, keeping_backward, keeping_forward, plan_kept
from .linear_head import HeadGradients, fake_gradients, sweep

# -- reference -------------------------------------------------------------------------------------------------------


def fused_linear_scaled_cross_entropy_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    selected_token_ids: torch.Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The specification in plain torch: a linear layer, then log-probabilities in fp32 (fp64 for fp64)."""
    logits = F.linear(input, weight)
    logp, entropy, lse = log_probs_reference(logits, target, None, ignore_index, temperature)
    selected = None
    if selected_token_ids is not None:
        selected = _selected(logits, lse, target, selected_token_ids, temperature, ignore_index)
    return pack_results(-logp, entropy if return_entropy else None, selected)


def _selected(logits, lse, target, ids, temperature, ignore_index):
    found = logits.index_select(1, ids).to(lse.dtype) / temperature - lse[:, None]
    return found.masked_fill((target == ignore_index)[:, None], 0.0)


def pack_results(nll, entropy, selected):
    """The negative log-likelihoods alone, or a tuple with the other results that are not None."""
    found = tuple(t for t in (nll, entropy, selected) if t is not None)
    return found if len(found) > 1 else nll


# -- launchers -------------------------------------------------------------------------------------------------------

_NAME = "liger_fused_linear_scaled_cross_entropy"


def _check_targets_on_device(target, vocab: int, ignore_index: int, device: torch.device) -> None:
    launch_stats(_NAME, target, None, vocab, Options(ignore_index, 0.0, 0.0, 0.0, NONE), device)


@torch.no_grad()
def _fwd(x, weight, target, ids, temperature, ignore_index, entropy):
    target = target.contiguous()
    (n_rows, hidden), vocab, device = x.shape, weight.shape[0], x.device
    _check_targets_on_device(target, vocab, ignore_index, device)
    out = log_prob_buffers(n_rows, device, entropy=entropy)
    selected = absent(out.lse) if ids is None else torch.empty(n_rows, ids.shape[0], dtype=torch.float32, device=device)
    chunks = plan_chunks(n_rows, hidden, vocab, x.dtype.itemsize, gradients=False, device=device)
    options = {"ignore_index": ignore_index, "temperature": temperature}
    for start, logits, _ in sweep(chunks, x, weight):
        row_log_probs(logits, target, out, row_start=start, **options)
        if ids is not None:
            rows = slice(start, start + logits.shape[0])
            selected[rows] = _selected(logits, out.lse[rows], target[rows], ids, temperature, ignore_index)
    return out.logp.neg_(), absent(out.lse) if out.entropy is None else out.entropy, selected, out.lse


@torch.no_grad()
def _bwd(x, weight, target, ids, lse, entropy, selected, dnll, dentropy, dselected, here, *options):
    temperature, ignore_index, wide, dinput, dweight = options
    target, (n_rows, hidden), vocab = target.contiguous(), x.shape, weight.shape[0]
    dlogp, softmax_coef = _row_coefficients(lse, dnll, dselected, here)
    dentropy = None if dentropy is None else dentropy.contiguous()
    one_entry_a_row = dentropy is None and dselected is None
    sizes = n_rows, hidden, vocab, x.dtype.itemsize
    chunks = plan_chunks(*sizes, wide=wide, with_targets=one_entry_a_row, device=x.device)
    entries = target if here is None else torch.where(here, target, -1)
    grads = HeadGradients(x, weight, (dinput, dweight, False), chunks, entries)
    saved = LogProbs(lse, lse, entropy)
    for start, logits, _ in sweep(chunks, x, weight, grads):
        row_log_prob_gradients(
            *(logits, target, saved, dlogp),
            entropy_coef=dentropy,
            pull=softmax_coef,
            row_start=start,
            ignore_index=ignore_index,
            temperature=temperature,
        )
        if dselected is not None:
            rows = slice(start, start + logits.shape[0])
            dlogits = _gradient_at_ids(
                *(selected[rows], ids, target[rows], dselected[rows], dlogp[rows], softmax_coef[rows]),
                dentropy=None if dentropy is None else dentropy[rows],
                entropy=entropy[rows],
                temperature=temperature,
                ignore_index=ignore_index,
            )
            logits.index_copy_(1, ids, dlogits.to(logits.dtype))
    return grads.results()[:2]


def _row_coefficients(lse, dnll, dselected, here):
    """(gradient of each row's log-probability, factor of its softmax where that is another number, or None)

    here: whether this rank has the row's target; None where it has the whole vocabulary
    """
    dlogp = torch.zeros_like(lse) if dnll is None else dnll.neg()
    if here is not None:
        return torch.where(here, dlogp, 0.0), dlogp
    return dlogp, None if dselected is None else dlogp + dselected.sum(1)


def _gradient_at_ids(
    selected, ids, target, dselected, dlogp, softmax_coef, *, dentropy, entropy, temperature, ignore_index
):
    """The gradient of the logits in the selected columns, [n, k] fp32: what the row kernel gave there, and their own.

    An id that occurs twice gets the sum of both in each place, so that it does not matter which of them is stored.
    """
    same = (ids[:, None] == ids[None, :]).to(dselected.dtype)
    step = max(1, (1 << 24) // max(1, dselected.numel()))
    parts = [(dselected[:, None, :] * same[k : k + step]).sum(-1) for k in range(0, len(ids), step)]
    p = selected.exp()
    found = torch.cat(parts, 1) + dlogp[:, None] * (target[:, None] == ids) - softmax_coef[:, None] * p
    if dentropy is not None:
        found -= dentropy[:, None] * p * (selected.masked_fill(p == 0, 0.0) + entropy[:, None])
    return (found / temperature).masked_fill((target == ignore_index)[:, None], 0.0)


@torch.no_grad()
def _keep(x, weight, target, waiting, tail, rest, slab, width, temperature, ignore_index, entropy):
    target = target.contiguous()
    _check_targets_on_device(target, weight.shape[0], ignore_index, x.device)
    kept = KeptLogits(waiting, tail, rest, slab, width)
    out = keeping_forward(x, weight, target, temperature, ignore_index, entropy, kept)
    return out.logp.neg_(), absent(out.lse) if out.entropy is None else out.entropy, out.lse


@torch.no_grad()
def _keep_bwd(
    x, weight, target, lse, entropy, dnll, dentropy, waiting, tail, rest, slab, width, temperature, ignore_index, dinput
):
    dlogp, _ = _row_coefficients(lse, dnll, None, None)
    dentropy = None if dentropy is None else dentropy.contiguous()
    saved, kept = LogProbs(lse, lse, entropy), KeptLogits(waiting, tail, rest, slab, width)
    options = temperature, ignore_index, kept, dinput
    dx, dweight = keeping_backward(x, weight, target.contiguous(), saved, dlogp, dentropy, *options)
    return absent(x) if dx is None else dx, absent(x) if dweight is waiting else dweight


# -- the operators ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def _fwd_reference(x, weight, target, ids, temperature, ignore_index, entropy):
    check_targets(_NAME, target, weight.shape[0], ignore_index)
    logits = F.linear(x, weight)
    logp, h, lse = log_probs_reference(logits, target, None, ignore_index, temperature)
    chosen = absent(lse) if ids is None else _selected(logits, lse, target, ids, temperature, ignore_index)
    return logp.neg(), h if entropy else absent(lse), chosen, lse


@torch.no_grad()
def _bwd_reference(x, weight, target, ids, lse, entropy, selected, dnll, dentropy, dselected, here, *options):
    temperature, ignore_index, _, dinput, dweight = options
    logits = F.linear(x, weight)
    log_p = logits.to(lse.dtype) / temperature - lse[:, None]
    p, ignored = log_p.exp(), target == ignore_index
    dlogp, softmax_coef = _row_coefficients(lse, dnll, dselected, here)
    g = -(dlogp if softmax_coef is None else softmax_coef)[:, None] * p
    if dentropy is not None:
        g -= dentropy[:, None] * p * (log_p.masked_fill(p == 0, 0.0) + entropy[:, None])
    g.scatter_add_(1, target.long().masked_fill(ignored, 0)[:, None], dlogp[:, None])
    if dselected is not None:
        g.index_add_(1, ids, dselected)
    dlogits = (g / temperature).masked_fill(ignored[:, None], 0.0).to(x.dtype)
    return dlogits @ weight if dinput else absent(x), dlogits.t() @ x if dweight else absent(x)


@torch.no_grad()
def _keep_reference(x, weight, target, waiting, tail, rest, slab, width, temperature, ignore_index, entropy):
    nll, h, _, lse = _fwd_reference(x, weight, target, None, temperature, ignore_index, entropy)
    return nll, h, lse


@torch.no_grad()
def _keep_bwd_reference(
    x, weight, target, lse, entropy, dnll, dentropy, waiting, tail, rest, slab, width, temperature, ignore_index, dinput
):
    saved, grads = (lse, entropy, absent(lse)), (dnll, dentropy, None, None)
    options = temperature, ignore_index, False, dinput, True
    dx, dweight = _bwd_reference(x, weight, target, None, *saved, *grads, *options)
    if not slab:
        return dx, dweight
    waiting.copy_(dweight)
    return dx, absent(x)


def _fwd_fake(x, weight, target, ids, temperature, ignore_index, entropy):
    wide, n_rows = torch.promote_types(x.dtype, torch.float32), x.shape[0]
    shapes = (n_rows,), (n_rows,) if entropy else (0,), (0,) if ids is None else (n_rows, ids.shape[0]), (n_rows,)
    return tuple(x.new_empty(shape, dtype=wide) for shape in shapes)


def _bwd_fake(x, weight, *rest):
    *_, dinput, dweight = rest
    return fake_gradients(x, weight, None, (dinput, dweight, False))[:2]


def _keep_fake(x, weight, target, waiting, tail, rest, slab, width, *options):
    nll, h, _, lse = _fwd_fake(x, weight, target, None, *options)
    return nll, h, lse


def _keep_bwd_fake(x, weight, target, lse, entropy, dnll, dentropy, waiting, tail, rest, slab, *options):
    *_, dinput = options
    return fake_gradients(x, weight, None, (dinput, not slab, False))[:2]


_INPUTS = "Tensor input, Tensor weight, Tensor target"
_KEPT = "Tensor(a!) waiting, Tensor(b!) tail, Tensor(c!) rest, int slab, int width"
_NUMBERS = "float temperature, int ignore_index"
scaled_cross_entropy_fwd = define(
    f"fused_linear_scaled_cross_entropy_fwd({_INPUTS}, Tensor? selected_token_ids, {_NUMBERS}, bool entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
scaled_cross_entropy_bwd = define(
    f"fused_linear_scaled_cross_entropy_bwd({_INPUTS}, Tensor? selected_token_ids, Tensor lse, Tensor entropy, "
    f"Tensor selected, Tensor? dnll, Tensor? dentropy, Tensor? dselected, Tensor? here, {_NUMBERS}, bool wide, "
    "bool dinput, bool dweight) -> (Tensor, Tensor)",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)
scaled_cross_entropy_keep = define(
    f"fused_linear_scaled_cross_entropy_keep({_INPUTS}, {_KEPT}, {_NUMBERS}, bool entropy) -> (Tensor, Tensor, Tensor)",
    launcher=_keep,
    reference=_keep_reference,
    fake=_keep_fake,
)
scaled_cross_entropy_keep_bwd = define(
    f"fused_linear_scaled_cross_entropy_keep_bwd({_INPUTS}, Tensor lse, Tensor entropy, Tensor? dnll, "
    f"Tensor? dentropy, {_KEPT}, {_NUMBERS}, bool dinput) -> (Tensor, Tensor)",
    launcher=_keep_bwd,
    reference=_keep_bwd_reference,
    fake=_keep_bwd_fake,
)


def _is_watched() -> bool:
    """Whether torch.compile traces, or a dispatch mode sees the operators.

    Selective checkpointing may keep an operator's results, and not the memory that it wrote.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _are_batched(grads: list[torch.Tensor | None]) -> bool:
    """Whether they are torch.func.vmap's or is_grads_batched's: torch batches no operator that writes its inputs."""
    return torch._C._functorch.peek_interpreter_stack() is not None or any(
        torch._C._functorch.is_legacy_batchedtensor(g) for g in grads if g is not None
    )


class LigerFusedLinearScaledCrossEntropyFunction(Function):
    """Autograd for the scaled cross entropy: saves the inputs and what is small; returns (nll, entropy, selected)."""

    @staticmethod
    def forward(ctx, x, weight, target, ids, temperature, ignore_index, return_entropy, wide):
        dinput, dweight = ctx.needs_input_grad[:2]
        options = temperature, ignore_index, return_entropy
        plan, kept = None, ()
        if dweight and ids is None and not wide and not _is_watched():
            plan = plan_kept(*x.shape, weight.shape[0], x.dtype.itemsize)
        if plan is None:
            nll, entropy, selected, lse = scaled_cross_entropy_fwd(x, weight, target, ids, *options)
        else:
            kept = plan.allocate(x, weight)
            nll, entropy, lse = scaled_cross_entropy_keep(x, weight, target, *kept, *options)
            selected = absent(lse)
        memory = kept[:3]
        ctx.save_for_backward(x, weight, target, ids, lse, entropy, selected, *memory)
        ctx.options, ctx.plan = (temperature, ignore_index, wide, dinput, dweight), plan
        ctx.has_entropy, ctx.has_selected = return_entropy, ids is not None
        absentees = [t for t, there in ((entropy, ctx.has_entropy), (selected, ctx.has_selected)) if not there]
        ctx.mark_non_differentiable(*absentees)
        ctx.set_materialize_grads(False)
        return nll, entropy, selected

    @staticmethod
    @first_order
    def backward(ctx, dnll, dentropy, dselected):
        dentropy, dselected = dentropy if ctx.has_entropy else None, dselected if ctx.has_selected else None
        if dnll is None and dentropy is None and dselected is None:
            return (None,) * 8
        x, weight, target, ids, lse, entropy, selected, *memory = ctx.saved_tensors
        temperature, ignore_index, wide, dinput, dweight = ctx.options
        if ctx.plan is None or graph_is_kept() or _are_batched([dnll, dentropy, dselected]):
            saved, grads = (lse, entropy, selected), (dnll, dentropy, dselected, None)
            found = scaled_cross_entropy_bwd(x, weight, target, ids, *saved, *grads, *ctx.options)
        else:
            for written in memory:  # first, so that a second backward raises, should this one run out of memory
                torch.autograd.graph.increment_version(written)
            kept = KeptLogits(*memory, ctx.plan.slab, ctx.plan.width)
            given = lse, entropy, dnll, dentropy, *kept, temperature, ignore_index, dinput
            dx, dw = scaled_cross_entropy_keep_bwd(x, weight, target, *given)
            found = dx, kept.waiting.detach() if kept.slab else dw
        return *(g if w else None for g, w in zip(found, (dinput, dweight))), *(None,) * 6


# -- public ----------------------------------------------------------------------------------------------------------


def liger_fused_linear_scaled_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    selected_token_ids: torch.Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Per-token NLL of softmax(input @ weight^T / temperature), and on request entropy and chosen log-probabilities.

    input: [n_rows, hidden]; weight: [vocab, hidden]; one dtype, fp32, fp16 or bf16 (fp64 on the CPU), or any under
    autocast. target: [n_rows] int64 or int32. selected_token_ids: [k] int64, on the device, in 0..vocab-1, repeats
    allowed. accum_dtype=torch.float32 sums the weight's gradient in an fp32 buffer. Returns nll [n_rows] in fp32, or a
    tuple (nll, entropy [n_rows] if return_entropy, selected [n_rows, k] if selected_token_ids is given).
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; for targets see `liger_cross_entropy`.
    """
    input, weight = checked_arguments(_NAME, input, weight, target, temperature, ignore_index)
    wide = sums_in_fp32(_NAME, accum_dtype, weight)
    check_flags(_NAME, return_entropy=return_entropy)
    ids = selected_token_ids
    if ids is not None and (not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1):
        check(False, _NAME, "selected_token_ids must be an int64 tensor of shape [k]")
    if ids is not None and ids.device != input.device:
        check(False, _NAME, f"selected_token_ids is on {ids.device} but the input is on {input.device}")
    options = float(temperature), ignore_index, return_entropy, wide
    nll, entropy, selected = LigerFusedLinearScaledCrossEntropyFunction.apply(input, weight, target, ids, *options)
    return pack_results(nll, entropy if return_entropy else None, selected if ids is not None else None)


def checked_arguments(
    op: str, input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, weight), cast as autocast asks. Raises where the arguments of a public function do not fit."""
    input, weight, _ = checked_head(op, input, weight)
    check_floats(op, temperature=temperature)
    if not 0.0 < temperature < float("inf"):
        check(False, op, f"temperature must be positive and finite, got {temperature}")
    check_arguments(op, input, target, weight.shape[0], None, ignore_index)
    return input, weight


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "llama3_8b": (8192, 4096, 128256),
    "mistral_7b": (8192, 4096, 32768),
    "qwen3_8b": (8192, 4096, 151936),
}
"""Problem sizes (n_rows, hidden, vocab) of real models."""


def _sample(sizes, dtype, device, generator, *, ignored=0.1, select=0, **options: Any) -> Sample:
    n_rows, hidden, vocab = sizes

    if select:
        ids = torch.randint(vocab, (select,), generator=generator, device=device)
        options["selected_token_ids"] = torch.cat((ids, ids[:1]))  # one of them twice
    x, weight = random_head(n_rows, hidden, vocab, dtype, device, generator)
    target = sample_targets(n_rows, vocab, device, generator, ignored)
    return Sample(
        args=(x.requires_grad_(), weight.requires_grad_(), target),
        kwargs=options,
        reduction=max(hidden, vocab),
        grad_reduction=max(n_rows, hidden, vocab),
        moved=(3 * n_rows * hidden + 4 * vocab * hidden) * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="fused_linear_scaled_cross_entropy",
        function=liger_fused_linear_scaled_cross_entropy,
        reference=fused_linear_scaled_cross_entropy_reference,
        tunables=(LOGP, LOGP_GRAD),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"temperature": 0.7, "return_entropy": True},
            {"return_entropy": True, "select": 3, "temperature": 2.0, "accum_dtype": torch.float32},
        ),
    )
)
