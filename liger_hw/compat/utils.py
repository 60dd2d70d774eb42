"""For `liger_kernel.utils` and `liger_kernel.ops.utils`: helpers for programs that define kernels."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import nullcontext
from typing import Any, Callable

import torch
from packaging import version

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None


def is_peft_available() -> bool:
    return PEFT_AVAILABLE


def is_npu_available() -> bool:
    """Whether torch has an Ascend NPU."""
    return importlib.util.find_spec("torch_npu") is not None


def is_hip() -> bool:
    """Whether this torch is built for ROCm."""
    return torch.version.hip is not None


def infer_device() -> str:
    """torch's device type of this machine's accelerator: "cuda" (NVIDIA and AMD), "xpu", or "cpu" without one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def infer_comm_backend() -> str:
    """Name of the torch.distributed backend for `infer_device()`."""
    return torch.distributed.get_default_backend_for_device(infer_device())


def device_context(device: torch.device) -> Any:
    """A context manager that makes `device` the current device; no effect for the CPU."""
    kind = torch.device(device).type
    return nullcontext() if kind == "cpu" else torch.get_device_module(kind).device(device)


def ensure_contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates an autograd Function's forward or backward: tensor arguments are made contiguous."""

    def dense(value: Any) -> Any:
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    @functools.wraps(function)
    def call(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return function(ctx, *map(dense, args), **{name: dense(value) for name, value in kwargs.items()})

    return call


def calculate_settings(n: int) -> tuple[int, int]:
    """(block size, warps) for rows of n elements that one program holds. Raises `RuntimeError` beyond 65536."""
    block = 1 << max(n - 1, 0).bit_length()
    if block > 65536:
        raise RuntimeError(f"calculate_settings: rows of {n} elements do not fit one block of 65536")
    for minimum, warps in ((32768, 16 if is_hip() else 32), (8192, 16), (2048, 8)):
        if block >= minimum:
            return block, warps
    return block, 4


def compare_version(package: str, operator: Callable[[Any, Any], bool], target: str) -> bool:
    """`operator(installed version, target)`; False if the package is missing."""
    try:
        installed = importlib.import_module(package).__version__
    except ImportError:
        return False
    return operator(version.parse(installed), version.parse(target))


def get_amp_custom_fwd_bwd() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's decorators of an autograd Function's forward and backward under autocast, for `infer_device()`."""
    kind = infer_device()
    return tuple(functools.partial(f, device_type=kind) for f in (torch.amp.custom_fwd, torch.amp.custom_bwd))


def __getattr__(name: str) -> Any:
    if name in ("amp_custom_fwd", "amp_custom_bwd"):  # made on first use, since they need the device type
        return get_amp_custom_fwd_bwd()[name == "amp_custom_bwd"]
    if name != "torch_to_triton_dtype":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import triton.language as tl  # only this attribute needs Triton

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
