"""Triton, or placeholders with which kernel files can be imported if Triton is not installed or too old.

Without Triton, ops run their references on CPU tensors, and launching a kernel raises (`require`).
"""

from __future__ import annotations

import os
import sys

from .. import env

INTERPRET = env.LIGER_HW_INTERPRET or os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRET and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:  # interpreted kernels could not call its compiled functions
        raise RuntimeError(
            "LIGER_HW_INTERPRET=1 came too late: triton was imported before liger_hw's kernels (transformers does so). "
            "Set TRITON_INTERPRET=1 in the environment before Python starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton.jit when it decorates a kernel


class Placeholder:
    """Replaces a module of Triton, so that annotations such as `tl.constexpr` can be evaluated.

    It has the module's name, so that kernels have the same digests with and without Triton (`ci/kernel_digests.py`).
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    @staticmethod
    def jit(function=None, **_options):
        return function if function is not None else lambda decorated: decorated


try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
        raise ImportError(f"this is {triton.__version__}")
except ImportError as error:
    _reason = str(error)

    triton = Placeholder("triton")
    tl = Placeholder("triton.language")
    libdevice = Placeholder("triton.language.extra.libdevice")
    AVAILABLE = False
else:
    AVAILABLE = True


def require() -> None:
    """Raise `ImportError` with the package to install if kernels cannot be launched."""
    if not AVAILABLE:
        raise ImportError(
            f"liger_hw's kernels need Triton 3.4 or newer ({_reason}). Install the build your torch wheel asks for: "
            "pip install 'liger_hw[cuda]', 'liger_hw[rocm]' or 'liger_hw[xpu]'"
        )
