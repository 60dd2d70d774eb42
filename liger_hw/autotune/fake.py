"""Fake tensors: shapes, strides, dtypes and a device, without memory and without values.

Under `FakeTensors`, liger_hw's operators run their launchers, and torch's operators run on meta tensors and return a
`FakeTensor`. torch's own fake tensors are private, and import its compiler, which takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..backends import with_index
from ..runtime.operator import launchers


class FakeTensor(torch.Tensor):
    """A tensor without memory. meta: a tensor of the same layout on torch's meta device"""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> "FakeTensor":
        layout = {"strides": meta.stride(), "storage_offset": meta.storage_offset(), "dtype": meta.dtype}
        fake = torch.Tensor._make_wrapper_subclass(cls, meta.shape, **layout, device=device)
        fake.meta = meta
        return fake

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with FakeTensors():
            return func(*args, **(kwargs or {}))


class FakeTensors(TorchDispatchMode):
    """A torch mode in which every result is a `FakeTensor`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch imports its compiler to keep it from compiling this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if func.namespace == "liger_hw" and (launcher := launchers.get(name.removeprefix("liger_hw::"))):
            with self:  # an operator may call another
                return launcher(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__") and torch.Tag.inplace_view not in func.tags:
            return args[0]  # an in-place operation: there are no values to change
        fakes: dict[int, torch.Tensor] = {}
        devices = []

        def to_meta(tensor: torch.Tensor) -> torch.Tensor:
            devices.append(tensor.device)
            meta = tensor.meta if isinstance(tensor, FakeTensor) else tensor.to("meta")
            fakes[id(meta)] = tensor
            return meta

        def to_fake(meta: torch.Tensor) -> torch.Tensor:
            if is_channels_last and meta.dim() == 4:
                meta = meta.contiguous(memory_format=torch.channels_last)
            return fakes[id(meta)] if id(meta) in fakes else FakeTensor(meta, device)

        args, kwargs = tree_map_only(torch.Tensor, to_meta, (args, dict(kwargs)))
        # with channels-last operands a convolution returns channels last, but on meta tensors it does not
        is_channels_last = name.startswith("aten::conv") and any(
            t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in args[:2]
        )
        device = with_index(torch.device(kwargs.get("device") or (devices[0] if devices else "cpu")))
        if name.endswith("_like") and args[0].is_contiguous():  # torch would import sympy
            return to_fake(args[0].new_empty(args[0].shape, dtype=kwargs.get("dtype")))
        if kwargs.get("device") is not None or not devices and any(a.name == "device" for a in func._schema.arguments):
            kwargs["device"] = "meta"
        return tree_map_only(torch.Tensor, to_fake, func(*args, **kwargs))
