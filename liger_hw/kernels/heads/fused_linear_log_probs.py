"""Log-probabilities of tokens under a linear head, with entropy and accuracy, without the logits of all rows.

With z = input @ weight^T + bias of a row, s = softcap * tanh(z / softcap) / temperature, p = softmax(s), and target y:
    log_prob = log p[y]      entropy = -sum p log p      is_top1 = (argmax z == y)
    selected[k] = log p[selected_token_ids[k]], for all rows
Rows whose target is ignore_index have results and a gradient of exactly zero.

Logits are rounded to the dtype of input and weight (autocast's under autocast) as a linear layer's are. The bias is
added in fp32; everything after it is fp32, and so are the results. All but is_top1 are differentiable.

Saved for backward: the inputs, the log-sum-exp and the results of each row, and some logits (`kept_logits.py`), since
the forward does not have the incoming gradients. Backward computes the other logits again, or all of them with a frozen
weight, selected_token_ids, accum_dtype, torch.compile or a second backward (retain_graph).

batch_invariant: every product of the forward has the same sizes and alignment for any batch (INVARIANT_ROWS rows,
padded with zeros), and one program computes all statistics of a row. So a row's results have the same bits beside any
other rows, provided that in products of equal sizes the GEMM library computes equal rows alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ... import env, registry
from ...private import innermost_transform, is_batched, n_dispatch_modes
from ...registry import Sample
from ...runtime.operator import Function, check, check_flags, check_tensors, define, dense, first_order, graph_is_kept
from ...runtime.sharding import LossRule
from ...runtime.triton_import import INTERPRET
from ..losses.cross_entropy_rows import absent, assert_targets, check_arguments
from ..losses.log_prob_rows import (
    LOGP,
    LOGP_GRAD,
    LogProbOptions,
    LogProbs,
    log_prob_buffers,
    log_prob_options,
    row_log_prob_gradients,
    row_log_probs,
)
from ..losses.log_probs import (
    LogProbsOutput,
    entropy_misfit,
    log_probs_reference,
    pack_log_probs,
    results_of,
    rows_and_targets,
    selected_reference,
)
from .head_reference import fake_gradients, sample_head
from .kept_logits import KeepPlan, KeptLogits, keeping_backward, keeping_forward, plan_kept
from .linear_head import (
    INVARIANT_ROWS,
    Chunks,
    CountedRows,
    HeadGradients,
    Needs,
    checked_head,
    padded,
    plan_chunks,
    remaining_rows,
    scatter_rows,
    sums_in_fp32,
    sweep,
)


def fused_linear_log_probs_reference(
    input, weight, target, bias=None, *settings, accum_dtype=None, compact=False, batch_invariant=False, **named
):
    """The specification in plain torch: a linear layer, then log-probabilities in fp32 (fp64 for fp64)."""
    if batch_invariant and input.numel() > input.shape[-1]:  # one product for each row: all have the same size
        rows = input.reshape(-1, input.shape[-1]).split(1)
        logits = torch.cat([F.linear(row, weight) for row in rows]).unflatten(0, input.shape[:-1])
    else:
        logits = F.linear(input, weight)
    return log_probs_reference(logits, target, *settings, bias=bias, **named)


# -- launchers -------------------------------------------------------------------------------------------------------

_NAME = "liger_fused_linear_log_probs"


class LogProbsCall(NamedTuple):
    """The operators' numbers, in the order of their schema. wide: the weight's gradient is accumulated in fp32."""

    options: LogProbOptions
    entropy: bool = False
    top: bool = False
    batch_invariant: bool = False
    wide: bool = False
    needs: Needs = Needs()

    def tile(self, plain: bool) -> int:
        """Rows of every product of the forward in batch-invariant mode, or 0."""
        return (1 if plain else INVARIANT_ROWS) if self.batch_invariant else 0


def _checked_rows(x, weight, target, bias, call: LogProbsCall, plain: bool):
    """(contiguous target and bias, buffers for the results), after a device-side check of the targets."""
    target, bias = target.contiguous(), dense(bias)
    assert_targets(_NAME, target, weight.shape[0], call.options.ignore_index, plain)
    return target, bias, log_prob_buffers(x.shape[0], x, entropy=call.entropy, top=call.top)


@torch.no_grad()
def _fwd(x, weight, target, bias, ids, call: LogProbsCall, plain=False):
    target, bias, out = _checked_rows(x, weight, target, bias, call, plain)
    (n_rows, hidden), vocab = x.shape, weight.shape[0]
    selected = absent(out.lse) if ids is None else out.lse.new_empty(n_rows, ids.shape[0])
    chunks = plan_chunks(n_rows, hidden, vocab, x.dtype.itemsize, gradients=False)
    if tile := call.tile(plain):
        chunks = Chunks([(start, min(start + tile, n_rows)) for start in range(0, n_rows, tile)])
    for start, logits, _ in sweep(chunks, x, weight, tile=tile):
        row_log_probs(logits, target, out, call.options, bias=bias, row_start=start, plain=plain)
        if ids is not None:
            rows = slice(start, start + logits.shape[0])
            selected[rows] = selected_reference(logits, out.lse[rows], target[rows], bias, ids, call.options)
    return *results_of(out), selected


@torch.no_grad()
def _bwd(x, weight, target, bias, ids, lse, entropy, selected, dlogp, dentropy, dselected, here, call, plain=False):
    target, bias = target.contiguous(), dense(bias)
    (n_rows, hidden), vocab = x.shape, weight.shape[0]
    dlogp, softmax_coef = _row_coefficients(lse, dlogp, dselected, here)
    dentropy = dense(dentropy)
    one_entry_a_row = dentropy is None and dselected is None
    sizes = n_rows, hidden, vocab, x.dtype.itemsize
    chunks = plan_chunks(*sizes, wide=call.wide, with_targets=one_entry_a_row)
    entries = target if here is None else torch.where(here, target, -1)
    grads = HeadGradients(x, weight, call.needs, chunks, entries, plain)
    saved = LogProbs(lse, lse, entropy)
    coefs = {"entropy_coef": dentropy, "softmax_coef": softmax_coef}
    for start, logits, _ in sweep(chunks, x, weight, grads):
        row = logits, target, saved, dlogp, call.options
        row_log_prob_gradients(*row, bias=bias, row_start=start, plain=plain, **coefs)
        if dselected is not None:
            rows = slice(start, start + logits.shape[0])
            dlogits = _gradient_at_ids(
                *(selected[rows], ids, target[rows], dselected[rows], dlogp[rows], softmax_coef[rows]),
                dentropy=None if dentropy is None else dentropy[rows],
                entropy=entropy[rows],
                lse=lse[rows],
                options=call.options,
            )
            logits.index_copy_(1, ids, dlogits.to(logits.dtype))
    return grads.results(bias)


def _row_coefficients(lse, dlogp, dselected, here):
    """([n_rows] the gradient of log p[y], [n_rows] the factor of each row's softmax; None if both are equal).

    here: [n_rows], whether this rank has the row's target; None: it has the whole vocabulary
    """
    dlogp = torch.zeros_like(lse) if dlogp is None else dlogp.contiguous()
    if here is not None:
        return torch.where(here, dlogp, 0.0), dlogp
    return dlogp, None if dselected is None else dlogp + dselected.sum(1)


def _gradient_at_ids(selected, ids, target, dselected, dlogp, softmax_coef, *, dentropy, entropy, lse, options):
    """The logits' gradient in the selected columns, [n, k] fp32, from all results. Every column of a repeated id has
    the sum over its repeats, so any of them may be stored."""
    same = (ids[:, None] == ids[None, :]).to(dselected.dtype)
    step = max(1, (1 << 24) // max(1, dselected.numel()))  # bounds the products below to 2^24 elements
    parts = [(dselected[:, None, :] * same[k : k + step]).sum(-1) for k in range(0, max(1, len(ids)), step)]
    p = selected.exp()
    gradient = torch.cat(parts, 1) + dlogp[:, None] * (target[:, None] == ids) - softmax_coef[:, None] * p
    if dentropy is not None:
        gradient -= dentropy[:, None] * p * (selected.masked_fill(p == 0, 0.0) + entropy[:, None])
    if options.softcap:
        gradient *= 1.0 - ((selected + lse[:, None]) * (options.temperature / options.softcap)).square()
    return (gradient / options.temperature).masked_fill((target == options.ignore_index)[:, None], 0.0)


@torch.no_grad()
def _keep(x, weight, target, bias, dweight_memory, tail, rest, slab, width, call: LogProbsCall, plain=False):
    target, bias, out = _checked_rows(x, weight, target, bias, call, plain)
    kept = KeptLogits(dweight_memory, tail, rest, slab, width)
    keeping_forward(x, weight, target, out, kept, call.options, call.tile(plain), bias, plain)
    return results_of(out)


def _fwd_fake(x, weight, target, bias, ids, call: LogProbsCall):
    out = log_prob_buffers(x.shape[0], x, entropy=call.entropy, top=call.top)
    return *results_of(out), absent(out.lse) if ids is None else out.lse.new_empty((x.shape[0], ids.shape[0]))


def _bwd_fake(x, weight, target, bias, *others):
    return fake_gradients(x, weight, bias, others[-1].needs)


def _keep_fake(x, weight, target, bias, dweight_memory, tail, rest, slab, width, call: LogProbsCall):
    return _fwd_fake(x, weight, target, bias, None, call)[:4]


_INPUTS = "Tensor input, Tensor weight, Tensor target, Tensor? bias"
_SHAPES = "T input [n_rows, hidden]; T weight [vocab, hidden]; int target [n_rows]; T bias [vocab]"
_SHAPES_BWD = "lse, dlogp, dentropy [n_rows]; any here [n_rows]; saved_entropy [0] | [n_rows]"


def _bwd_misfit(x, weight, target, bias, ids, lse, entropy, selected, dlogp, dentropy, dselected, here, call) -> str:
    if dselected is not None and (ids is None or selected.dim() != 2):
        return "a gradient of selected tokens needs selected_token_ids and their saved log-probabilities"
    return entropy_misfit(lse, entropy, dentropy)


def _keep_misfit(x, weight, target, bias, dweight_memory, tail, rest, slab, width, call) -> str:
    if rest.shape[1] != padded(weight.shape[0]):
        return f"rest must be [n_kept, {padded(weight.shape[0])}], got {list(rest.shape)}"
    return "dweight_memory must have weight's shape if there is a slab" if slab and dweight_memory.dim() != 2 else ""


linear_log_probs_fwd = define(
    f"fused_linear_log_probs_fwd({_INPUTS}, Tensor? selected_token_ids) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    shapes=f"{_SHAPES}; int selected_token_ids [k]",
    launcher=_fwd,
    reference=partial(_fwd, plain=True),
    fake=_fwd_fake,
    numbers=LogProbsCall,
    recorded=False,
)
linear_log_probs_bwd = define(
    f"fused_linear_log_probs_bwd({_INPUTS}, Tensor? selected_token_ids, Tensor lse, Tensor saved_entropy, "
    f"Tensor selected, Tensor? dlogp, Tensor? dentropy, Tensor? dselected, Tensor? here)"
    " -> (Tensor, Tensor, Tensor)",
    shapes=f"{_SHAPES}; int selected_token_ids [k]; {_SHAPES_BWD}; selected [0] | [n_rows, k]; dselected [n_rows, k]",
    misfit=_bwd_misfit,
    launcher=_bwd,
    reference=partial(_bwd, plain=True),
    fake=_bwd_fake,
    numbers=LogProbsCall,
    recorded=False,
)
linear_log_probs_keep = define(
    f"fused_linear_log_probs_keep({_INPUTS}, Tensor(a!) dweight_memory, Tensor(b!) tail, Tensor(c!) rest, int slab,"
    " int width) -> (Tensor, Tensor, Tensor, Tensor)",
    shapes=f"{_SHAPES}; T dweight_memory [0] | [vocab, hidden]; T tail [n_tail]; T rest [n_kept, n_padded]",
    misfit=_keep_misfit,
    launcher=_keep,
    reference=partial(_keep, plain=True),
    fake=_keep_fake,
    numbers=LogProbsCall,
    recorded=False,
)


def _is_traced() -> bool:
    """Whether torch.compile or a dispatch mode intercepts operators. The mode of selective checkpointing may keep an
    operator's results without the memory that the operator wrote."""
    return torch.compiler.is_compiling() or n_dispatch_modes() > 0


def _are_batched(grads: list[torch.Tensor | None]) -> bool:
    """Whether vmap or is_grads_batched batches grads. torch cannot batch operators that write to their inputs."""
    return innermost_transform() is not None or any(is_batched(g) for g in grads if g is not None)


class ForwardOutput(NamedTuple):
    """results: (logp, entropy, top, lse, selected); plan: which logits are kept, or None; memory: the kept logits"""

    results: tuple[torch.Tensor, ...]
    plan: KeepPlan | None
    memory: tuple[torch.Tensor, ...]


def forward_rows(x, weight, target, bias, ids, call: LogProbsCall) -> ForwardOutput:
    """The forward of rows [n_rows, hidden]; keeps logits if the weight needs a gradient and `plan_kept` has a plan."""
    plan = None
    if call.needs.dweight and ids is None and not call.wide and not _is_traced():
        plan = plan_kept(*x.shape, weight.shape[0], x.dtype.itemsize)
    if plan is None:
        return ForwardOutput(linear_log_probs_fwd(x, weight, target, bias, ids, call), None, ())
    kept = plan.allocate(x, weight, call.tile(plain=False))
    results = linear_log_probs_keep(x, weight, target, bias, *kept, call)
    return ForwardOutput((*results, absent(results[3])), plan, kept[:3])


def backward_rows(saved, grads, plan: KeepPlan | None, call: LogProbsCall) -> tuple[torch.Tensor | None, ...]:
    """(dx, dweight, dbias), None where not needed.

    saved: (x, weight, target, bias, ids, lse, entropy, selected, *`ForwardOutput.memory`); lse and entropy are over the
    whole vocabulary even if weight is a part of it
    grads: (dlogp, dentropy, dselected, here), any may be None; here: see `_row_coefficients`
    """
    x, weight, target, bias, ids, lse, entropy, selected, *memory = saved
    dlogp, dentropy, dselected, here = grads
    if plan is None or graph_is_kept() or _are_batched([dlogp, dentropy, dselected]):
        gradients = linear_log_probs_bwd(x, weight, target, bias, ids, lse, entropy, selected, *grads, call)
    else:
        for kept_tensor in memory:  # before the launch: if it runs out of memory, a second backward must raise
            torch.autograd.graph.increment_version(kept_tensor)
        kept = KeptLogits(*memory, plan.slab, plan.width)
        plain = env.LIGER_HW_DISABLE or x.is_cpu and not INTERPRET
        dlogp, softmax_coef = _row_coefficients(lse, dlogp, None, here)
        rows = x, weight, dense(bias), target.contiguous(), LogProbs(lse, lse, entropy), dlogp, dense(dentropy)
        dx, dw, db = keeping_backward(*rows, kept, call.needs, call.options, softmax_coef, plain)
        gradients = dx, dw.detach(), db if db is None else db.to(x.dtype)
    return tuple(g if w else None for g, w in zip(gradients, call.needs))


class FusedLinearLogProbsFunction(Function):
    """Rows [n_rows, hidden] -> (logp, entropy, top, selected); top: int64 [n_rows], the first column of the largest
    logit."""

    sharding = LossRule("linear_log_probs")

    @staticmethod
    def forward(ctx, x, weight, target, bias, ids, call):
        dinput, dweight, _, dbias = ctx.needs_input_grad[:4]
        call = call._replace(needs=Needs(dinput, dweight, dbias))
        (logp, entropy, top, lse, selected), ctx.plan, memory = forward_rows(x, weight, target, bias, ids, call)
        ctx.save_for_backward(x, weight, target, bias, ids, lse, entropy, selected, *memory)
        ctx.call, ctx.has_selected = call, ids is not None
        unused = [t for t, is_used in ((entropy, call.entropy), (selected, ctx.has_selected)) if not is_used]
        ctx.mark_non_differentiable(top, *unused)
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad):  # copies, since the caller may change results in place
            entropy = entropy.clone() if call.entropy else entropy
            selected = selected.clone() if ctx.has_selected else selected
        return logp, entropy, top, selected

    @staticmethod
    @first_order
    def backward(ctx, dlogp, dentropy, _not_differentiable, dselected):
        dentropy, dselected = dentropy if ctx.call.entropy else None, dselected if ctx.has_selected else None
        if dlogp is None and dentropy is None and dselected is None:
            return (None,) * 6
        dx, dw, db = backward_rows(ctx.saved_tensors, (dlogp, dentropy, dselected, None), ctx.plan, ctx.call)
        return dx, dw, None, db, None, None


