"""Behind `liger_kernel.transformers.trainer`: TRL's ORPO trainer without logits. TRL is imported for it alone."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from ..chunked_loss import LigerFusedLinearORPOLoss
from .fsdp import redirected

__all__ = ["LigerORPOTrainer"]  # noqa: F822, by __getattr__
_METRICS = (
    *("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "nll_loss"),
    *("rewards/chosen", "rewards/rejected", "log_odds_ratio", "log_odds_chosen"),
)
"""Names of what the loss returns beside itself, in its order."""
_SCALES = "final_logit_softcapping", "logit_scale", "logits_scaling"
"""What configurations say of logits that are more than the head's product."""


class _FusedORPO:
    """What `LigerORPOTrainer` has before TRL's class: the loss from hidden states and the head's weight."""

    def concatenated_forward(self: Any, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, tuple]:
        """(loss, what `LigerFusedLinearORPOLoss` returns beside it) of a batch of TRL's.

        The model runs inside the forward of whatever wraps it (DDP, FSDP, DeepSpeed). Raises `ValueError` for a head
        that is more than a linear layer, and for a router's loss, which is a part of the whole model's forward.
        """
        pad = getattr(self, "label_pad_token_id", -100)
        options = {"label_pad_token_id": pad} if hasattr(self, "label_pad_token_id") else {}  # until TRL 0.24
        options |= {"is_encoder_decoder": self.is_encoder_decoder, "padding_value": self.padding_value}
        both = self.concatenated_inputs(batch, device=self.accelerator.device, **options)
        ids, mask, labels = (both[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
        inner = self.accelerator.unwrap_model(model)
        causal = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # of PEFT
        scales = (getattr(causal.config, name, None) for name in _SCALES)
        head = causal.get_output_embeddings()
        if self.aux_loss_enabled or type(head) is not torch.nn.Linear or any(x not in (None, 1) for x in scales):
            raise ValueError(
                f"LigerORPOTrainer: {type(causal).__name__} has a router's loss, or a head that is more than a linear "
                "layer (an adapter, a softcap, a scale); use TRL's ORPOTrainer"
            )

        def loss(ids: torch.Tensor, nll_labels: torch.Tensor, labels: torch.Tensor, **inputs: Any) -> tuple:
            with self.accelerator.autocast():
                hidden = causal.base_model(ids, use_cache=False, **inputs).last_hidden_state
                if not self.is_encoder_decoder:
                    hidden, labels, nll_labels = hidden[:, :-1], labels[:, 1:], nll_labels[:, 1:]
                fused = LigerFusedLinearORPOLoss(ignore_index=pad, beta=self.beta)
                return fused(head.weight, hidden, labels, head.bias, nll_target=nll_labels)

        if self.is_encoder_decoder:
            decoder = {"decoder_input_ids": self._shift_right(labels)}
            return redirected(model, inner, loss, ids, labels, labels, attention_mask=mask, **decoder)
        return redirected(model, inner, loss, ids, torch.where(mask == 1, ids, pad), labels, attention_mask=mask)

    def get_batch_loss_metrics(
        self: Any, model: Any, batch: dict[str, Any], train_eval: str = "train"
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """(loss, TRL's metrics, their means over all ranks)."""
        loss, aux = self.concatenated_forward(model, batch)
        values = dict(zip(_METRICS, (value.detach().float() for value in aux)))
        chosen, rejected = values["rewards/chosen"], values["rewards/rejected"]
        values |= {"rewards/accuracies": (chosen > rejected).float(), "rewards/margins": chosen - rejected}
        means = self.accelerator.reduce(torch.stack([value.mean() for value in values.values()]), "mean").tolist()
        prefix = "eval_" if train_eval == "eval" else ""
        return loss, {f"{prefix}{name}": mean for name, mean in zip(values, means)}


@functools.cache
def _trainer() -> type:
    for name in ("trl.experimental.orpo", "trl.trainer"):
        try:
            base = importlib.import_module(name).ORPOTrainer
        except (ImportError, AttributeError):
            continue
        return type("LigerORPOTrainer", (_FusedORPO, base), {"__doc__": f"{base.__doc__}", "__module__": __name__})
    raise ImportError("LigerORPOTrainer is a trainer of TRL's: pip install trl")


def __getattr__(name: str) -> Any:
    if name == "LigerORPOTrainer":
        return _trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
