"""GRPO and its relatives on a linear head: see policy.py for the formulas, log_prob_loss.py for the chunks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.heads.head_inputs import checked_head
from ..runtime.operator import check, check_flags, check_indices
from .checks import HEAD, SEQUENCES, LossFunction, LossModule, checked_reference
from .log_prob_loss import SEQUENCE, TOKEN, Spec, run_loss, token_logps
from .policy import (  # noqa: F401  the four functions are Liger's names too
    Policy,
    clip_coef_fn,
    get_gamma_weights,
    k3_loss_fn,
    make_policy,
    policy_tensors,
    sapo_loss_fn,
    token_shares,
)
from .preference import Output

_NAME = "liger_fused_linear_grpo"
_IGNORED = -100


class LigerFusedLinearGRPOFunction(LossFunction):
    """`LigerFusedLinearGRPOLoss` as a function, with Liger's order of arguments."""

    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        selected_token_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        advantages: torch.Tensor,
        bias: torch.Tensor | None = None,
        ref_per_token_logps: torch.Tensor | None = None,
        old_per_token_logps: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        beta: float = 0.04,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        vllm_is_ratio: torch.Tensor | None = None,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        num_items_in_batch: torch.Tensor | int | float | None = None,
    ) -> Output:
        policy = checked_policy(
            use_ref_model,
            loss_type=loss_type,
            temperature=temperature,
            importance_sampling_level=importance_sampling_level,
            max_completion_length=max_completion_length,
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            beta=beta,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
        )
        x, weight, bias = checked_head(_NAME, _input, weight, bias, HEAD, SEQUENCES)
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
            ref = checked_reference(_NAME, ref_input, ref_weight, ref_bias, x)
            ref_per_token_logps = token_logps(*ref, target, _IGNORED, float(temperature))
        elif use_ref_model and ref_per_token_logps is not None and ref_input is not None:
            warnings.warn(f"{_NAME}: Using ref_per_token_logps; ref_input is given too and not read", stacklevel=2)
        if not use_ref_model:
            ref_per_token_logps = None
        of_tokens = advantages, old_per_token_logps, ref_per_token_logps, vllm_is_ratio
        mask, *tensors = policy_tensors(_NAME, x, attention_mask, *of_tokens, loss_type)
        share = token_shares(_NAME, mask, loss_type, max_completion_length, num_items_in_batch, tensors[0].dtype)
        extras = [tensors[0], share, *tensors[1:]]
        alone = importance_sampling_level == "token" and loss_type != "vespo"  # each token's slope is its own matter
        if alone:
            extras = [None if t is None else t.expand(mask.shape).reshape(-1, 1) for t in extras]
        group = TOKEN if alone else SEQUENCE
        _, *numbers = policy
        spec = Spec("policy", loss_type, tuple(numbers), group, len(extras), _IGNORED, float(temperature))
        loss, *metrics = run_loss(x, weight, bias, target, spec, extras)
        return loss, tuple(metrics)


def checked_policy(use_ref_model: bool, **options: Any) -> Policy:
    """The Policy of the options; raises where they make no sense."""
    check_flags(_NAME, use_ref_model=use_ref_model)
    return make_policy(_NAME, **options)


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(LossModule):
    """GRPO and its relatives on a linear head.

    loss_type, beta, epsilon_low, epsilon_high, delta, use_bias_correction_kl, sapo_temperature_*, vespo_*: see
    policy.py; max_completion_length: dr_grpo's denominator; importance_sampling_level: token or sequence; temperature:
    divides the logits.
    """

    function = LigerFusedLinearGRPOFunction

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

    def check(self) -> None:
        """Whether the loss type goes with sequence-level sampling is asked at the call, as in Liger."""
        options = self.options()
        if options["importance_sampling_level"] == "sequence":
            options["importance_sampling_level"] = "token"
        checked_policy(**options)

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
        [vocab]; ref_input, ref_weight, ref_bias: the reference model's head in place of its log-probabilities
        (with both, these are taken, with a warning);
        vllm_is_ratio: [batch], [batch, 1] or [batch, length]; num_items_in_batch: dapo's, cispo's and vespo's
        denominator.

        Returns (loss, (KL with beta, share of clipped tokens)), all fp32.
        """
        tensors = _input, lin_weight, selected_token_ids, attention_mask, advantages, bias
        reference = ref_per_token_logps, old_per_token_logps, ref_input, ref_weight, ref_bias
        counts = {"vllm_is_ratio": vllm_is_ratio, "num_items_in_batch": num_items_in_batch}
        return self.function.apply(*tensors, *reference, **counts, **self.options())
