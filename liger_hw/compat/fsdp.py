"""Behind `liger_kernel.transformers.fsdp`: call part of a model whose root is wrapped by FullyShardedDataParallel."""

from __future__ import annotations

from typing import Any, Callable

from ..distributed.owners import redirected


class _FSDPForwardRedirection:
    """Calling it runs `method(*args)` inside the forward of an FSDP root, where its parameters are gathered.

    Raises `TypeError` for anything but a FullyShardedDataParallel.
    """

    def __call__(self, wrapper_module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise TypeError(f"wrapper_module must be a FullyShardedDataParallel, got {type(wrapper_module).__name__}")
        return redirected(wrapper_module, wrapper_module._fsdp_wrapped_module, "forward", method, *args, **kwargs)
