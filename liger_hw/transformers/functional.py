"""The kernels as functions, under the names and with the arguments of Liger 0.8.5.

Importing this module loads no kernel. liger_hw/kernels has a module for each.
"""

from __future__ import annotations

from ..kernels import EXPORTS
from ..lazy import lazy

HOME = {
    f"liger_{module.rpartition('.')[2]}": f"liger_hw.kernels.{module}" for module, names in EXPORTS.items() if names
}
HOME |= {
    n: f"liger_hw.kernels.{module}" for module, names in EXPORTS.items() for n in names if n.endswith(("Output", "_tp"))
}
"""Name -> the module that defines it."""

__all__, __getattr__, __dir__ = lazy(__name__, HOME)
