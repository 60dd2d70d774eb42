"""Liger Kernel's names for liger_hw's kernels; see liger_hw/compat. `liger-hw shim` prints this package's folder."""

import sys

from liger_hw import compat

compat.take_the_name(sys.modules[__name__])
