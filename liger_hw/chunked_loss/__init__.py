"""Post-training losses on a linear head, in chunks: DPO, ORPO, CPO, SimPO, KTO, GRPO, JSD and cosine distillation.

The names, arguments and results are those of `liger_kernel.chunked_loss` 0.8.5. docs/losses.md has the formulas, what
each returns, and the few differences.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "LigerFusedLinearCPOLoss": "cpo_loss",
    "LigerFusedLinearCosineSimilarityLoss": "cosine_similarity_loss",
    "LigerFusedLinearDPOLoss": "dpo_loss",
    "LigerFusedLinearGRPOLoss": "grpo_loss",
    "LigerFusedLinearJSDLoss": "jsd_loss",
    "LigerFusedLinearKTOLoss": "kto_loss",
    "LigerFusedLinearORPOLoss": "orpo_loss",
    "LigerFusedLinearSimPOLoss": "simpo_loss",
}
"""Name -> the file of this folder that defines it."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOME)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
