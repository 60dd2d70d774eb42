"""liger_hw: Triton kernels for training language models, the same on NVIDIA, AMD and Intel GPUs.

    from liger_hw.transformers import apply_liger_kernel_to_mistral
    apply_liger_kernel_to_mistral()

Importing this package imports neither triton nor transformers and touches no GPU.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"
