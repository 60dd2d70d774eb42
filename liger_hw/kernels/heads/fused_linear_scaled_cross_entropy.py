"""Per-token negative log-likelihood of a linear head at a temperature, with entropy and chosen tokens' log-probabilities.

With p = softmax(input @ weight^T / temperature) of a row and its target y:
    nll = -log p[y]       entropy = -sum p log p       selected[k] = log p[selected_token_ids[k]], the same ids in all rows
Rows whose target is ignore_index have nll, entropy, selected and gradient of exactly zero.
Shapes: input [n_rows, hidden], weight [vocab, hidden], target [n_rows] int64 or int32, selected_token_ids [k] int64
-> nll [n_rows], entropy [n_rows], selected [n_rows, k].
Dtypes: input and weight share one of fp32, fp16 or bf16 (the autocast dtype under autocast). Logits are rounded to it as
a linear layer's are; everything after is fp32, and so are the results. Every result is differentiable.
Saved for backward: the inputs, one log-sum-exp a row (and the results, small), and logits: each row's incoming gradients
are not known in the forward. Those of `hidden` rows wait in the memory that the weight's gradient will have, more as far
as memory goes; backward computes the others again. Where the weight has no gradient, with selected_token_ids, sums in
fp32, under torch.compile, in a second backward (retain_graph): all of them, chunk by chunk.

See _kept_logits.py for what is kept, _linear_head.py for the chunks and the precision of the weight's gradient,
_log_prob_rows.py for the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ... import registry
from ...registry import Op, Sample
from ...runtime.operator import (
    Function,
    autocast_dtype,
    check,
    check_flags,
    check_floats,
    check_tensors,
    define,
    first_order,
)
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
from .kept_logits import Memory, keeping_backward, keeping_forward, plan_kept
from .linear_head import HeadGradients, head_gradients, plan_chunks, sweep

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
    return _pack(-logp, entropy if return_entropy else None, selected)


def _selected(logits, lse, target, ids, temperature, ignore_index):
    found = logits.index_select(1, ids).to(lse.dtype) / temperature - lse[:, None]
    return found.masked_fill((target == ignore_index)[:, None], 0.0)


def _pack(nll, entropy, selected):
    found = tuple(t for t in (nll, entropy, selected) if t is not None)
    return found if len(found) > 1 else nll


# -- launchers -------------------------------------------------------------------------------------------------------

_NAME = "liger_fused_linear_scaled_cross_entropy"


@torch.no_grad()
def _fwd(x, weight, target, ids, temperature, ignore_index, entropy):
    target = target.contiguous()
    (n_rows, hidden), vocab, device = x.shape, weight.shape[0], x.device
    launch_stats(_NAME, target, None, vocab, Options(ignore_index, 0.0, 0.0, 0.0, NONE), device)  # asserts the targets
    out = log_prob_buffers(n_rows, device, entropy=entropy)
    selected = absent(out.lse) if ids is None else torch.empty(n_rows, ids.shape[0], dtype=torch.float32, device=device)
    chunks = plan_chunks(n_rows, hidden, vocab, x.dtype.itemsize, gradients=False)
    options = {"ignore_index": ignore_index, "temperature": temperature}
    for start, logits, _ in sweep(chunks, x, weight):
        row_log_probs(logits, target, out, row_start=start, **options)
        if ids is not None:
            rows = slice(start, start + logits.shape[0])
            selected[rows] = _selected(logits, out.lse[rows], target[rows], ids, temperature, ignore_index)
    return out.logp.neg_(), absent(out.lse) if out.entropy is None else out.entropy, selected, out.lse


@torch.no_grad()
def _bwd(x, weight, target, ids, lse, entropy, selected, dnll, dentropy, dselected, here, *call):
    target, (temperature, ignore_index, wide, *wanted) = target.contiguous(), call
    (n_rows, hidden), vocab = x.shape, weight.shape[0]
    push, pull = _push_and_pull(lse, dnll, dselected, here)
    bend = None if dentropy is None else dentropy.contiguous()
    dense = dentropy is not None or dselected is not None
    chunks = plan_chunks(n_rows, hidden, vocab, x.dtype.itemsize, wide=wide, apart=not dense)
    mine = target if here is None else torch.where(here, target, -1)
    grads = HeadGradients(x, weight, (*wanted, False), chunks, mine)
    saved = LogProbs(lse, lse, entropy)
    for start, logits, _ in sweep(chunks, x, weight, grads):
        row_log_prob_gradients(
            *(logits, target, saved, push),
            entropy_coef=bend,
            pull=pull,
            row_start=start,
            ignore_index=ignore_index,
            temperature=temperature,
        )
        if dselected is not None:
            rows = slice(start, start + logits.shape[0])
            small = (t if t is None else t[rows] for t in (dselected, selected, push, pull, bend, entropy, target))
            logits.index_copy_(1, ids, _at_selected(*small, ids, temperature, ignore_index).to(logits.dtype))
    return head_gradients(grads, x)[:2]


def _push_and_pull(lse, dnll, dselected, here):
    """What a row's target is pushed by, and what its softmax is pulled by where that is another number (else None).

    here: whether this rank has the row's target; None where it has the whole vocabulary
    """
    push = torch.zeros_like(lse) if dnll is None else dnll.neg()
    pull = None if dselected is None else push + dselected.sum(1)
    return (push, pull) if here is None else (torch.where(here, push, 0.0), push)


def _at_selected(dselected, selected, push, pull, bend, entropy, target, ids, temperature, ignore_index):
    """The gradient of the logits in the selected columns, [n, k] fp32: what the row kernel gave there, and their own.

    An id that occurs twice gets the sum of both in each place, so that it does not matter which of them is stored.
    """
    same = (ids[:, None] == ids[None, :]).to(dselected.dtype)
    step = max(1, (1 << 24) // max(1, dselected.numel()))
    parts = [(dselected[:, None, :] * same[k : k + step]).sum(-1) for k in range(0, len(ids), step)]
    p = selected.exp()
    found = torch.cat(parts, 1) + push[:, None] * (target[:, None] == ids) - pull[:, None] * p
    if bend is not None:
        found -= bend[:, None] * p * (selected.masked_fill(p == 0, 0.0) + entropy[:, None])
    return (found / temperature).masked_fill((target == ignore_index)[:, None], 0.0)


@torch.no_grad()
def _keep(x, weight, target, waiting, tail, late, slab, width, temperature, ignore_index, entropy):
    target = target.contiguous()
    options = Options(ignore_index, 0.0, 0.0, 0.0, NONE)
    launch_stats(_NAME, target, None, weight.shape[0], options, x.device)  # asserts the targets
    memory = Memory(waiting, tail, late, slab, width)
    out = keeping_forward(x, weight, target, temperature, ignore_index, entropy, memory)
    return out.logp.neg_(), absent(out.lse) if out.entropy is None else out.entropy, out.lse


@torch.no_grad()
def _keep_bwd(x, weight, target, lse, entropy, dnll, dentropy, waiting, tail, late, slab, width, *call):
    temperature, ignore_index, dinput = call
    push = _push_and_pull(lse, dnll, None, None)[0]
    bend = None if dentropy is None else dentropy.contiguous()
    saved, memory = LogProbs(lse, lse, entropy), Memory(waiting, tail, late, slab, width)
    options = temperature, ignore_index, memory, dinput
    dx, dweight = keeping_backward(x, weight, target.contiguous(), saved, push, bend, *options)
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
def _bwd_reference(
    x, weight, target, ids, lse, entropy, selected, dnll, dentropy, dselected, here, temperature, ignore_index, *call
):
    _, *wanted = call
    logits = F.linear(x, weight)
    log_p = logits.to(lse.dtype) / temperature - lse[:, None]
    p, ignored = log_p.exp(), target == ignore_index
    push, pull = _push_and_pull(lse, dnll, dselected, here)
    pull = push if pull is None else pull
    g = -pull[:, None] * p
    if dentropy is not None:
        g -= dentropy[:, None] * p * (log_p.masked_fill(p == 0, 0.0) + entropy[:, None])
    g.scatter_add_(1, target.long().masked_fill(ignored, 0)[:, None], push[:, None])
    if dselected is not None:
        g.index_add_(1, ids, dselected)
    dlogits = (g / temperature).masked_fill(ignored[:, None], 0.0).to(x.dtype)
    return dlogits @ weight if wanted[0] else absent(x), dlogits.t() @ x if wanted[1] else absent(x)


@torch.no_grad()
def _keep_reference(x, weight, target, waiting, tail, late, slab, width, *call):
    nll, h, _, lse = _fwd_reference(x, weight, target, None, *call)
    return nll, h, lse


@torch.no_grad()
def _keep_bwd_reference(x, weight, target, lse, entropy, dnll, dentropy, waiting, tail, late, slab, width, *call):
    temperature, ignore_index, dinput = call
    grads = lse, entropy, absent(lse), dnll, dentropy, None, None
    dx, dweight = _bwd_reference(x, weight, target, None, *grads, temperature, ignore_index, False, dinput, True)
    if not slab:
        return dx, dweight
    waiting.copy_(dweight)
    return dx, absent(x)


def _keep_fake(x, weight, target, waiting, tail, late, slab, width, *call):
    nll, h, _, lse = _fwd_fake(x, weight, target, None, *call)
    return nll, h, lse


def _keep_bwd_fake(x, weight, target, lse, entropy, dnll, dentropy, waiting, tail, late, slab, width, *call):
    return x.new_empty(x.shape if call[-1] else 0), weight.new_empty(0 if slab else weight.shape)


def _fwd_fake(x, weight, target, ids, temperature, ignore_index, entropy):
    wide, n_rows = torch.promote_types(x.dtype, torch.float32), x.shape[0]
    shapes = (n_rows,), (n_rows,) if entropy else (0,), (0,) if ids is None else (n_rows, ids.shape[0]), (n_rows,)
    return tuple(x.new_empty(shape, dtype=wide) for shape in shapes)


def _bwd_fake(x, weight, *rest):
    *_, dinput, dweight = rest
    return x.new_empty(x.shape if dinput else 0), weight.new_empty(weight.shape if dweight else 0)


_INPUTS = "Tensor input, Tensor weight, Tensor target, Tensor? selected_token_ids"
scaled_cross_entropy_fwd = define(
    f"fused_linear_scaled_cross_entropy_fwd({_INPUTS}, float temperature, int ignore_index, bool entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
scaled_cross_entropy_bwd = define(
    f"fused_linear_scaled_cross_entropy_bwd({_INPUTS}, Tensor lse, Tensor entropy, Tensor selected, "
    "Tensor? dnll, Tensor? dentropy, Tensor? dselected, Tensor? here, float temperature, int ignore_index, bool wide, bool dinput, bool dweight)"
    " -> (Tensor, Tensor)",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)


_MEMORY = (
    "Tensor(a!) waiting, Tensor(b!) tail, Tensor(c!) late, int slab, int width, float temperature, int ignore_index"
)
scaled_cross_entropy_keep = define(
    f"fused_linear_scaled_cross_entropy_keep(Tensor input, Tensor weight, Tensor target, {_MEMORY}, bool entropy)"
    " -> (Tensor, Tensor, Tensor)",
    launcher=_keep,
    reference=_keep_reference,
    fake=_keep_fake,
)
scaled_cross_entropy_keep_bwd = define(
    "fused_linear_scaled_cross_entropy_keep_bwd(Tensor input, Tensor weight, Tensor target, Tensor lse, Tensor entropy, "
    f"Tensor? dnll, Tensor? dentropy, {_MEMORY}, bool dinput) -> (Tensor, Tensor)",
    launcher=_keep_bwd,
    reference=_keep_bwd_reference,
    fake=_keep_bwd_fake,
)


def _is_watched() -> bool:
    """Whether torch.compile traces, or a dispatch mode sees the operators: selective checkpointing may keep an operator's
    results, and not its memory."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _are_batched(grads: list[torch.Tensor | None]) -> bool:
    """Whether they are torch.func.vmap's or autograd.grad's is_grads_batched: torch batches no operator that writes its inputs."""
    return torch._C._functorch.peek_interpreter_stack() is not None or any(
        torch._C._functorch.is_legacy_batchedtensor(g) for g in grads if g is not None
    )


