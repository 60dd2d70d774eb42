"""For `liger_kernel.transformers.trainer`: TRL's ORPO trainer without logits. TRL is imported for the class only."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn

from ..chunked_loss import LigerFusedLinearORPOLoss
from ..distributed.owners import redirected
from ..text import first_line
from ..transformers.deferred import DeferredLogits
from ..transformers.loss import OutputHead, head_path, viewed_with

__all__ = ["LigerORPOTrainer"]  # noqa: F822, by __getattr__
_METRICS = "logps/chosen logps/rejected logits/chosen logits/rejected nll_loss rewards/chosen rewards/rejected".split()
_METRICS += ["log_odds_ratio", "log_odds_chosen"]
"""Names of the loss's metrics, in order."""


class _FusedORPO:
    """The first base class of `LigerORPOTrainer`: computes the loss from hidden states and the head's weight."""

    def concatenated_forward(self: Any, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, tuple]:
        """(loss, metrics) of `LigerFusedLinearORPOLoss`, computed inside the forward of the model's wrapper.

        Raises `ValueError` for an encoder-decoder, a router's loss, and logits that are not just the head's output.
        """
        if self.is_encoder_decoder:
            raise ValueError("LigerORPOTrainer: takes decoders alone; use TRL's ORPOTrainer for an encoder-decoder")
        pad = getattr(self, "label_pad_token_id", -100)
        options = {"label_pad_token_id": pad} if hasattr(self, "label_pad_token_id") else {}  # until TRL 0.24
        options |= {"padding_value": self.padding_value, "device": self.accelerator.device}
        both = self.concatenated_inputs(batch, **options)
        ids, mask, labels = (both[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
        inner = self.accelerator.unwrap_model(model)
        causal = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # of PEFT
        if self.aux_loss_enabled:
            raise ValueError("LigerORPOTrainer: computes no router's loss; use TRL's ORPOTrainer")

        def loss(ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> tuple:
            with self.accelerator.autocast():
                head, hidden = _head_and_hidden(causal, ids, mask)
                fused = LigerFusedLinearORPOLoss(ignore_index=pad, beta=self.beta)
                nll_target = torch.where(mask == 1, ids, pad)[:, 1:]
                return fused(head.weight, hidden[:, :-1], labels[:, 1:], head.bias, nll_target=nll_target)

        return redirected(model, inner, "forward", loss, ids, labels, mask)

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


def _head_and_hidden(causal: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> tuple[nn.Linear, torch.Tensor]:
    """(output head of a causal LM, its input). Raises `ValueError` if the logits are not just the head's output: the
    forward runs with deferred logits, which record operations on them."""
    head = causal.get_output_embeddings()
    if type(head) is nn.Linear:
        view = viewed_with(causal, head_path(causal), OutputHead(head, fused=False))
        logits = type(causal).forward(view, ids, attention_mask=mask, use_cache=False).logits
        recorded = type(logits) is DeferredLogits and logits.is_deferred
        if recorded and logits._scale == 1.0 and logits._cap is None and logits._added is None:
            return head, logits._hidden
    raise ValueError(
        f"LigerORPOTrainer: the logits of {type(causal).__name__} are more than a linear layer of hidden states (an "
        "adapter of the head, a softcap, a scale, a bias of their own); use TRL's ORPOTrainer"
    )


@functools.cache
def _trainer() -> type:
    errors = []
    for name in ("trl.experimental.orpo", "trl.trainer"):
        try:
            base = importlib.import_module(name).ORPOTrainer
        except (ImportError, AttributeError) as error:
            errors.append(first_line(error))
            continue
        return type("LigerORPOTrainer", (_FusedORPO, base), {"__doc__": f"{base.__doc__}", "__module__": __name__})
    raise ImportError(f"LigerORPOTrainer needs TRL's ORPOTrainer (pip install trl): {'; '.join(errors)}")


def __getattr__(name: str) -> Any:
    if name == "LigerORPOTrainer":
        return _trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
