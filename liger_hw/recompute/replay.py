"""What makes a recomputation equal to the computation: the same autocast, launch configurations and module state."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch

Call = Callable[..., Any]


def of_module(module: torch.nn.Module, x: torch.Tensor) -> tuple[Call, tuple] | None:
    """(call, arguments) that compute `module(x)` again with the same bits, or None where that is not certain."""
    kind = x.device.type
    autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    if type(module) is torch.nn.Linear:
        return None if _hooked(module) else (linear, (autocast, x, module.weight, module.bias))
    if not all(_deterministic(part) and not _hooked(part) for part in module.modules()):
        return None
    return call_module, (autocast, module, x, *module.parameters())


def linear(autocast: tuple, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    kind, dtype, enabled = autocast
    with torch.autocast(kind, dtype, enabled, cache_enabled=False):
        return torch.nn.functional.linear(x, weight, bias)


def call_module(autocast: tuple, module: torch.nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """`module(x)`; its parameters are arguments for the check that nobody changed them."""
    kind, dtype, enabled = autocast
    with torch.autocast(kind, dtype, enabled, cache_enabled=False):
        return module(x)


def cast(dtype: torch.dtype, source: torch.Tensor) -> torch.Tensor:
    return source.to(dtype)


def _hooked(module: torch.nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or hasattr(module, "_hf_hook")


def _deterministic(module: torch.nn.Module) -> bool:
    """Linears, what only holds others, and dropout that drops nothing."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p == 0 or not module.training
    plain = (torch.nn.Linear, torch.nn.Identity, torch.nn.ModuleDict, torch.nn.ModuleList, torch.nn.ParameterDict)
    return isinstance(module, plain) or any(True for _ in module.children())


def stream_of(device: torch.device) -> Any:
    """The stream that work on a device goes to now; None on the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def overrides() -> tuple:
    """The launch configurations that `registry.override` forces now."""
    from .. import registry

    return registry.overrides()


def overridden(forced: tuple) -> Any:
    """A context in which they are forced again, where they no longer are."""
    return contextlib.nullcontext() if forced == overrides() else _entered(forced)


@contextlib.contextmanager
def _entered(forced: tuple) -> Iterator[None]:
    from .. import registry

    with contextlib.ExitStack() as stack:
        for scope, config in forced:
            stack.enter_context(registry.override(scope, config))
        yield
