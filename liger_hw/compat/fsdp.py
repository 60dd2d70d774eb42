"""For `liger_kernel.transformers.fsdp`: calls a part of a model that FullyShardedDataParallel wraps."""

from __future__ import annotations

from typing import Any, Callable

from ..distributed.owners import redirected


class _FSDPForwardRedirection:
    """Runs `method(*args)` inside the forward of an FSDP root, where the root's parameters are gathered.

    Raises `TypeError` for a module that is not a FullyShardedDataParallel.
    """

    def __call__(self, wrapper_module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise TypeError(f"wrapper_module must be a FullyShardedDataParallel, got {type(wrapper_module).__name__}")
        return redirected(wrapper_module, wrapper_module._fsdp_wrapped_module, "forward", method, *args, **kwargs)
