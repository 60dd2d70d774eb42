"""For `liger_kernel.chunked_loss.fused_linear_*`: Liger's base classes for custom chunked losses.

A subclass defines a loss of log-probabilities or logits, and a `forward` and `backward` that call the base class's:

    class HingeFunction(LigerFusedLinearPreferenceBase):
        @staticmethod
        def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1):
            losses = torch.relu(1 - beta * (chosen_logps - rejected_logps))
            return losses.sum() / (full_target.shape[0] // 2)

        @classmethod
        def forward(cls, ctx, _input, weight, target, bias=None, beta=0.1):
            return super().forward(cls, ctx, _input, weight, target, bias, beta=beta, compute_nll_loss=False)

        @staticmethod
        def backward(ctx, *grad_output):
            return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], None

    loss, metrics = HingeFunction.apply(hidden_states, weight, labels)

The loss function is called for each chunk of the batch and returns the chunk's part of the loss, a sum divided by sizes
of the full tensors. Metrics are summed over the chunks if they are scalars, else concatenated. Gradients of a chunk are
computed before the next chunk starts. `compiled` has no effect. docs/losses.md has more.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.nn.functional as F

from ..chunked_loss.checks import on_device
from ..chunked_loss.log_prob_loss import reference_logps
from ..kernels.heads.fused_linear_log_probs import liger_fused_linear_log_probs
from ..kernels.heads.head_reference import reference_logits
from ..kernels.losses.cross_entropy_rows import absent
from ..kernels.losses.loss_gradient import scale_gradient
from ..runtime.operator import check, check_indices, first_order

Chunk = list[slice]
"""The slices of the batch that form a chunk: one, or for pairs two (chosen and rejected sequences)."""


def _chunks(n: int, count: int, offsets: Sequence[int] = (0,)) -> list[Chunk]:
    """Split range(n) into `count` chunks as torch.chunk does. A chunk has its slice shifted by each of `offsets`."""
    size = max(1, -(-n // max(1, count)))
    starts = range(0, max(1, n), size)
    return [[slice(at + start, at + min(start + size, n)) for at in offsets] for start in starts]


def _rows(t: Any, chunk: Chunk) -> Any:
    """The rows of a tensor that belong to a chunk; None for None."""
    if t is None:
        return None
    return t[chunk[0]] if len(chunk) == 1 else torch.cat([t[rows] for rows in chunk])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def _sum_of_chunks(
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: Sequence[Chunk],
    chunk_loss: Callable[..., tuple[torch.Tensor, Sequence[torch.Tensor]]],
) -> tuple[torch.Tensor, ...]:
    """(loss, *metrics) of all chunks. Saves the gradients of x, weight and bias in ctx, None if not required.

    chunk_loss: (chunk, the chunk's rows of x, weight, bias) -> (loss, metrics)
    """
    head = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in (weight, bias)]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if x.requires_grad else None
    sums: list[torch.Tensor | None] = [None, None]
    results = []
    for chunk in chunks:
        leaves = _rows(x, chunk).detach().requires_grad_(x.requires_grad), *head
        result, (dx_of_chunk, *of_head) = _loss_and_gradients(leaves, chunk_loss, chunk)
        results.append(result)
        if dx is not None:
            for rows, part in zip(chunk, dx_of_chunk.chunk(len(chunk))):
                dx[rows] = part
        for i, gradient in enumerate(of_head):
            if gradient is not None and sums[i] is None:
                sums[i] = gradient.to(_wide(gradient.dtype)) if len(chunks) > 1 else gradient
            elif gradient is not None:
                sums[i] += gradient
    ctx.save_for_backward(dx, *(None if s is None else s.to(t.dtype).contiguous() for s, t in zip(sums, head)))
    wide = _wide(x.dtype)
    return tuple(torch.cat(v) if v[0].dim() else torch.stack([t.to(wide) for t in v]).sum() for v in zip(*results))


def _loss_and_gradients(leaves: tuple, chunk_loss: Callable[..., Any], chunk: Chunk) -> tuple[tuple, list]:
    """((loss, *metrics) of a chunk, the gradient of each leaf or None if not required), detached."""
    trained = [t for t in leaves if t is not None and t.requires_grad]
    with torch.enable_grad():
        loss, metrics = chunk_loss(chunk, *leaves)
    if trained and loss.requires_grad:
        computed = iter(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))
    else:  # the loss does not depend on a leaf
        computed = iter([torch.zeros_like(t) for t in trained])
    gradients = [next(computed) if t is not None and t.requires_grad else None for t in leaves]
    return tuple(t.detach() for t in (loss, *metrics)), gradients


def _backward(bias_place: int, count: int) -> Any:
    """The `backward` of a base class: multiplies the saved gradients by the loss's incoming gradient.

    bias_place: index of the bias among the `count` arguments; input and weight are the first two
    """

    @first_order
    def backward(ctx: Any, *grad_output: Any) -> tuple[torch.Tensor | None, ...]:
        loss_grad: Any = grad_output
        while isinstance(loss_grad, (tuple, list)):  # subclasses pass the gradients or a tuple of them
            loss_grad = loss_grad[0]
        gradients: list[torch.Tensor | None] = [None] * count
        for place, gradient in zip((0, 1, bias_place), ctx.saved_tensors):
            gradients[place] = None if gradient is None else scale_gradient(gradient, loss_grad, absent(loss_grad))
        return tuple(gradients)

    return staticmethod(backward)


def _loss_and_more(result: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    return (result[0], result[1:]) if isinstance(result, tuple) else (result, ())


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    logits = reference_logits(x, weight, bias)
    return logits.to(_wide(logits.dtype))


def _token_logps(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The log-probability of each label [batch, length]; zero for ignored ones."""
    rows, flat = logits.flatten(0, -2), labels.flatten().long()
    return -F.cross_entropy(rows, flat, ignore_index=ignore_index, reduction="none").view(labels.shape)


def _of_sequences(logps: torch.Tensor, labels: torch.Tensor, ignore_index: int, average: bool) -> torch.Tensor:
    return logps.sum(-1) / (labels != ignore_index).sum(-1) if average else logps.sum(-1)


def _reference_logps(cls: Any, ref: tuple, x: torch.Tensor, labels: torch.Tensor, ignore_index: int, temperature=1.0):
    return reference_logps(cls.__name__, *ref, x, labels, ignore_index, float(temperature))


class _Base(torch.autograd.Function):
    @classmethod
    @torch.compiler.disable
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        # torch.compile cannot trace a forward that computes gradients
        return super().apply(*args, **kwargs)


class LigerFusedLinearPreferenceBase(_Base):
    """A loss over pairs. A batch has all chosen sequences, then the rejected ones.

    The loss is alpha * nll + preference_loss_fn(chosen_logps [pairs of the chunk], rejected_logps, full_target,
    beta=beta, **loss_kwargs). preference_loss_fn returns its part or (part, *metrics). With use_ref_model it also gets
    ref_chosen_logps and ref_rejected_logps. nll: the mean over the chosen sequences' tokens, 0 without compute_nll_loss
    """

    @staticmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        alpha=1.0,
        beta=0.1,
        compute_nll_loss=True,
        nll_target=None,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=True,
        **loss_kwargs,
    ):
        """_input: [2 pairs, length, hidden]; target, nll_target: [2 pairs, length]; chunk_size: pairs in a chunk.

        Returns (loss, (chosen_logps [pairs], rejected_logps [pairs], chosen_logits_mean, rejected_logits_mean,
        nll_loss, *metrics)).
        """
        batch, half = _input.shape[0], target.shape[0] // 2
        if batch % 2 or target.shape[0] != batch:
            expected = "_input and target must hold chosen sequences, then as many rejected ones"
            check(False, cls.__name__, f"{expected}; got {batch} and {target.shape[0]} sequences")
        check_indices(cls.__name__, "target", target, _input)
        nll_labels = target if nll_target is None else nll_target
        n_nll_tokens = (nll_labels[:half] != ignore_index).sum()
        n_logits = half * target.shape[1] * weight.shape[0]
        ref = None
        if use_ref_model:
            logps = _reference_logps(cls, (ref_input, ref_weight, ref_bias), _input, target, ignore_index)
            ref = _of_sequences(logps, target, ignore_index, average_log_prob)

        def chunk_loss(chunk, x, weight, bias):
            logits, labels = _logits(x, weight, bias), _rows(target, chunk)
            logps = _token_logps(logits, labels, ignore_index)
            chosen, rejected = _of_sequences(logps, labels, ignore_index, average_log_prob).tensor_split(2)
            refs = {} if ref is None else {"ref_chosen_logps": ref[chunk[0]], "ref_rejected_logps": ref[chunk[1]]}
            loss = cls.preference_loss_fn(chosen, rejected, target, beta=beta, **loss_kwargs, **refs)
            loss, more = _loss_and_more(loss)
            nll = logps.new_zeros(())
            if compute_nll_loss:
                of_chosen, _ = logps.tensor_split(2)
                if nll_target is not None:
                    of_chosen = _token_logps(logits[: len(chosen)], nll_target[chunk[0]], ignore_index)
                nll = -of_chosen.sum() / n_nll_tokens
                loss = loss + alpha * nll
            means = (t.sum() / n_logits for t in logits.tensor_split(2))
            return loss, (chosen, rejected, *means, nll, *more)

        chunks = _chunks(half, batch // (2 * chunk_size), offsets=(0, half))
        loss, *metrics = _sum_of_chunks(ctx, _input, weight, bias, chunks, chunk_loss)
        return loss, tuple(metrics)

    backward = _backward(3, 8)


class LigerFusedLinearUnpairedPreferenceBase(_Base):
    """A loss over single sequences, each good or bad.

    The loss is preference_loss_fn(log_probs [sequences of the chunk], preference_labels [the same shape], full_target,
    **loss_kwargs), which returns it or (loss, *metrics), and with use_ref_model also gets ref_log_prob_chunk.
    """

    @staticmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        preference_labels,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=False,
        **loss_kwargs,
    ):
        """_input: [batch, length, hidden]; target: [batch, length]; preference_labels: [batch], true for good ones;
        chunk_size: sequences in a chunk.

        Returns (loss, (good_logps_sum, bad_logps_sum, good_logits_sum, bad_logits_sum, *metrics)).
        """
        if preference_labels is None:
            check(False, cls.__name__, "preference_labels must be provided: a bool for each sequence")
        check_indices(cls.__name__, "target", target, _input)
        ref = None
        if use_ref_model:
            logps = _reference_logps(cls, (ref_input, ref_weight, ref_bias), _input, target, ignore_index)
            ref = _of_sequences(logps, target, ignore_index, average_log_prob)

        def chunk_loss(chunk, x, weight, bias):
            logits, labels, kinds = _logits(x, weight, bias), _rows(target, chunk), _rows(preference_labels, chunk)
            logps = _token_logps(logits, labels, ignore_index)
            logps = _of_sequences(logps, labels, ignore_index, average_log_prob)
            refs = {} if ref is None else {"ref_log_prob_chunk": _rows(ref, chunk)}
            loss, more = _loss_and_more(cls.preference_loss_fn(logps, kinds, target, **loss_kwargs, **refs))
            good = kinds.bool()
            values = [logps, logits.sum((1, 2))]
            sums = (torch.where(which, t, 0.0).sum() for t in values for which in (good, ~good))
            return loss, (*sums, *more)

        batch = _input.shape[0]
        loss, *metrics = _sum_of_chunks(ctx, _input, weight, bias, _chunks(batch, batch // chunk_size), chunk_loss)
        return loss, tuple(metrics)

    backward = _backward(4, 5)


class LigerFusedLinearDistillationBase(_Base):
    """A loss that trains a student's head on a teacher's head and on labels.

    The loss is (weight_hard_loss * hard + weight_soft_loss * soft) / number of rows that are not ignored. hard: the sum
    of the cross entropy with the labels. soft: distillation_loss_fn(student_logits [rows of the chunk, vocab],
    teacher_logits, target=labels, ignore_index=ignore_index, beta=beta, **loss_kwargs), which returns a sum over rows
    and gets logits / temperature. If the teacher's vocabulary is larger, the student's missing logits are zero.
    """

    @staticmethod
    def forward(
        cls,
        ctx,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        target,
        student_bias=None,
        teacher_bias=None,
        chunk_size=1024,
        ignore_index=-100,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        compute_ce_loss=True,
        temperature=1.0,
        compiled=True,
        return_soft_hard_loss=False,
        **loss_kwargs,
    ):
        """student_input, teacher_input: [rows, hidden of each]; target: [rows]; chunk_size: rows in a chunk.

        Returns the loss; with return_soft_hard_loss (loss, soft, hard), where only the loss is differentiable.
        """
        check_indices(cls.__name__, "target", target, student_input)
        n_counted = (target != ignore_index).sum().clamp_min(1)
        with_hard = compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss)
        n_padded = max(0, teacher_weight.shape[0] - student_weight.shape[0])

        def chunk_loss(chunk, x, weight, bias):
            labels, student = _rows(target, chunk), _logits(x, weight, bias)
            with torch.no_grad():
                teacher = _logits(_rows(teacher_input, chunk), teacher_weight, teacher_bias)
            hard = student.new_zeros(())
            if with_hard:
                hard = -_token_logps(student, labels, ignore_index).sum() / n_counted
            student = F.pad(student / temperature, (0, n_padded))
            named = {"target": labels, "ignore_index": ignore_index, "beta": beta, **loss_kwargs}
            soft = cls.distillation_loss_fn(student, teacher / temperature, **named) / n_counted
            loss = weight_soft_loss * soft + (weight_hard_loss * hard if with_hard else 0)
            return loss, (soft, hard)

        n_rows = student_input.shape[0]
        chunks = _chunks(n_rows, n_rows // chunk_size)
        loss, soft, hard = _sum_of_chunks(ctx, student_input, student_weight, student_bias, chunks, chunk_loss)
        if not return_soft_hard_loss:
            return loss
        ctx.mark_non_differentiable(soft, hard)
        return loss, soft, hard

    backward = _backward(5, 6)


class LigerFusedLinearPPOBase(_Base):
    """A policy loss of the log-probabilities of the selected tokens.

    ppo_loss_fn returns (loss, metrics). Its keywords are per_token_logps [sequences of the chunk, length]; the chunk's
    attention_mask, advantages, ref_per_token_logps, old_per_token_logps and vllm_is_ratio (the last three may be None);
    full_attention_mask [batch, length]; and the loss's options, the arguments of `forward` from epsilon_low on.
    """

    @staticmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.04,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        temperature=1.0,
        compiled=True,
        use_ref_model=False,
        chunk_size=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vllm_is_ratio=None,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        num_items_in_batch=None,
    ):
        """_input: [batch, length, hidden]; selected_token_ids, attention_mask, ref_per_token_logps,
        old_per_token_logps: [batch, length]; advantages: [batch] or [batch, length]; vllm_is_ratio: [batch], [batch, 1]
        or [batch, length]; chunk_size: sequences in a chunk. use_ref_model needs ref_per_token_logps, or ref_input and
        ref_weight. Returns (loss, metrics).
        """
        name, (batch, length) = cls.__name__, attention_mask.shape
        wide = _wide(_input.dtype)
        check_indices(name, "selected_token_ids", selected_token_ids, _input)
        if loss_type == "dr_grpo" and max_completion_length is None:
            check(False, name, "max_completion_length must be provided for loss_type 'dr_grpo'")
        if vllm_is_ratio is not None:
            if tuple(vllm_is_ratio.shape) not in ((batch,), (batch, 1), (batch, length)):
                expected = f"vllm_is_ratio must have shape ({batch},), ({batch}, 1) or ({batch}, {length})"
                check(False, name, f"{expected}, got {tuple(vllm_is_ratio.shape)}")
            vllm_is_ratio = vllm_is_ratio.view(batch, -1)
        if not use_ref_model:
            ref_per_token_logps = None
        elif ref_per_token_logps is None:
            ref = ref_input, ref_weight, ref_bias
            ref_per_token_logps = _reference_logps(cls, ref, _input, selected_token_ids, -100, temperature)
        options = {"full_attention_mask": attention_mask, "loss_type": loss_type, "beta": beta, "delta": delta}
        options |= {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high}
        options |= {"max_completion_length": max_completion_length, "use_bias_correction_kl": use_bias_correction_kl}
        options |= {"num_items_in_batch": num_items_in_batch, "importance_sampling_level": importance_sampling_level}
        options |= {"sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg}
        options |= {"vespo_k_pos": vespo_k_pos, "vespo_lambda_pos": vespo_lambda_pos}
        options |= {"vespo_k_neg": vespo_k_neg, "vespo_lambda_neg": vespo_lambda_neg}
        rows = {
            "attention_mask": attention_mask,
            "advantages": advantages,
            "ref_per_token_logps": None if ref_per_token_logps is None else ref_per_token_logps.to(wide),
            "old_per_token_logps": None if old_per_token_logps is None else old_per_token_logps.to(wide),
            "vllm_is_ratio": vllm_is_ratio,
        }

        def chunk_loss(chunk, x, weight, bias):
            ids = _rows(selected_token_ids, chunk)
            logps = LigerFusedLinearPPOBase.chunk_forward(x, weight, ids, bias, temperature)
            of_chunk = {key: _rows(t, chunk) for key, t in rows.items()}
            return cls.ppo_loss_fn(per_token_logps=logps, **of_chunk, **options)

        loss, *metrics = _sum_of_chunks(ctx, _input, weight, bias, _chunks(batch, batch // chunk_size), chunk_loss)
        return loss, tuple(metrics)

    backward = _backward(5, 27)

    @staticmethod
    def chunk_forward(input_chunk, weight, selected_token_ids, bias=None, temperature=1.0):
        """Differentiable log-probabilities [batch, length] of the tokens, without storing the logits of all tokens."""
        weight, bias = (t if t is None else t.to(input_chunk.dtype) for t in (weight, bias))
        return liger_fused_linear_log_probs(input_chunk, weight, selected_token_ids, bias, temperature)

    @staticmethod
    def _compute_dapo_normalizer(attention_mask, num_items_in_batch=None):
        """The denominator of DAPO, CISPO and VESPO: tokens per process, averaged over processes, at least 1.

        num_items_in_batch: the number of tokens of all processes; None sums the masks over torch.distributed
        """
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if num_items_in_batch is not None:
            tokens = on_device(num_items_in_batch, torch.float32, attention_mask.device)
        else:
            tokens = attention_mask.sum(dtype=torch.float32)
            if distributed:
                torch.distributed.all_reduce(tokens)
        return (tokens / (torch.distributed.get_world_size() if distributed else 1)).clamp_min(1.0)


__all__ = [
    "LigerFusedLinearDistillationBase",
    "LigerFusedLinearPPOBase",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearUnpairedPreferenceBase",
]
