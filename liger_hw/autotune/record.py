"""Recording the operators that an op calls, the kernels that they launch, and the arguments.

The tuner runs an op once under `Recorder`. For each candidate it then repeats the operator call that launches the tuned
kernel, with the candidate's plan installed, and times only that kernel's launches.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, Sequence
from unittest import mock

import torch

from .. import private, registry
from ..backends import Target
from ..registry import Key, Plan
from ..runtime import launch as _launch
from ..runtime.launch import LaunchTracer, Observer, observing
from ..text import first_line
from .fake import FakeTensors


@dataclass
class Launch:
    """One launch of a kernel, or one call of a library's `Routine` that replaces it."""

    plan: Plan
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    flags: tuple[Any, ...]

    @property
    def name(self) -> tuple[str, int]:
        """Identifies the launch within an operator call; two tunables may launch one kernel."""
        return self.plan.tunable.name, id(self.kernel)

    def again(self, args: tuple[Any, ...]) -> None:
        if isinstance(self.kernel, _launch.Routine):
            self.kernel.run(*args)
        else:
            _launch.launch(self.plan, self.kernel, self.grid, args, self.flags)


@dataclass
class Call:
    """One operator call: its arguments (those it overwrites as copies made before), and its launches."""

    operator: Any
    args: tuple[Any, ...]
    overwritten: tuple[int, ...]
    launches: list[Launch] = field(default_factory=list)

    def again(self) -> list[torch.Tensor]:
        """Run the operator on the original arguments. Returns its outputs, then the arguments that it overwrote."""
        args = [a.clone() if i in self.overwritten else a for i, a in enumerate(self.args)]
        result = self.operator(*args)
        return tensors_in(result) + [args[i] for i in self.overwritten]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a value: the value itself, its items or its attributes, recursively."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    return [t for item in vars(value).values() for t in tensors_in(item)] if hasattr(value, "__dict__") else []


def trace_launches(
    op: str,
    sizes: Sequence[int],
    dtype: torch.dtype,
    target: Target,
    note: Callable[[Plan, Any, tuple, tuple, tuple], None],
    options: Mapping[str, Any] | None = None,
    table: Mapping[tuple[str, str, Key], list[registry.Entry]] = MappingProxyType({}),
) -> None:
    """Run one forward and backward of `op` on fake tensors, as if on `target`. In place of each launch
    `note(plan, kernel, grid, args, flags)` is called. table: stored configurations; without any, heuristics are used
    """
    entry = registry.get_op(op)
    with contextlib.ExitStack() as stack:
        stack.enter_context(registry.pretend(target, dict(table)))
        stack.enter_context(observing(LaunchTracer(note)))
        if not registry.interpreting():  # the interpreter needs values, such as targets
            stack.enter_context(FakeTensors())
        sample = entry.sample(tuple(sizes), dtype, torch.device("cpu"), None, **(options or {}))
        outputs = [o for o in tensors_in(entry.function(*sample.args, **sample.kwargs)) if o.requires_grad]
        inputs = [t for t in tensors_in((sample.args, sample.kwargs)) if t.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, inputs, [torch.empty_like(o) for o in outputs], allow_unused=True)


class Recorder(Observer):
    """Notes operator calls and kernel launches, as `observing(Recorder(), every_thread=True)`.

    Only the first launch of each kernel and key in an operator call is noted, since a chunked loop repeats it.
    before_launch: called with each noted launch before it is made
    repeatable: copy the arguments that operators overwrite, so that the calls can be repeated
    launching: False notes launches without making them; results are then undefined
    """

    def __init__(self, before_launch: Any = None, repeatable: bool = False, launching: bool = True) -> None:
        self.calls: list[Call] = []
        self.launches: list[Launch] = []
        self._before_launch, self._repeatable, self._launching, self._call = before_launch, repeatable, launching, None

    def launch(self, proceed: Any, plan: Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        """Launches through Triton rather than by `proceed`, since this is the outermost observer."""
        self._note(Launch(plan, kernel, tuple(grid), tuple(args), tuple(flags)))
        if self._launching:
            _launch.launch_ordinary(plan, kernel, grid, args, flags)

    def routine(self, proceed: Any, plan: Plan, routine: Any, args: tuple) -> torch.Tensor:
        self._note(Launch(plan, routine, (), tuple(args), ()))
        return proceed(plan, routine, args) if self._launching else routine.empty_result(*args)

    def _note(self, launch: Launch) -> None:
        launches = self.launches if self._call is None else self._call.launches
        if not any(known.name == launch.name and known.plan.key == launch.plan.key for known in launches):
            if self._before_launch is not None:
                self._before_launch(launch)
            launches.append(launch)

    def operator(self, proceed: Any, call: Any, args: tuple) -> Any:
        written = [a.alias_info is not None and a.alias_info.is_write for a in call.overload._schema.arguments]
        overwritten = tuple(i for i in range(len(args)) if written[i])
        kept = tuple(a.clone() if self._repeatable and written[i] else a for i, a in enumerate(args))
        before, self._call = self._call, Call(call, kept, overwritten)
        self.calls.append(self._call)
        try:
            return proceed(call, args)
        finally:
            self._call = before


def unasserted() -> contextlib.AbstractContextManager[Any]:
    """Skip assertions on the device. If nothing is launched, they would read uninitialised memory."""
    return mock.patch.object(private, "assert_async", lambda *args: None)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill the results of `torch.empty` and the like with NaN, to show elements that no kernel wrote.

    The functions are replaced: torch disables a function mode inside the operators that the mode intercepts.
    """

    def poisoning(make: Any) -> Any:
        def poisoned_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = make(*args, **kwargs)
            return result.fill_(float("nan")) if result.is_floating_point() and result.numel() else result

        return poisoned_tensor

    with contextlib.ExitStack() as stack:
        makers = (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")
        for owner, name in makers:
            stack.enter_context(mock.patch.object(owner, name, poisoning(getattr(owner, name))))
        yield


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is still as `poisoned` made it, judged by its first and last elements."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    ends = [tensor[(0,) * tensor.dim()], tensor[(-1,) * tensor.dim()]] if tensor.dim() else [tensor]
    return all(bool(torch.isnan(end)) for end in ends)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits, also where they are NaN."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@contextlib.contextmanager
def installed(plan: Plan) -> Iterator[None]:
    """Let launchers use `plan` for its device and key. All plans are resolved again, since replayed calls would bypass
    the recorder."""
    registry.invalidate()
    plan.tunable.plans[plan.device, plan.key] = plan
    try:
        yield
    finally:
        registry.invalidate()


class Rejected(Exception):
    """A candidate must not be timed; the message says why. A worker's caller gets a `WorkerError` instead."""


class _Strict(Observer):
    def launch(self, proceed: Any, plan: Plan, *call: Any) -> Any:
        try:
            return proceed(plan, *call)
        except _launch.LaunchFailed as failure:
            raise Rejected(first_line(failure.cause)) from failure

    routine = launch


def strictly() -> contextlib.AbstractContextManager:
    """If a configuration fails to compile or launch, raise `Rejected` instead of putting it in quarantine."""
    return observing(_Strict(), every_thread=True)
