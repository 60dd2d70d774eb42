"""Helpers of probes, which run a copy of a module on small random inputs and compare its results with a kernel's.

Everything runs on the CPU. The program's modules, hooks and random state are not changed.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import nn

from ...distributed import owners
from ...private import n_dispatch_modes
from ...text import first_line
from ..replacing import INSTANCE_FORWARDS
from ..source import EVERYTHING, reads

BATCH = (2, 3)
"""Leading dimensions of the probes' inputs."""
LARGE = 1e4
"""Scale of numbers that exceed all limits, such as a clamp's, in a module's code."""


@dataclass(frozen=True)
class Refused:
    """Why a module is not patched. kernel: the op for modules of its kind"""

    reason: str
    kernel: str


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A block on the CPU without gradients and autocast, which does not change the random state. Inference mode and
    fake tensor mode are off in it. Other saved-tensor hooks do not get its tensors: experts may be probed in a forward
    under a checkpoint, which counts the saved tensors."""
    with contextlib.ExitStack() as stack:
        if n_dispatch_modes():
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved))
        stack.enter_context(torch.random.fork_rng(devices=()))
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            yield


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    """Autocast to bf16 on the CPU. CUDA's flags are set too, since `torch.is_autocast_enabled()` reads these."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


# -- inputs ----------------------------------------------------------------------------------------------------------


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260101)


def normal(*shape: int, source: torch.Generator) -> torch.Tensor:
    """Normal numbers in fp32. The default dtype may be another one during from_pretrained(dtype=...)."""
    return torch.randn(*shape, generator=source, dtype=torch.float32)


def random(*shape: int, source: torch.Generator) -> torch.Tensor:
    """Numbers with a mean other than 0 and a deviation other than 1, so that a missing shift or scale shows."""
    return normal(*shape, source=source) * 1.7 + 0.3


# -- the module ------------------------------------------------------------------------------------------------------


def required_inputs(forward: Callable) -> list[str]:
    """Names of a forward's positional arguments without a default, after self."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def numbers_read(module: nn.Module, forward: Callable, *kinds: type) -> dict[str, Any]:
    """Name -> value of the module's attributes that its forward may read and whose type is one of `kinds`."""
    names = reads(type(module), forward)
    return {n: v for n, v in vars(module).items() if type(v) in kinds and (n in names or EVERYTHING in names)}


def why_unknown_shapes(module: nn.Module) -> str:
    """Why the shapes of a module's weights are not known under FSDP1, or ""."""
    names = " and ".join(owners.unknown_flattened(module))
    return f"FSDP1 holds its {names}: patch the model before it is wrapped, or pass the wrapper itself" if names else ""


def copy_of(
    module: nn.Module, parameters: dict[str, torch.Tensor | None], children: dict[str, Any], training: bool = True
) -> nn.Module:
    """A module of the same class and attributes, with other parameters, in training or eval mode and without hooks.

    children: replacements of some of its children; others are copied
    """
    copied = object.__new__(type(module))
    nn.Module.__init__(copied)
    for name, value in vars(module).items():
        if name not in vars(copied) and name not in INSTANCE_FORWARDS and name not in parameters:
            copied.__dict__[name] = copy.copy(value) if isinstance(value, _CONTAINERS) else value
    own_children = {name: child for name, child in module._modules.items() if name not in children}
    for name, child in own_children.items():
        leaf = child is not None and not child._modules and not isinstance(child, torch.jit.ScriptModule)
        own_children[name] = copy_of(child, child._parameters, {}, training) if leaf else child
    copied.__dict__["training"] = training
    copied.__dict__["_parameters"] = dict(parameters)
    copied.__dict__["_modules"] = {name: {**own_children, **children}[name] for name in module._modules}
    copied.__dict__["_buffers"] = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    return copied


# -- running and comparing -------------------------------------------------------------------------------------------


_CONTAINERS = (list, dict, set, collections.deque)


def run(function: Callable, *args: Any) -> torch.Tensor | str:
    """`function(*args)`, or why it cannot be probed. If args[0] is a module, its attributes (a counter, say) must not
    change, as no kernel would change them."""
    before = _attributes(args[0])
    try:
        result = function(*args)
    except Exception as error:  # code of other packages may raise anything
        return f"it cannot be run alone ({first_line(error)})"
    after = _attributes(args[0])
    changed = next((name for name in after if not _is_same(before.get(name), after[name])), None)
    if changed is not None:
        return f"its forward changes its {changed}"
    return result if isinstance(result, torch.Tensor) else f"it returns a {type(result).__name__}, not a tensor"


def _attributes(module: Any) -> dict[str, tuple[Any, ...]]:
    """Attribute of a module or of a child -> its values, and the versions of tensors among these."""
    states: dict[str, tuple[Any, ...]] = {}
    parts = {"": module, **module._modules} if isinstance(module, nn.Module) else {}
    for part, each in parts.items():
        attributes = {**each._buffers, **vars(each)} if isinstance(each, nn.Module) else {}
        for name, value in attributes.items():
            items = (*value, *value.values()) if isinstance(value, dict) else value
            values = tuple(items) if isinstance(value, _CONTAINERS) else (value,)
            versions = (t._version for t in values if isinstance(t, torch.Tensor) and not t.is_inference())
            states[f"{part}.{name}" if part else name] = (*values, *versions)
    return states


def _is_same(before: tuple[Any, ...] | None, after: tuple[Any, ...]) -> bool:
    if before is None or len(before) != len(after):
        return False
    return all(
        one is other or (isinstance(one, (int, float, str)) and one == other) for one, other in zip(before, after)
    )


def agrees(result: Any, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two results have the same shape and dtype and differ only by rounding."""
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    scale = expected.abs().max().clamp(min=1e-3)
    return bool(((result - expected).abs() <= tolerance * (expected.abs() + scale)).all())


def is_equal(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return result.shape == expected.shape and result.dtype == expected.dtype and bool((result == expected).all())


def has_same_gradients(
    result: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor], tolerance: float
) -> bool:
    """Whether every leaf gets the same gradient from both results."""
    if not expected.requires_grad:
        return False
    direction = expected.detach().cos()
    with torch.enable_grad():
        right, grads = (
            torch.autograd.grad((y * direction).sum(), leaves, allow_unused=True) for y in (expected, result)
        )
    return all(a is not None and b is not None and agrees(b, a, tolerance) for a, b in zip(right, grads))
