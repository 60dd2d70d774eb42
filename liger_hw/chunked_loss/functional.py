"""The chunked losses as functions, under Liger's names: each is `<Loss>Function.apply`."""

from __future__ import annotations

from .distillation import LigerFusedLinearCosineSimilarityFunction, LigerFusedLinearJSDFunction
from .dpo_loss import LigerFusedLinearDPOFunction
from .grpo_loss import LigerFusedLinearGRPOFunction
from .kto_loss import LigerFusedLinearKTOFunction
from .preference import LigerFusedLinearCPOFunction, LigerFusedLinearORPOFunction, LigerFusedLinearSimPOFunction

liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply
liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
