"""Behind `liger_kernel.transformers.monkey_patch`, after the patch functions: the transformers that they run on."""

from __future__ import annotations

import transformers
from packaging import version

transformer_version = version.parse(transformers.__version__)
IS_TRANSFORMERS_V5_OR_LATER = transformer_version.major >= 5
