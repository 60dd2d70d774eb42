"""Behind `liger_kernel.utils`: the small questions that code written for Liger asks about the machine."""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any, Callable

from ..backends import target_of

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None


def is_peft_available() -> bool:
    return PEFT_AVAILABLE


def is_npu_available() -> bool:
    """Whether torch has an Ascend NPU, which liger_hw has no backend for."""
    return importlib.util.find_spec("torch_npu") is not None


def infer_device() -> str:
    """torch's device type for this machine's accelerator: "cuda" (NVIDIA and AMD), "xpu", or "cpu"."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def infer_comm_backend() -> str:
    """Name of the torch.distributed backend for `infer_device()`."""
    import torch.distributed

    return torch.distributed.get_default_backend_for_device(infer_device())


GENERATIONS = {
    **dict.fromkeys(("sm70", "sm75"), "volta_turing"),
    **dict.fromkeys(("sm80", "sm86", "sm89"), "ampere_ada"),
    "sm90": "hopper",
    "sm100": "blackwell",
    "sm103": "blackwell_ultra",
    "sm120": "blackwell_consumer",
    "gfx908": "cdna",
    "gfx90a": "cdna2",
    **dict.fromkeys(("gfx940", "gfx941", "gfx942"), "cdna3"),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102"), "rdna3"),
    **dict.fromkeys(("acm", "bmg", "lnl"), "arc"),
}
"""`Target.arch` -> Liger's name of the generation."""


@functools.lru_cache(maxsize=None)
def infer_device_arch(device_id: int = 0) -> str:
    """Liger's name of a device's generation, as "hopper", "cdna3" or "pvc".

    A device whose generation has no name gives its architecture: "sm_87", "gfx1201". Where none can be read, as of a
    CPU, it is `infer_device()`.
    """
    import torch

    kind = infer_device()
    try:
        arch = target_of(torch.device(kind, device_id)).arch
    except (RuntimeError, AssertionError, AttributeError, ValueError):  # a driver that does not start, no such backend
        return kind
    return GENERATIONS.get(arch, re.sub("^sm", "sm_", arch))


def get_total_gpu_memory() -> int:
    """Memory of the current accelerator in GiB; 0 without one."""
    import torch

    kind = infer_device()
    return 0 if kind == "cpu" else torch.get_device_module(kind).get_device_properties(0).total_memory >> 30


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable[..., Any],
    after_fn: Callable[..., Any],
    before_args: tuple = (),
    after_args: tuple = (),
    before_kwargs: dict[str, Any] | None = None,
    after_kwargs: dict[str, Any] | None = None,
) -> Any:
    """`before_fn` where transformers is older than `required_version`, else `after_fn`, with that one's arguments."""
    import transformers
    from packaging import version

    if version.parse(transformers.__version__) < version.parse(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
