"""Behind `liger_kernel.transformers.fsdp`: call part of a model whose root is wrapped by FullyShardedDataParallel."""

from __future__ import annotations

from typing import Any, Callable


class _FSDPForwardRedirection:
    """Calling it runs `method(*args)` inside the forward of an FSDP root, where its parameters are gathered.

    Raises `TypeError` for anything but a FullyShardedDataParallel.
    """

    def __call__(self, wrapper_module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise TypeError(f"wrapper_module must be a FullyShardedDataParallel, got {type(wrapper_module).__name__}")
        return redirected(wrapper_module, wrapper_module._fsdp_wrapped_module, method, *args, **kwargs)


def redirected(wrapper: Any, inner: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `wrapper` with `method` in the place of the forward of `inner`, the wrapped module or `wrapper` itself."""
    original = inner.__dict__.get("forward")

    def restore() -> None:
        if original is None:
            inner.__dict__.pop("forward", None)
        else:
            inner.forward = original

    def forward(*inner_args: Any, **inner_kwargs: Any) -> Any:
        restore()  # the method may call the model itself
        return method(*inner_args, **inner_kwargs)

    inner.forward = forward
    try:
        return wrapper(*args, **kwargs)
    finally:
        restore()
