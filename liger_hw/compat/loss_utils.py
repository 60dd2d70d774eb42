"""Replaces `liger_kernel.transformers.model.loss_utils`: a causal LM's loss for users' own forwards."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels.losses.cross_entropy import CrossEntropyOutput
from .checked import liger_fused_linear_cross_entropy

_OPTIONS = frozenset(inspect.signature(liger_fused_linear_cross_entropy).parameters)


def LigerForCausalLMLoss(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor | None,
    hidden_size: int,
    num_items_in_batch: torch.Tensor | int | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """The loss of predicting each next token, without storing logits. Unknown keywords are ignored.

    hidden_states: [..., tokens, hidden_size]; labels: [..., tokens], shifted here; shift_labels: labels that are
    shifted already; num_items_in_batch: divides the sum over tokens; None for the mean
    """
    if shift_labels is None:
        shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in _OPTIONS},
    )


def fixed_fused_linear_cross_entropy(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | float | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """Loss of hidden_states [n, hidden] for target [n]: the mean, or the sum divided by num_items_in_batch."""
    result = liger_fused_linear_cross_entropy(
        hidden_states,
        lm_head_weight,
        target,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        accum_dtype=accum_dtype,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )
    loss, _, accuracy, predicted = unpack_cross_entropy_result(result)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    if return_token_accuracy or return_predicted_tokens:
        return CrossEntropyOutput(loss=loss, token_accuracy=accuracy, predicted_tokens=predicted)
    return loss


def unpack_cross_entropy_result(result: Any) -> tuple:
    """(loss, z_loss, token_accuracy, predicted_tokens) of a cross entropy's result, None for missing values."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    values = result if isinstance(result, tuple) else (result,)
    return (*values, None, None, None)[:4]
