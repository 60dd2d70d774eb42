"""Argument checks that the chunked losses share. Each returns what the loss goes on with."""

from __future__ import annotations

import torch

from ..runtime.operator import autocast_dtype, check, check_tensors


def _cast(t: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return t if t is None or dtype is None else t.to(dtype)


def checked_head(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, role: str = "", dims: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [batch, length, hidden] (dims=2: [tokens, hidden]), weight [vocab, hidden] and bias [vocab] or None, of one dtype.

    role: what the arguments' names begin with ("ref_", "student_"). Under autocast they are cast to its dtype.
    """
    names = (f"{role}input", f"{role}weight", f"{role}bias") if role else ("_input", "lin_weight", "bias")
    check_tensors(op, optional=(names[2],), **dict(zip(names, (x, weight, bias))))
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        x, weight, bias = _cast(x, dtype), _cast(weight, dtype), _cast(bias, dtype)
    wanted = "[batch, length, hidden]" if dims == 3 else "[tokens, hidden]"
    if x.dim() != dims or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not weight.numel():
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        check(False, op, f"{names[0]} must be {wanted} and {names[1]} [vocab, hidden], got {got}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        got = ", ".join(str(t.dtype) for t in (x, weight, bias) if t is not None)
        check(False, op, f"{', '.join(names)} must share one dtype, got {got}; cast them or use autocast")
    if bias is not None and bias.shape != weight.shape[:1]:
        check(False, op, f"{names[2]} must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    return x, weight, bias


def checked_target(op: str, name: str, target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Token indices, one for each hidden state of x."""
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32):
        check(False, op, f"{name} must hold token indices (int64 or int32), got {target.dtype}")
    shape = tuple(x.shape[:-1])
    if target.shape != shape:
        check(False, op, f"{name} must have shape {shape} to match the hidden states, got {tuple(target.shape)}")
    if target.device != x.device:
        check(False, op, f"{name} is on {target.device} but the input is on {x.device}; move them to one device")
    return target


def checked_reference(
    op: str, x: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, policy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The reference model's head over the same tokens as the policy's hidden states; nothing of it gets a gradient."""
    if x is None or weight is None:
        missing = " and ".join(n for n, t in (("ref_input", x), ("ref_weight", weight)) if t is None)
        check(False, op, f"use_ref_model=True needs {missing}; give them, or use_ref_model=False")
    x, weight, bias = checked_head(op, x, weight, bias, "ref_")
    if x.shape[:-1] != policy.shape[:-1]:
        expected, got = tuple(policy.shape[:-1]), tuple(x.shape[:-1])
        check(False, op, f"ref_input must have the batch and length of _input, {expected}, got {got}")
    if x.device != policy.device:
        check(False, op, f"ref_input is on {x.device} but _input is on {policy.device}; move them to one device")
    return x.detach(), weight.detach(), None if bias is None else bias.detach()


def on_device(number: torch.Tensor | float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `number`, without gradient. A Python number is written there: copying it from the host would wait for
    the device, and fail while a graph is captured."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)
