"""Training on many devices: the same kernels on every rank, and losses with sharded weights.

liger_hw.distributed.sync()      # after init_process_group, before the first step
"""

from __future__ import annotations

from ..lazy import lazy

HOME = dict.fromkeys(("sync", "digest", "facts_of"), "liger_hw.distributed.agreement")
HOME["head_loss"] = "liger_hw.distributed.owners"
"""Public name -> module that defines it."""

__all__, __getattr__, __dir__ = lazy(__name__, HOME)
