"""Post-training losses on a linear head, in chunks: DPO, ORPO, CPO, SimPO, KTO, GRPO, JSD and cosine distillation.

Names, arguments and results are the same as in `liger_kernel.chunked_loss` 0.8.5. docs/losses.md has the formulas, what
each returns, and the few differences.
"""

from __future__ import annotations

from ..lazy import lazy

HOME = {
    "LigerFusedLinearCPOLoss": "liger_hw.chunked_loss.cpo_loss",
    "LigerFusedLinearCosineSimilarityLoss": "liger_hw.chunked_loss.cosine_similarity_loss",
    "LigerFusedLinearDPOLoss": "liger_hw.chunked_loss.dpo_loss",
    "LigerFusedLinearGRPOLoss": "liger_hw.chunked_loss.grpo_loss",
    "LigerFusedLinearJSDLoss": "liger_hw.chunked_loss.jsd_loss",
    "LigerFusedLinearKTOLoss": "liger_hw.chunked_loss.kto_loss",
    "LigerFusedLinearORPOLoss": "liger_hw.chunked_loss.orpo_loss",
    "LigerFusedLinearSimPOLoss": "liger_hw.chunked_loss.simpo_loss",
}
"""Name -> the module that defines it."""

__all__, __getattr__, __dir__ = lazy(__name__, HOME)
