# Made by `python ci/stubs.py`; do not edit.
from liger_hw.chunked_loss.distillation import (
    LigerFusedLinearCosineSimilarityLoss as LigerFusedLinearCosineSimilarityLoss,
)
from liger_hw.chunked_loss.distillation import LigerFusedLinearJSDLoss as LigerFusedLinearJSDLoss
from liger_hw.chunked_loss.dpo_loss import LigerFusedLinearDPOLoss as LigerFusedLinearDPOLoss
from liger_hw.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss as LigerFusedLinearGRPOLoss
from liger_hw.chunked_loss.kto_loss import LigerFusedLinearKTOLoss as LigerFusedLinearKTOLoss
from liger_hw.chunked_loss.preference import LigerFusedLinearCPOLoss as LigerFusedLinearCPOLoss
from liger_hw.chunked_loss.preference import LigerFusedLinearORPOLoss as LigerFusedLinearORPOLoss
from liger_hw.chunked_loss.preference import LigerFusedLinearSimPOLoss as LigerFusedLinearSimPOLoss
