"""The layers of liger_hw for the `kernels` package, which loads this folder; `pip install liger_hw` has the kernels."""

from . import layers

__all__ = ["layers"]
