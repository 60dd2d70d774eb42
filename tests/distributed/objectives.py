"""A Llama whose forward returns the loss of DPO or GRPO, fused with the output head or in plain torch.

The loss runs inside the model's forward, where engines have gathered the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

BETA = 2.0
OBJECTIVES = ("dpo", "grpo")


class LlamaWithObjective(LlamaForCausalLM):
    """objective: dpo, with the chosen and the rejected answer in neighbouring rows and means over tokens, since
    differences of long sums are inexact; or grpo, with advantages from the rows' first tokens. Without reference models

    fused: use a loss of liger_hw.chunked_loss, or log-probabilities of the tensor-parallel head
    """

    objective = "dpo"
    fused = False

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> CausalLMOutput:
        rows = torch.arange(len(input_ids), device=input_ids.device)
        order = torch.cat((rows[::2], rows[1::2]))
        input_ids, labels = input_ids[order], labels[order]
        hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1]
        target = labels[:, 1:].contiguous()
        advantages = (input_ids[:, 0] % 5 - 2).float()
        if not self.fused:
            logits = self.lm_head(hidden).float()
            return CausalLMOutput(loss=self.from_log_probs(log_probs(logits, target), target, advantages))
        if self.is_split():
            found = split_log_probs(hidden, self.lm_head.weight, target)
            return CausalLMOutput(loss=self.from_log_probs(found, target, advantages))
        from liger_hw.distributed import head_loss

        def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            from liger_hw import chunked_loss

            if self.objective == "dpo":
                dpo = chunked_loss.LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False, average_log_prob=True)
                return dpo(weight, x, target, bias)[0]
            grpo = chunked_loss.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
            return grpo(x, weight, target.clamp_min(0), (target != -100).int(), advantages, bias)[0]

        return CausalLMOutput(loss=head_loss(self.lm_head, hidden, loss))

    def is_split(self) -> bool:
        """Whether the head is tensor parallel. FSDP2's weights are DTensors too, but it gathers them."""
        return type(self.lm_head.weight).__name__ == "DTensor" and not hasattr(self.lm_head, "unshard")

    def from_log_probs(self, logp: torch.Tensor, target: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """The loss, from log-probabilities of targets [rows, tokens], zero for ignored ones."""
        if self.objective == "dpo":
            chosen, rejected = (logp.sum(1) / (target != -100).sum(1)).chunk(2)
            return -F.logsigmoid(BETA * (chosen - rejected)).mean()
        counted = target != -100
        ratio = (logp - logp.detach()).exp()
        return -(ratio * advantages[:, None] * counted).sum() / counted.sum()


def log_probs(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return -nll.view(target.shape)


def split_log_probs(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The log-probabilities by a head whose weight is a DTensor, split by rows."""
    from torch.distributed.tensor import DTensor, Replicate

    from liger_hw.transformers.functional import liger_fused_linear_log_probs

    x = DTensor.from_local(hidden.flatten(0, 1), weight.device_mesh, [Replicate()], run_check=False)
    return liger_fused_linear_log_probs(x, weight, target.flatten()).to_local().view(target.shape)
