"""Measuring candidates on a device: their results are checked, then only the tunable's kernel is timed.

A `Bench` runs one op at one shape once, forward and backward, and records the operator calls. A `Stage` takes the call
that launches the tunable's kernels and repeats it with each candidate, on the same inputs and with new outputs filled
with NaN. It compares the results with the heuristic's, which were compared with the op's reference, and captures the
kernel's launches into a graph. Launches rotate over copies of their arguments that together exceed the L2 cache several
times. Arguments that a kernel overwrites are restored before each replay, which is not timed.

The tuner calls `LocalMeasurer` in another process (workers.py).
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import Any, Callable, Iterable

import torch

from .. import registry
from ..backends import LaunchConfig, Target, target_of, with_index
from ..registry import Entry, Key, Op, Plan, Tunable
from ..runtime.launch import observing
from . import check, space, store
from .clock import Clock, nothing
from .jobs import Job
from .record import (
    Call,
    Launch,
    Recorder,
    Rejected,
    copy_of,
    installed,
    is_poisoned,
    poisoned,
    same_bits,
    strictly,
    unasserted,
)

L2_MULTIPLE = 4
"""Total size of the rotating copies, as a multiple of the L2 cache."""
MAX_COPIES = 48
MAX_ARMS = 12
"""Number of candidates that stay prepared, each with a graph and some tensors."""
REPLAY_US = 150.0
"""A graph repeats short kernels until it takes about this long, so that its launch is negligible."""
CHECK_BYTES = 2 << 30
"""The op is compared with its reference on about this many bytes at most; larger shapes are compared on fewer rows."""


@dataclass
class Arm:
    """A prepared candidate. restore: restores overwritten arguments; replay: runs its graph of `per_replay` launches"""

    config: LaunchConfig
    restore: Callable[[], None]
    replay: Callable[[], None]
    per_replay: int


class Bench:
    """The operator calls of one op's forward and backward at one shape on one device."""

    def __init__(self, op: Op, sizes: tuple[int, ...], dtype: torch.dtype, clock: Clock) -> None:
        self.op, self.sizes, self.dtype, self.clock, self.device = op, sizes, dtype, clock, clock.device
        self.target: Target = target_of(self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        sample = op.sample(sizes, dtype, self.device, generator)
        self.moved = sample.moved
        registry.invalidate()
        with observing(Recorder(repeatable=True), every_thread=True) as recorder:
            check.run(op.function, sample)
        registry.invalidate()
        self.calls: list[Call] = recorder.calls

    def against_reference(self) -> str:
        """Why the op disagrees with its reference, or `""`. A shape that is too large is compared on fewer rows.

        Raises `Rejected` if a configuration fails to launch.
        """
        sizes = self.sizes
        scale = self.moved // CHECK_BYTES
        while scale > 1 and sizes[0] > 256:
            sizes, scale = (max(256, sizes[0] // 2), *sizes[1:]), scale // 2
        while True:
            try:
                with strictly():
                    return check.against_reference(self.op, sizes, self.dtype, self.device)
            except torch.OutOfMemoryError:
                if sizes[0] <= 256:
                    raise
                sizes = (max(256, sizes[0] // 4), *sizes[1:])


class Stage:
    """One tunable at one key: the baseline's results, and the tensors on which every candidate is timed.

    Raises `Rejected` if the op does not launch the tunable with this key.
    """

    def __init__(self, bench: Bench, tunable: Tunable, key: Key) -> None:
        self.tunable, self.key = tunable, key
        self.clock, self.target, self.device = bench.clock, bench.target, bench.device
        calls = [call for call in bench.calls if any(_is(one, tunable, key) for one in call.launches)]
        if not calls:
            raise Rejected(f"{tunable.name} is not launched with key {key} at {bench.sizes}")
        self.call = calls[0]
        self.timed: set[tuple[str, int]] | None = None  # names of the launches to time; None: all
        self.baseline = self._first_that_runs()
        self.timed = self._kernels_to_time()
        before: dict[tuple[Any, int], torch.Tensor] = {}

        def copy_inputs(one: Launch) -> None:
            for i in _tensor_indices(one.args) if one.name in self.timed else ():
                if not is_poisoned(one.args[i]):
                    before[one.name, i] = copy_of(one.args[i])

        outputs, launches = self._run(self.baseline, copy_inputs)
        args_of = {one.name: one.args for one in launches}
        self._overwritten = {(name, i): t for (name, i), t in before.items() if not same_bits(t, args_of[name][i])}
        self.expected = [t.clone() for t in outputs]  # copies, since replays overwrite the launches' tensors
        tuned = {one.name: one.args for one in launches if _is(one, tunable, key)}
        overwritten = [tuned[name][i] for name, i in self._overwritten if name in tuned]  # read and written
        self.bytes = sum(_bytes(args) for args in tuned.values()) + _bytes(overwritten)
        footprint = max(1, sum(_bytes(one.args) for one in launches))
        copies = min(MAX_COPIES, math.ceil(L2_MULTIPLE * self.target.l2 / footprint))
        self.copies = 1 if self.clock.module is None else max(1, copies)
        first = {name: {i: args[i] for i in _tensor_indices(args)} for name, args in args_of.items()}
        self._sets = [first, *(_copies(first) for _ in range(1, self.copies))]
        self.restore_inputs()

    def _first_that_runs(self) -> LaunchConfig:
        """The heuristic, or the safe configuration if the heuristic fails to launch."""
        failed = []
        for config in (self.tunable.heuristic(self.target, self.key), self.tunable.safe(self.target, self.key)):
            try:
                if self.tunable.illegal(self.target, self.key, config) is None:
                    self._run(config)
                    return config
            except Rejected as reason:
                failed.append(str(reason))
        raise Rejected(f"neither the heuristic nor the safe configuration launches: {'; '.join(failed)}")

    def _kernels_to_time(self) -> set[tuple[str, int]]:
        """The tunable's kernels, and others whose launches differ between the extremes of the search space.

        For example, a persistent backward's grid sets how many partial sums another kernel adds, and a narrow block may
        need a second kernel.
        """
        legal, _ = space.legal(self.tunable, self.target, self.key)
        launched = [self._launches_under(config) for config in _extremes(legal, self.baseline)]
        always = {name for launches in launched for name, (is_tuned, _) in launches.items() if is_tuned}
        constant = {name for name, value in launched[0].items() if all(other.get(name) == value for other in launched)}
        return always | {name for launches in launched for name in launches if name not in constant}

    def _launches_under(self, config: LaunchConfig) -> dict[tuple[str, int], tuple[bool, tuple]]:
        """Name of each launch under `config` -> (whether it is the tunable's, grids and arguments). None is made."""
        plan = self.plan(config)
        with torch.no_grad(), unasserted(), installed(plan):
            with observing(Recorder(launching=False), every_thread=True) as recorder:
                self.call.again()
        kernels: dict[tuple[str, int], tuple[bool, tuple]] = {}
        for one in (one for call in recorder.calls for one in call.launches):
            args = tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in one.args)
            is_tuned, launches = kernels.get(one.name, (False, ()))
            kernels[one.name] = (is_tuned or one.plan is plan, (*launches, (one.grid, args)))
        return kernels

    def plan(self, config: LaunchConfig) -> Plan:
        """A plan with one candidate, which the registry does not look up."""
        chosen = Entry(config, {"kind": "explicit"}, source="tuner", layer="explicit")
        return Plan(self.tunable, self.target, self.device, self.key, chosen)

    def _run(self, config: LaunchConfig, before_launch: Any = None) -> tuple[list[torch.Tensor], list[Launch]]:
        """(results of the operator under `config`, its launches that are to be timed)"""
        plan = self.plan(config)
        with torch.no_grad(), installed(plan), observing(Recorder(before_launch), every_thread=True) as recorder:
            with strictly(), poisoned():
                outputs = self.call.again()
        launches = [one for call in recorder.calls for one in call.launches]
        if not any(one.plan is plan for one in launches):
            raise Rejected("the operator did not launch the kernel with this configuration")
        return outputs, [one for one in launches if self.timed is None or one.name in self.timed]

    def restore_inputs(self) -> None:
        """Restore the arguments that kernels overwrite in place."""
        for tensors in self._sets:
            for (name, i), before in self._overwritten.items():
                tensors[name][i].copy_(before)

    def prepare(self, config: LaunchConfig) -> Arm:
        """Check a candidate's results and capture its launches. Raises `Rejected` if it must not be timed."""
        if reason := self.tunable.illegal(self.target, self.key, config):
            raise Rejected(reason)
        outputs, launches = self._run(config)
        if reason := check.disagreements(outputs, self.expected):
            raise Rejected(f"wrong result: {reason}")
        steps = [step for number in range(self.copies) for step in self._steps(launches, number)]

        def run_once() -> None:
            for one, args in steps:
                one.again(args)

        in_place = bool(self._overwritten)
        run_once()
        repeats = 1
        if self.clock.module is not None and not in_place:
            took = 1e3 * min(self.clock.each(2, run_once))
            repeats = max(1, min(256 // len(steps), int(REPLAY_US / max(took, 1.0))))

        def run() -> None:
            for _ in range(repeats):
                run_once()

        replay = self.clock.captured(run)
        return Arm(config, self.restore_inputs if in_place else nothing, replay, self.copies * repeats)

    def _steps(self, launches: list[Launch], number: int) -> list[tuple[Launch, tuple]]:
        """The launches with arguments from set `number`. Tensors whose layouts differ from the set's are copied."""
        steps = []
        copies: dict[tuple, torch.Tensor] = {}
        for one in launches:
            shared = self._sets[number].get(one.name, {})
            args = list(one.args)
            for i in _tensor_indices(one.args):
                tensor, other = one.args[i], shared.get(i)
                if other is not None and _layout(tensor) == _layout(other):
                    args[i] = other
                elif number:
                    name = tensor.data_ptr(), tensor.shape
                    if name not in copies:
                        copies[name] = copy_of(tensor)
                    args[i] = copies[name]
            steps.append((one, tuple(args)))
        return steps

    def time(self, arms: list[Arm], rounds: int) -> list[list[float]]:
        """Microseconds of one launch, `rounds` samples for each arm, interleaved."""
        raw = self.clock.interleaved([(arm.restore, arm.replay) for arm in arms], rounds)
        return [[1e3 * ms / arm.per_replay for ms in samples] for arm, samples in zip(arms, raw)]


def _is(one: Launch, tunable: Tunable, key: Key) -> bool:
    return one.plan.tunable is tunable and one.plan.key == key


def _tensor_indices(args: tuple) -> list[int]:
    return [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype


def _bytes(args: Iterable[Any]) -> int:
    """Bytes of the tensors among these arguments; tensors that share memory count once."""
    sizes: dict[int, int] = {}
    for tensor in args:
        if isinstance(tensor, torch.Tensor):
            sizes[tensor.data_ptr()] = max(sizes.get(tensor.data_ptr(), 0), tensor.nbytes)
    return sum(sizes.values())


def _copies(first: dict[Any, dict[int, torch.Tensor]]) -> dict[Any, dict[int, torch.Tensor]]:
    """Copies with the same strides. Copies of tensors that share memory share memory too."""
    copies: dict[tuple, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        name = (tensor.data_ptr(), *_layout(tensor))
        if name not in copies:
            copies[name] = copy_of(tensor)
        return copies[name]

    return {name: {i: copied(t) for i, t in tensors.items()} for name, tensors in first.items()}


def _extremes(legal: list[LaunchConfig], baseline: LaunchConfig) -> list[LaunchConfig]:
    """The baseline, and the configurations with the smallest and largest value of each option that can set a grid."""
    chosen = [baseline]
    values = [lambda c: c.ctas_per_mp, *(lambda c, name=name: c.blocks.get(name, 0) for name in baseline.blocks)]
    for value in values:
        chosen += [pick(legal, key=value) for pick in (min, max)] if legal else []
    return list(dict.fromkeys(chosen))


class LocalMeasurer:
    """Measures candidates on one device, for one op, shape and tunable at a time."""

    def __init__(self, device: str) -> None:
        self.device = with_index(device)
        self.target = target_of(self.device)
        registry.set_table(self.target, {})  # no stored entries: the baseline is the heuristic
        self.clock = Clock(self.device).__enter__()
        self._bench: Bench | None = None
        self._shape: tuple | None = None
        self._stage: Stage | None = None
        self._arms: dict[LaunchConfig, Arm] = {}

    def facts(self) -> dict[str, Any]:
        """Facts of this machine for provenance, and the bandwidth of a copy in GB/s."""
        return {
            "target": self.target,
            "device": self.target.name,
            "driver": registry.backend(self.target.vendor).driver(self.device.index or 0),
            "torch": torch.__version__,
            "triton": store.triton_version(),
            "python": platform.python_version(),
            "copy_gbs": round(self.clock.copy_rate(), 1),
        }

    def open(self, job: Job, sizes: tuple[int, ...]) -> tuple[LaunchConfig, int]:
        """Prepare to measure candidates of a job at these sizes. Returns the baseline and the bytes that it moves.

        Raises `Rejected`.
        """
        self._arms.clear()
        self._stage = None
        shape = job.op, sizes, job.dtype
        if shape != self._shape:
            self.close()
            self._free()
            self._bench = Bench(registry.get_op(job.op), sizes, getattr(torch, job.dtype), self.clock)
            if reason := self._bench.against_reference():
                raise Rejected(f"the heuristic disagrees with the reference: {reason}")
            self._shape = shape
        self._stage = Stage(self._bench, registry.get_tunable(job.name), job.key)
        return self._stage.baseline, self._stage.bytes

    def prepare(self, config: LaunchConfig) -> None:
        """Check and capture a candidate, unless it is one of the last `MAX_ARMS` prepared. Raises `Rejected`."""
        try:
            arm = self._arms.pop(config, None) or self._stage.prepare(config)
        except torch.OutOfMemoryError as error:
            self._free()
            raise Rejected(f"out of memory: {str(error).splitlines()[0]}") from None
        self._arms[config] = arm
        if len(self._arms) > MAX_ARMS:
            del self._arms[next(iter(self._arms))]

    def time(self, configs: list[LaunchConfig], rounds: int) -> list[list[float]]:
        """Microseconds of one launch, `rounds` samples for each prepared candidate, interleaved."""
        return self._stage.time([self._arms[config] for config in configs], rounds)

    def verify(self, config: LaunchConfig) -> str:
        """Why the whole op under `config` disagrees with its reference, or `""`."""
        with registry.override(self._stage.tunable.name, config):
            return self._bench.against_reference()

    def close(self) -> None:
        self._arms.clear()
        self._stage = self._bench = self._shape = None

    def _free(self) -> None:
        """Return torch's cached memory to the device if half of the device's memory is in use, since this is slow."""
        if self.device.type == "cpu":
            return
        module = torch.get_device_module(self.device)
        free, total = module.mem_get_info(self.device)
        if free < total // 2:
            module.empty_cache()
