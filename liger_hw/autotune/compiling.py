"""Compiling candidates ahead of the measuring process, in processes that have no device.

A recorded launch becomes a `spec` (dtypes, alignments, integer values); a worker hands the same specialisation to
Triton under a stub driver. Triton's on-disk cache then makes the measuring process's compile a hit. It is only an
optimisation: where it does not apply, the measuring process compiles for itself.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch

from .. import registry
from ..backends import LaunchConfig, Target, backend
from .record import Launch, plan_for


def spec_of(one: Launch) -> dict[str, Any] | None:
    """A launch's specialisation as JSON data, or None where it cannot be repeated without the tensors."""
    args: list[Any] = []
    for value in one.args:
        if isinstance(value, torch.Tensor):
            if value.data_ptr() % 16:
                return None
            args.append(["tensor", str(value.dtype).removeprefix("torch.")])
        else:
            args.append(["value", value])
    function = getattr(one.kernel, "fn", one.kernel)
    spec = {"kernel": [function.__module__, function.__name__], "args": args, "flags": list(one.flags)}
    try:
        return spec if json.loads(json.dumps(spec)) == spec else None
    except TypeError:
        return None


def target_from_json(data: dict[str, Any]) -> Target:
    return Target(**{**data, "warp_sizes": tuple(data["warp_sizes"])})


def pretend_device(target: Target) -> bool:
    """Make Triton compile for `target` in this process; False where the stock Triton has no compiler for it."""
    gpu = backend(target.vendor).triton_target(target)
    if gpu is None:
        return False
    import triton

    triton.runtime.driver.set_active(_StubDriver(gpu))
    return True


class _StubDriver:
    """Answers what `JITFunction.run(warmup=True)` asks a driver, for a device that this process must not touch."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu

    def get_current_target(self) -> Any:
        return self.gpu

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")


def compile_one(target: Target, op: str, variant: str, key: list[int], config: dict, specs: list[dict]) -> dict[str, Any]:
    """Compile one candidate's kernels; `{shared}` or `{error}`. Needs `pretend_device(target)` before."""
    registry.get_op(op)
    tunable = registry._tunables[f"{op}.{variant}"]
    plan = plan_for(tunable, target, None, tuple(key), LaunchConfig.from_json(config))
    shared = 0
    try:
        for spec in specs:
            module, name = spec["kernel"]
            kernel = getattr(importlib.import_module(module), name)
            args = [getattr(torch, value) if kind == "tensor" else value for kind, value in spec["args"]]
            flags = spec["flags"]
            tail = [plan.constexprs[name] for name in kernel.arg_names[len(args) + len(flags) :]]
            compiled = kernel.warmup(*args, *flags, *tail, grid=(1,), **plan.options)
            shared = max(shared, int(getattr(compiled.metadata, "shared", 0)))
    except Exception as error:  # a candidate that does not compile is an answer, whatever it raised
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"}
    return {"shared": shared}


def recipe(op: str, variant: str, config: LaunchConfig, specs: list[dict]) -> str:
    """Equal texts compile to the same kernels: the key and the size of a persistent grid do not matter to a compiler."""
    shape = {**config.to_json(), "ctas_per_mp": 0}
    return json.dumps([op, variant, shape, specs], sort_keys=True)
