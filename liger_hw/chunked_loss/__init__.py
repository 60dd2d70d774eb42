"""Post-training losses on a linear head, in chunks: DPO, ORPO, CPO, SimPO, KTO, GRPO, JSD and cosine distillation.

Names, arguments and results are the same as in `liger_kernel.chunked_loss` 0.8.5. docs/losses.md has the formulas, the
results and the few differences.
"""

from __future__ import annotations

from ..lazy import lazy

HOME = {
    "LigerFusedLinearCPOLoss": "liger_hw.chunked_loss.preference",
    "LigerFusedLinearCosineSimilarityLoss": "liger_hw.chunked_loss.distillation",
    "LigerFusedLinearDPOLoss": "liger_hw.chunked_loss.dpo_loss",
    "LigerFusedLinearGRPOLoss": "liger_hw.chunked_loss.grpo_loss",
    "LigerFusedLinearJSDLoss": "liger_hw.chunked_loss.distillation",
    "LigerFusedLinearKTOLoss": "liger_hw.chunked_loss.kto_loss",
    "LigerFusedLinearORPOLoss": "liger_hw.chunked_loss.preference",
    "LigerFusedLinearSimPOLoss": "liger_hw.chunked_loss.preference",
}
"""Name -> the module that defines it."""

__all__, __getattr__, __dir__ = lazy(__name__, HOME)
