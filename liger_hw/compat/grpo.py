"""For `liger_kernel.transformers.grpo_loss` and `liger_kernel.ops.grpo_loss`: names besides `triton_grpo_loss`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..chunked_loss.grpo_loss import masked_mean as _masked_mean
from ..chunked_loss.grpo_loss import token_shares
from ..kernels.losses.log_probs import liger_log_probs
from ..transformers.grpo_loss import triton_grpo_loss

_IGNORED = -100
__all__ = ["GrpoLossFunction", "fused_selective_log_softmax", "_masked_mean", "_reduce_grpo_loss"]


@torch.no_grad()
def fused_selective_log_softmax(
    logits: torch.Tensor, input_ids: torch.Tensor, temperature: float = 0.9, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """log softmax(logits / temperature) at each token: fp32 [batch, length], without gradient.

    logits: [batch, length + 1, vocab]; the last position is not read. input_ids, mask: [batch, at least length]; the
    last `length` columns are used. Tokens whose mask is 0 get 0.
    """
    length = logits.shape[1] - 1
    ids = input_ids[:, input_ids.shape[1] - length :]
    if mask is not None:
        ids = ids.masked_fill(mask[:, mask.shape[1] - length :] == 0, _IGNORED)
    target = torch.nn.functional.pad(ids, (0, 1), value=_IGNORED)
    return liger_log_probs(logits, target, temperature, ignore_index=_IGNORED)[:, :-1]


def _reduce_grpo_loss(
    per_token_loss: torch.Tensor,
    completion_mask: torch.Tensor | None,
    loss_type: str,
    max_completion_length: int | None,
    num_items_in_batch: torch.Tensor | int | float | None = None,
) -> torch.Tensor:
    """Reduce losses [batch, length] over tokens whose mask is not 0 to a scalar, as the loss type defines.

    max_completion_length: tokens of a sequence in dr_grpo's denominator (default: `length`)
    """
    mask = torch.ones_like(per_token_loss, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    length = per_token_loss.shape[1] if max_completion_length is None else max_completion_length
    share = token_shares("_reduce_grpo_loss", mask, loss_type, length, num_items_in_batch, per_token_loss.dtype)
    return torch.where(mask, per_token_loss * share, 0.0).sum()


_ARGUMENTS = (*[*inspect.signature(triton_grpo_loss).parameters][:21], "phi_seq")
"""Arguments of Liger's function: as for `triton_grpo_loss`, without VESPO's parameters, then phi_seq."""


class GrpoLossFunction:
    """`triton_grpo_loss` with positional arguments, reduced by default. Returns (loss, KL or None, share of clipped
    tokens). Raises `NotImplementedError` for phi_seq, VESPO's weight of each sequence."""

    @staticmethod
    def apply(*args: Any) -> tuple:
        if len(args) > len(_ARGUMENTS):
            raise TypeError(f"GrpoLossFunction: at most {len(_ARGUMENTS)} arguments, got {len(args)}")
        arguments = {"loss_type": "grpo", "reduce": True, **dict(zip(_ARGUMENTS, args))}
        if arguments.pop("phi_seq", None) is not None:
            raise NotImplementedError("GrpoLossFunction: phi_seq is not supported; call triton_grpo_loss for vespo")
        results = triton_grpo_loss(**arguments)
        if not arguments["reduce"]:
            return results
        loss, (*kl, clipped) = results
        return loss, kl[0] if kl else None, clipped