class LigerFusedLinearScaledCrossEntropyFunction(Function):
    """Autograd for the scaled cross entropy: saves the inputs and what is small; returns (nll, entropy, selected)."""

    @staticmethod
    def forward(ctx, x, weight, target, ids, temperature, ignore_index, return_entropy, wide):
        dinput, dweight = ctx.needs_input_grad[:2]
        kept = None
        if dweight and ids is None and not wide and not _is_watched():
            kept = plan_kept(*x.shape, weight.shape[0], x.dtype.itemsize)
        memory: list[torch.Tensor] = []
        if kept is None:
            outputs = scaled_cross_entropy_fwd(x, weight, target, ids, temperature, ignore_index, return_entropy)
            *results, lse = outputs
        else:
            *memory, slab, width = kept.memory(x, weight)
            call = *memory, slab, width, temperature, ignore_index, return_entropy
            nll, entropy, lse = scaled_cross_entropy_keep(x, weight, target, *call)
            results, kept = [nll, entropy, absent(lse)], (slab, width)
        ctx.save_for_backward(x, weight, target, ids, lse, *results[1:], *memory)
        ctx.call, ctx.kept = (temperature, ignore_index, wide, dinput, dweight), kept
        ctx.has = (True, return_entropy, ids is not None)
        ctx.mark_non_differentiable(*(t for t, there in zip(results, ctx.has) if not there))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @first_order
    def backward(ctx, *grads):
        grads = [g if there else None for g, there in zip(grads, ctx.has)]
        if all(g is None for g in grads):
            return (None,) * 8
        saved = ctx.saved_tensors
        if ctx.kept is None or graph_is_kept() or _are_batched(grads):
            found = scaled_cross_entropy_bwd(*saved[:7], *grads, None, *ctx.call)
        else:
            x, weight, target, _, lse, entropy, _, *memory = saved
            temperature, ignore_index, _, dinput, _ = ctx.call
            call = *grads[:2], *memory, *ctx.kept, temperature, ignore_index, dinput
            for written in memory:  # first, so that a second backward raises, should this one run out of memory
                torch.autograd.graph.increment_version(written)
            dx, dweight = scaled_cross_entropy_keep_bwd(x, weight, target, lse, entropy, *call)
            found = dx, memory[0].detach() if ctx.kept[0] else dweight
        return *(g if w else None for g, w in zip(found, ctx.needs_input_grad)), *(None,) * 6


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
    autocast. target: [n_rows] int64 or int32. selected_token_ids: [k] int64, on the device, in 0..vocab-1, repeats allowed.
    accum_dtype=torch.float32 sums the weight's gradient in an fp32 buffer. Returns nll [n_rows] in fp32, or a tuple
    (nll, entropy [n_rows] if return_entropy, selected [n_rows, k] if selected_token_ids is given).
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; for targets see `liger_cross_entropy`.
    """
    input, weight = _checked(_NAME, input, weight, target, temperature, ignore_index, accum_dtype)
    check_flags(_NAME, return_entropy=return_entropy)
    ids = selected_token_ids
    if ids is not None and (not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1):
        check(False, _NAME, "selected_token_ids must be an int64 tensor of shape [k]")
    if ids is not None and ids.device != input.device:
        check(False, _NAME, f"selected_token_ids is on {ids.device} but the input is on {input.device}")
    call = input, weight, target, ids, float(temperature), ignore_index, return_entropy
    if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
        wide = accum_dtype is torch.float32 and weight.dtype.itemsize < 4
        nll, entropy, selected = LigerFusedLinearScaledCrossEntropyFunction.apply(*call, wide)
    else:
        nll, entropy, selected, _ = scaled_cross_entropy_fwd(*call)
    return _pack(nll, entropy if return_entropy else None, selected if ids is not None else None)


def _checked(op: str, input, weight, target, temperature: float, ignore_index: int, accum_dtype=None):
    """(input, weight), cast as autocast asks. Raises where the arguments of a public function do not fit."""
    check_tensors(op, input=input, weight=weight)
    dtype = autocast_dtype(input.device.type)
    if dtype is not None and torch.float64 not in (input.dtype, weight.dtype):
        input, weight = input.to(dtype), weight.to(dtype)
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1] or not weight.numel():
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        check(False, op, f"input must be [n_rows, hidden] and weight [vocab, hidden], got {shapes}")
    if input.dtype != weight.dtype:
        kinds = f"{input.dtype} and {weight.dtype}; cast them or use autocast"
        check(False, op, f"input and weight must share one dtype, got {kinds}")
    if accum_dtype not in (None, torch.float32, weight.dtype):
        check(False, op, f"accum_dtype must be None, torch.float32 or the weight's dtype, got {accum_dtype}")
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

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        return (values * scale).to(dtype).requires_grad_()

    if select:
        ids = torch.randint(vocab, (select,), generator=generator, device=device)
        options["selected_token_ids"] = torch.cat((ids, ids[:1]))  # one of them twice
    return Sample(
        args=(
            *(random(n_rows, hidden), random(vocab, hidden, scale=hidden**-0.5)),
            sample_targets(n_rows, vocab, device, generator, ignored),
        ),
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
