"""The losses of the GRPO family as a function of logits, under Liger's name.

`liger_hw.chunked_loss.LigerFusedLinearGRPOLoss` computes the same from hidden states, without the logits.
"""

from __future__ import annotations

import torch

from ..chunked_loss.grpo_loss import make_policy, policy_tensors, token_shares
from ..kernels.losses.log_prob_rows import LogProbOptions
from ..kernels.losses.log_probs import LogProbsFunction
from ..runtime.operator import check, check_indices, check_tensors

_NAME = "triton_grpo_loss"
_IGNORED = -100


def triton_grpo_loss(
    logits: torch.Tensor,
    old_logp: torch.Tensor | None,
    ref_logp: torch.Tensor | None,
    completion_ids: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: torch.Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: torch.Tensor | int | float | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple:
    """A loss of the GRPO family, by `loss_type`, of logits [batch, length + 1, vocab], whose last position is not used.

    completion_ids: [batch, length]; advantages: [batch] or [batch, length]
    completion_mask: [batch, length], 1 for tokens that count; None: all do
    old_logp, ref_logp: [batch, length], log pi_old (None: the policy's own) and log pi_ref (needed if beta is not 0)
    max_completion_length: divisor of dr_grpo with reduce=True; None: length
    inplace: backward writes the gradient over the logits, which must not be used afterwards
    The other options are LigerFusedLinearGRPOLoss's; chunked_loss/grpo_loss.py has the formulas.

    Returns (losses, KL or None if beta is 0, whether each token was clipped), each fp32 [batch, length] and zero for
    tokens that do not count. With reduce=True: (loss, [KL if beta is not 0, share of clipped tokens]), reduced as
    loss_type defines. Raises `ValueError` for invalid shapes or options.
    """
    check_tensors(_NAME, logits=logits)
    shape = tuple(getattr(completion_ids, "shape", ()))
    if len(shape) != 2 or logits.dim() != 3 or logits.shape[:2] != (shape[0], shape[1] + 1):
        expected = "logits must be [batch, length + 1, vocab] for completion_ids [batch, length]"
        check(False, _NAME, f"{expected}, got {tuple(logits.shape)} and {shape}")
    check_indices(_NAME, "completion_ids", completion_ids, logits[:, :-1])
    if completion_mask is None:
        completion_mask = torch.ones_like(completion_ids)
    if (of_mask := tuple(getattr(completion_mask, "shape", ()))) != shape:
        check(False, _NAME, f"completion_mask must have shape {shape}, got {of_mask}")
    if beta and ref_logp is None:
        check(False, _NAME, f"beta={beta} needs ref_logp; give it, or beta=0.0")
    if max_completion_length is None:
        max_completion_length = shape[1]
    policy = make_policy(
        _NAME,
        loss_type=loss_type,
        temperature=temperature,
        delta=delta,
        importance_sampling_level=importance_sampling_level,
        use_bias_correction_kl=use_bias_correction_kl,
        max_completion_length=max_completion_length if reduce else 1,
        beta=beta,
        epsilon_low=eps_low,
        epsilon_high=eps_high,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
    )
    of_tokens = advantages, old_logp, ref_logp, vllm_is_ratio
    mask, advantages, *others = policy_tensors(_NAME, logits, completion_mask, *of_tokens, loss_type)
    target = torch.full((shape[0], shape[1] + 1), _IGNORED, dtype=torch.int64, device=logits.device)
    target[:, :-1] = completion_ids.masked_fill(~mask, _IGNORED)
    rows = logits.reshape(-1, logits.shape[-1])
    options = LogProbOptions(_IGNORED, float(temperature))
    logp = LogProbsFunction.apply(rows, target.view(-1), options, False, False, inplace)[0]
    logp = logp.view(target.shape)[:, :-1]
    share = token_shares(_NAME, mask, loss_type, max_completion_length, num_items_in_batch, advantages.dtype)
    losses, kl, clipped = policy.terms(logp, advantages, share, *others)
    if reduce:
        loss, *metrics = policy.summary(losses, kl.detach(), clipped, share)
        return loss, metrics
    losses = torch.where(mask, losses, 0.0)
    return losses, torch.where(mask, kl, 0.0).detach() if beta else None, (clipped & mask).to(kl.dtype)
