"""Behind `liger_kernel.utils`: the small questions that code written for Liger asks about the machine."""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any, Callable

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
    return {"cuda": "nccl", "xpu": "xccl"}.get(infer_device(), "gloo")


GENERATIONS = {
    **dict.fromkeys(((7, 0), (7, 5)), "volta_turing"),
    **dict.fromkeys(((8, 0), (8, 6), (8, 9)), "ampere_ada"),
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell_ultra",
    (12, 0): "blackwell_consumer",
    "gfx908": "cdna",
    "gfx90a": "cdna2",
    **dict.fromkeys(("gfx940", "gfx941", "gfx942"), "cdna3"),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102"), "rdna3"),
}
"""Compute capability of an NVIDIA device, or target of an AMD device -> Liger's name of its generation."""


def _infer_nvidia_arch(device_id: int) -> str:
    """A generation, or as "sm_87" where it has no name."""
    import torch

    major, minor = torch.cuda.get_device_capability(device_id)
    return GENERATIONS.get((major, minor), f"sm_{major}{minor}")


def _infer_amd_arch(device_id: int) -> str:
    """A generation, or the target, as "gfx1201", where it has no name."""
    import torch

    full = getattr(torch.cuda.get_device_properties(device_id), "gcnArchName", "")
    target = full.partition(":")[0] or "cuda"
    return GENERATIONS.get(target, target)


def _infer_xpu_arch(device_id: int) -> str:
    """Data Center GPU Max is "pvc", Arc is "arc", another Intel GPU "xpu"."""
    import torch

    name = torch.xpu.get_device_properties(device_id).name
    return "pvc" if "Max" in name else "arc" if "Arc" in name else "xpu"


def _infer_npu_arch(device_id: int) -> str:
    """ "ascend910", "ascend310", or "npu" for another Ascend NPU."""
    import torch

    series = re.search("910|310", torch.npu.get_device_properties(device_id).name)  # type: ignore[attr-defined]
    return f"ascend{series[0]}" if series else "npu"


@functools.lru_cache(maxsize=None)
def infer_device_arch(device_id: int = 0) -> str:
    """Liger's name of a device's generation, as "hopper", "cdna3" or "pvc".

    A device whose generation has no name gives its architecture: "sm_87", "gfx1201". What cannot be asked, as a CPU,
    gives `infer_device()`.
    """
    import torch

    kind = infer_device()
    asked = {
        "cuda": _infer_amd_arch if torch.version.hip else _infer_nvidia_arch,
        "xpu": _infer_xpu_arch,
        "npu": _infer_npu_arch,
    }.get(kind)
    if asked is None:
        return kind
    try:
        return asked(device_id)
    except (RuntimeError, AssertionError, AttributeError):  # a driver that does not start, a torch without the device
        return kind


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
