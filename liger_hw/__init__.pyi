# Made by `python ci/stubs.py`; do not edit.
from liger_hw import autotune as autotune
from liger_hw import backends as backends
from liger_hw import bench as bench
from liger_hw import chunked_loss as chunked_loss
from liger_hw import distributed as distributed
from liger_hw import env as env
from liger_hw import hub as hub
from liger_hw import kernels as kernels
from liger_hw import recompute as recompute
from liger_hw import registry as registry
from liger_hw import transformers as transformers
from liger_hw import trl as trl
from liger_hw.backends.base import LaunchConfig as LaunchConfig
from liger_hw.backends.base import Target as Target
from liger_hw.hub import kernel_config as kernel_config
from liger_hw.kernels.heads.linear_head import CountedRows as CountedRows
from liger_hw.recompute.dial import activations as activations
from liger_hw.registry import explain as explain
from liger_hw.registry import override as override
from liger_hw.registry import pretend as pretend
from liger_hw.registry import set_deterministic as set_deterministic
from liger_hw.transformers.apply import patch as patch
from liger_hw.transformers.float8_linears import float8 as float8
from liger_hw.transformers.report import revert as revert

__version__: str
