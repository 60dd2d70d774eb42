"""GRPO and its relatives on a linear head. `triton_grpo_loss` takes the loss of token log-probabilities from here.

With A the advantage and w = exp(log pi - log pi_old) of a token (with sequence-level importance sampling: exp of its
mean over the sequence), a token's loss is

    grpo, bnpo, dr_grpo, dapo, luspo   -min(min(w, delta) A, clip(w, 1 - eps_low, 1 + eps_high) A)
    cispo                              -stop(min(w, eps_high)) A log pi
    sapo                               -4 / t sigmoid(t (w - 1)) A,  t for positive or negative advantages
    vespo                              -stop(phi(W)) A log pi,  phi(W) = exp(lambda + k log W - lambda W),
                                       W of the sequence

times vllm_is_ratio (which vespo has in W instead), plus beta KL, where KL = exp(d) - d - 1, d = log pi_ref - log pi,
times w with use_bias_correction_kl. The sum over tokens whose mask is not 0 is divided by the number of

    grpo, sapo           tokens of the sequence, times sequences
    bnpo                 tokens
    luspo                sequences
    dapo, cispo, vespo   num_items_in_batch, or tokens
    dr_grpo              sequences times max_completion_length

Sources: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, CISPO 2506.13585, GSPO (sequence level) 2507.18071, SAPO
2511.20347, two-sided clipping (delta) 2505.07291, LUSPO 2602.05261 (arXiv); LUSPO and VESPO as TRL 1.16 computes them.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..kernels.heads.linear_head import checked_head
from ..runtime.operator import check, check_flags, check_floats, check_indices
from .checks import HEAD, SEQUENCES, LossModule, function_of, on_device
from .log_prob_loss import LOSSES, SEQUENCE, TOKEN, LossInputs, Spec, reference_logps, run_loss
from .preference import Output

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def k3_loss_fn(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(q || p) from samples of q: exp(d) - d - 1 with d = log_p - log_q, never negative."""
    difference = log_p - log_q
    return torch.exp(difference) - difference - 1.0


def clip_coef_fn(coef: torch.Tensor, epsilon_low: float, epsilon_high: float, loss_type: str):
    """(clipped ratio, whether it was below the range, whether above); None as the ratio for sapo and vespo."""
    if loss_type == "cispo":
        return coef.clamp(max=epsilon_high).detach(), False, coef > epsilon_high
    if loss_type in ("sapo", "vespo"):
        never = torch.zeros_like(coef, dtype=torch.bool)
        return None, never, never
    low, high = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(low, high), coef < low, coef > high


