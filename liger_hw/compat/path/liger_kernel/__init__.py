"""Liger Kernel's name on liger_hw's kernels; see liger_hw/compat. On the path only where `liger-hw shim` put it."""

import sys

from liger_hw import compat

compat.take_the_name(sys.modules[__name__])