def liger_fused_linear_log_probs(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_top1: bool = False,
    selected_token_ids: torch.Tensor | None = None,
    shift_labels: bool = False,
    accum_dtype: torch.dtype | None = None,
    compact: bool | CountedRows = False,
    batch_invariant: bool = False,
) -> torch.Tensor | LogProbsOutput:
    """Log-probability of each target under softmax(softcap(input @ weight^T + bias) / temperature), or more.

    input: [..., hidden]; weight: [vocab, hidden]; bias: [vocab]; one dtype, fp32, fp16 or bf16 (fp64 on the CPU), or
    any under autocast. target: [...] int64 or int32, the token that each row predicts. With shift_labels=True target
    has the sequences' tokens [..., length]: each row predicts the next token, and the last row of a sequence is
    ignored. In a packed sequence the first token of each document must then be ignore_index.
    temperature: a positive number; softcap: a positive number, with which logits become softcap * tanh(logits /
    softcap). return_entropy: also each row's entropy in nats, differentiable; return_top1: also whether the target has
    the largest logit (of equal logits, the first counts); selected_token_ids: [k] int64 in 0..vocab-1, on input's
    device, repeats allowed: also their log-probabilities, differentiable.
    accum_dtype=torch.float32 sums the weight's gradient in an fp32 buffer. compact leaves ignored rows out of the
    products: a `CountedRows` of the labels made early in the step, or True to count now, which waits for the device.
    batch_invariant: a row's results (not its gradients) have the same bits beside any other rows, on one device and
    version of its GEMM library.
    Returns the log-probabilities, fp32 of the target's shape, or a `LogProbsOutput`. Rows at ignore_index have zeros.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; for targets see `liger_cross_entropy`.
    """
    flags = {"return_entropy": return_entropy, "return_top1": return_top1}
    check_flags(_NAME, **flags, shift_labels=shift_labels, batch_invariant=batch_invariant)
    check_tensors(_NAME, input=input)
    input, target, shape = rows_and_targets(_NAME, input, target, ignore_index, bool(shift_labels))
    input, weight, bias = checked_head(_NAME, input, weight, bias)
    check_arguments(_NAME, input, target, weight.shape[0])
    options = log_prob_options(_NAME, ignore_index, temperature, softcap)
    ids = selected_token_ids
    if ids is not None and (not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1):
        check(False, _NAME, "selected_token_ids must be an int64 tensor of shape [k]")
    if ids is not None and ids.device != input.device:
        check(False, _NAME, f"selected_token_ids is on {ids.device} but the input is on {input.device}")
    call = LogProbsCall(
        options,
        entropy=bool(return_entropy),
        top=bool(return_top1),
        batch_invariant=bool(batch_invariant),
        wide=sums_in_fp32(_NAME, accum_dtype, weight),
    )
    order, n_rows = remaining_rows(_NAME, target, ignore_index, compact), target.shape[0]
    if order is not None:
        input, target = input.index_select(0, order), target.index_select(0, order)
    logp, entropy, top, selected = FusedLinearLogProbsFunction.apply(input, weight, target, bias, ids, call)
    is_top1 = (top == target) & (target != ignore_index) if return_top1 else None

    def shaped(rows: torch.Tensor | None, is_used: bool = True) -> torch.Tensor | None:
        if rows is None or not is_used:
            return None
        return scatter_rows(rows, order, n_rows).reshape(*shape, *rows.shape[1:])

    results = shaped(logp), shaped(entropy, return_entropy), shaped(is_top1)
    return pack_log_probs(*results, shaped(selected, ids is not None))


WORKLOADS = {"llama3_8b": (8192, 4096, 128256), "mistral_7b": (8192, 4096, 32768), "qwen3_8b": (8192, 4096, 151936)}


def sample(sizes, dtype, device, generator, *, select=0, **options: Any) -> Sample:
    if select:
        ids = torch.randint(sizes[2], (select,), generator=generator, device=device)
        options["selected_token_ids"] = torch.cat((ids, ids[:1]))  # the first id twice
    return sample_head(sizes, dtype, device, generator, passes=(3, 4), **options)


OP = registry.register_file(
    __name__,
    tunables=(LOGP, LOGP_GRAD),
    options=(
        {},
        {"temperature": 0.7, "return_entropy": True, "return_top1": True},
        {"return_entropy": True, "select": 3, "softcap": 5.0, "biased": True, "accum_dtype": torch.float32},
        {"softcap": 5.0, "return_entropy": True, "return_top1": True, "compact": True, "ignored": 0.4, "biased": True},
        {"frozen": True, "return_entropy": True, "batch_invariant": True},
    ),
)