def sapo_loss_fn(importance_ratio: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """SAPO's soft gate 4 / t sigmoid(t (ratio - 1)); temperature: a number, or one for each ratio."""
    if not isinstance(temperature, torch.Tensor):
        check(temperature > 0, "sapo_loss_fn", f"temperature must be positive, got {temperature}")
    return torch.sigmoid(temperature * (importance_ratio - 1)) * 4 / temperature


@torch.no_grad()
def get_gamma_weights(
    advantages: torch.Tensor,
    log_ratio_per_token: torch.Tensor,
    mask: torch.Tensor,
    importance_sampling_ratio: torch.Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> torch.Tensor:
    """VESPO's phi(W) [batch, 1], or [batch, length] for advantages of that shape, without gradient.

    advantages: [batch] or [batch, length]; log_ratio_per_token, mask: [batch, length]; importance_sampling_ratio:
    [batch, 1] or [batch, length]. Log-ratios are clamped to -20..20 and log W to log(1e-8)..20.
    """
    lowest = math.log(1e-8)
    log_w = (log_ratio_per_token.clamp(-20.0, 20.0) * mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        log_w = log_w + importance_sampling_ratio.log().clamp(lowest, 20.0).sum(-1, keepdim=True)
    log_w = log_w.clamp(lowest, 20.0)
    positive = (advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)) >= 0
    k = _where(positive, k_pos, k_neg, log_w)
    rate = _where(positive, max(lambda_pos, 1e-4), max(lambda_neg, 1e-4), log_w)
    phi = torch.exp(rate + k * log_w - rate * log_w.exp())
    return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _where(condition: torch.Tensor, one: float, other: float, like: torch.Tensor) -> torch.Tensor:
    """torch.where of two numbers in the dtype of `like`. torch.where itself would round them to fp32."""
    return torch.full(condition.shape, other, dtype=like.dtype, device=like.device).masked_fill_(condition, one)


class Policy(NamedTuple):
    """The GRPO family. kind: the loss type; delta: inf for none.

    LossInputs.grouped, each [groups, tokens of a group] or [groups, 1]: advantages; share, the factor of each token's
    loss, zero for masked tokens; log pi_old, log pi_ref and vllm_is_ratio, None if absent.
    """

    kind: str
    beta: float
    epsilon_low: float
    epsilon_high: float
    delta: float
    by_sequence: float
    use_bias_correction_kl: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float

    sums_logits = False

    def terms(self, logp: torch.Tensor, advantages, share, old, ref, vllm) -> tuple[torch.Tensor, ...]:
        """(loss [groups, tokens], KL [groups, tokens], whether w was clipped [groups, tokens or 1])"""
        mask = share != 0
        log_ratio = logp - (logp.detach() if old is None else old)
        log_w = log_ratio
        if self.by_sequence:
            log_w = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
        ratio = torch.exp(log_w)
        clipped, low, high = clip_coef_fn(ratio, self.epsilon_low, self.epsilon_high, self.kind)
        was_clipped = (low & (advantages < 0)) | (high & (advantages > 0))
        if self.kind == "cispo":
            losses = -clipped * advantages * logp
        elif self.kind == "sapo":
            temperature = _where(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg, advantages)
            losses = -sapo_loss_fn(ratio, temperature) * advantages
        elif self.kind == "vespo":
            rates = self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg
            losses = -get_gamma_weights(advantages, log_ratio, mask, vllm, *rates) * advantages * logp
        else:
            bounded = ratio if math.isinf(self.delta) else ratio.clamp(max=self.delta)
            losses = -torch.minimum(bounded * advantages, clipped * advantages)
        if vllm is not None and self.kind != "vespo":
            losses = losses * vllm
        kl = torch.zeros_like(logp)
        if self.beta:
            kl = k3_loss_fn(logp.detach() if ref is None else ref, logp)
            if self.use_bias_correction_kl:
                kl = kl * ratio
            losses = losses + self.beta * kl
        return losses, kl, was_clipped

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        losses, _, _ = self.terms(inputs.logp, *inputs.grouped)
        return masked_sum(losses, inputs.grouped[1])

    def results(self, inputs: LossInputs) -> tuple[torch.Tensor, ...]:
        return self.summary(*self.terms(inputs.logp, *inputs.grouped), inputs.grouped[1])

    def summary(self, losses: torch.Tensor, kl: torch.Tensor, clipped: torch.Tensor, share: torch.Tensor) -> tuple:
        """From the results of `terms`: (loss, mean KL if beta is not 0, fraction of clipped tokens or sequences)."""
        mask, loss = share != 0, masked_sum(losses, share)
        clipped = clipped.to(kl.dtype)
        by_sequence = self.by_sequence and clipped.shape[1] == 1
        clipped = clipped.mean() if by_sequence else masked_mean(clipped, mask)
        return (loss, masked_mean(kl, mask), clipped) if self.beta else (loss, clipped)


LOSSES["policy"] = Policy


def masked_sum(losses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return torch.where(share != 0, losses * share, 0.0).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def token_shares(
    op: str, mask: torch.Tensor, kind: str, max_completion_length: int | None, num_items, dtype
) -> torch.Tensor:
    """The factor of each token's loss [batch, length]: 1 / the loss type's denominator, zero for masked tokens."""
    counted = mask.to(dtype)
    batch = mask.shape[0]
    if kind in ("grpo", "sapo"):
        return counted / (counted.sum(-1, keepdim=True).clamp_min(1) * batch)
    if kind == "luspo":
        return counted / batch
    if kind == "dr_grpo":
        return counted / (batch * max_completion_length)
    if num_items is None or kind == "bnpo":
        items = counted.sum()
    else:
        check_floats(op, num_items_in_batch=num_items)
        items = on_device(num_items, dtype, mask.device)
    return counted / items.clamp_min(1)


def make_policy(
    op: str,
    *,
    loss_type: str,
    temperature: float,
    delta: float | None,
    importance_sampling_level: str,
    use_bias_correction_kl: bool,
    max_completion_length: int | None,
    **numbers: float,
) -> Policy:
    """The Policy of the public options. numbers: the other fields of Policy.

    Raises `TypeError` for an option of another type, `ValueError` for an invalid one.
    """
    numbers["delta"] = math.inf if delta is None else delta
    check_floats(op, temperature=temperature, **numbers)
    check_flags(op, use_bias_correction_kl=use_bias_correction_kl)
    check(0.0 < temperature < math.inf, op, f"temperature must be positive and finite, got {temperature}")
    check(loss_type in LOSS_TYPES, op, f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")
    level = importance_sampling_level
    check(level in ("token", "sequence"), op, f"importance_sampling_level must be token or sequence, got {level!r}")
    if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        expected = f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}"
        check(False, op, f"{expected}; use importance_sampling_level='token'")
    if max_completion_length is not None:
        check_floats(op, max_completion_length=max_completion_length)
    if loss_type == "dr_grpo" and not (max_completion_length is not None and max_completion_length > 0):
        check(False, op, f"loss_type='dr_grpo' divides by max_completion_length: give it, got {max_completion_length}")
    if loss_type == "sapo":
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            check(numbers[name] > 0, op, f"{name} must be positive, got {numbers[name]}")
    elif loss_type not in ("cispo", "vespo"):
        check(numbers["delta"] > 0, op, f"delta must be positive, or None, got {delta}")
    numbers |= {"by_sequence": level == "sequence", "use_bias_correction_kl": bool(use_bias_correction_kl)}
    return Policy(loss_type, **{name: float(value) for name, value in numbers.items()})


def policy_tensors(op, x_like, mask, advantages, old_logps, ref_logps, vllm_is_ratio, kind) -> tuple:
    """(mask [batch, length] bool, advantages, old, ref and vllm [batch, length] or [batch, 1]): checked, detached, and
    filled with neutral values where the mask is 0. x_like: a tensor of the call's device and dtype."""
    wide = torch.promote_types(x_like.dtype, torch.float32)
    shape = tuple(mask.shape)
    mask = mask != 0

    def rows(name, t, *shapes):
        if t is None:
            return None
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if tuple(t.shape) not in shapes:
            expected = " or ".join(str(s) for s in shapes)
            check(False, op, f"{name} must have shape {expected}, got {tuple(t.shape)}")
        if t.device != x_like.device:
            check(False, op, f"{name} is on {t.device} but the rest is on {x_like.device}; move them to one device")
        return t.detach().to(wide)

    batch = shape[:1]
    if advantages is None:
        raise TypeError(f"{op}: advantages must be a tensor, got NoneType")
    advantages = rows("advantages", advantages, batch, shape, (*batch, 1))
    old, ref = rows("old_per_token_logps", old_logps, shape), rows("ref_per_token_logps", ref_logps, shape)
    vllm = rows("vllm_is_ratio", vllm_is_ratio, batch, (*batch, 1), shape)
    advantages, vllm = (t.unsqueeze(1) if t is not None and t.dim() == 1 else t for t in (advantages, vllm))
    old, ref = (None if t is None else t.masked_fill(~mask, 0.0) for t in (old, ref))
    if advantages.shape == mask.shape:
        advantages = advantages.masked_fill(~mask, 0.0)
    if vllm is not None and kind != "vespo" and vllm.shape == mask.shape:
        vllm = vllm.masked_fill(~mask, 1.0)
    return mask, advantages, old, ref, vllm


# -- on a linear head ------------------------------------------------------------------------------------------------

_NAME = "liger_fused_linear_grpo"
_IGNORED = -100


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(LossModule):
    """GRPO and its relatives on a linear head.

    loss_type: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo or vespo; beta: the KL term's weight; epsilon_low,
    epsilon_high, delta: bounds of the probability ratio; max_completion_length: dr_grpo's denominator;
    importance_sampling_level: token or sequence; temperature: divides the logits.
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def policy(self, level: str) -> Policy:
        """The Policy of the options with importance_sampling_level=level. Raises if they are invalid."""
        options = self.options() | {"importance_sampling_level": level}
        check_flags(_NAME, use_ref_model=options.pop("use_ref_model"))
        return make_policy(_NAME, **options)

    def check(self) -> None:
        """Liger rejects a loss type without sequence-level sampling only in forward, and so does this class."""
        level = self.importance_sampling_level
        self.policy("token" if level == "sequence" else level)

    def forward(
        self,
        _input: torch.Tensor,
        lin_weight: torch.Tensor,
        selected_token_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        advantages: torch.Tensor,
        bias: torch.Tensor | None = None,
        ref_per_token_logps: torch.Tensor | None = None,
        old_per_token_logps: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        vllm_is_ratio: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | float | None = None,
    ) -> Output:
        """_input: [batch, length, hidden]; lin_weight: [vocab, hidden]; selected_token_ids, attention_mask,
        ref_per_token_logps, old_per_token_logps: [batch, length]; advantages: [batch] or [batch, length]; bias:
        [vocab]; ref_input, ref_weight, ref_bias: the reference model's head, ignored with ref_per_token_logps;
        vllm_is_ratio: [batch], [batch, 1] or [batch, length]; num_items_in_batch: dapo's, cispo's and vespo's
        denominator.

        Returns (loss, (KL with beta, share of clipped tokens)), all fp32.
        """
        policy, use_ref_model = self.policy(self.importance_sampling_level), self.use_ref_model
        temperature = float(self.temperature)
        x, weight, bias = checked_head(_NAME, _input, lin_weight, bias, HEAD, SEQUENCES)
        check_indices(_NAME, "selected_token_ids", selected_token_ids, x)
        ids = selected_token_ids
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape:
            got = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
            check(False, _NAME, f"attention_mask must be a tensor of shape {tuple(ids.shape)}, got {got}")
        target = ids.masked_fill(attention_mask == 0, _IGNORED)
        if use_ref_model and policy.beta and ref_per_token_logps is None:
            if ref_input is None:
                expected = "use_ref_model=True with beta needs ref_per_token_logps, or ref_input and ref_weight"
                check(False, _NAME, f"{expected}; give them, or use_ref_model=False or beta=0.0")
            ref = ref_input, ref_weight, ref_bias
            ref_per_token_logps = reference_logps(_NAME, *ref, x, target, _IGNORED, temperature)
        elif use_ref_model and ref_per_token_logps is not None and ref_input is not None:
            warnings.warn(f"{_NAME}: Using ref_per_token_logps; ref_input is given too and not read", stacklevel=2)
        if not use_ref_model:
            ref_per_token_logps = None
        tensors = advantages, old_per_token_logps, ref_per_token_logps, vllm_is_ratio
        mask, advantages, *others = policy_tensors(_NAME, x, attention_mask, *tensors, policy.kind)
        max_length, dtype = self.max_completion_length, advantages.dtype
        share = token_shares(_NAME, mask, policy.kind, max_length, num_items_in_batch, dtype)
        extras = [advantages, share, *others]
        by_token = not policy.by_sequence and policy.kind != "vespo"  # a token's gradient depends on no other token
        if by_token:
            extras = [None if t is None else t.expand(mask.shape).reshape(-1, 1) for t in extras]
        group = TOKEN if by_token else SEQUENCE
        kind, *numbers = policy
        spec = Spec("policy", kind, tuple(numbers), group, len(extras), _IGNORED, temperature)
        loss, *metrics = run_loss(x, weight, bias, target, spec, extras)
        return loss, tuple(metrics)


LigerFusedLinearGRPOFunction = function_of(
    LigerFusedLinearGRPOLoss,
    "_input weight selected_token_ids attention_mask advantages",
    "bias ref_per_token_logps old_per_token_logps ref_input ref_weight ref_bias beta epsilon_low epsilon_high "
    "loss_type max_completion_length importance_sampling_level sapo_temperature_pos sapo_temperature_neg temperature "
    "compiled use_ref_model chunk_size vllm_is_ratio delta use_bias_correction_kl vespo_k_pos vespo_lambda_pos "
    "vespo_k_neg vespo_lambda_neg num_items_in_batch",
)
