"""Measuring candidates on a device: check, then time only the kernel that the tunable launches.

A `Bench` holds one op at one shape. It runs the op once, forward and backward, and keeps the operator calls. For a
candidate it re-runs the one operator that launches the tunable's kernels, on unchanged inputs, with NaN in every fresh
output; compares the results with the heuristic's (which was compared with the op's reference); and captures the
kernel's launches alone into a graph. Launches rotate over copies of their arguments that together exceed the L2 cache
several times. Arguments that a kernel overwrites in place are restored before each replay, outside the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable

import torch

from .. import registry
from ..backends import LaunchConfig, Target, target_of
from ..kernels._launch import LaunchFailed, launch
from ..registry import Key, Op, Tunable
from . import check
from .clock import Clock
from .record import Call, Launch, Poison, Recorder, copy_of, everywhere, installed, plan_for, strictly

COLD = 4
"""Rotating copies exceed the L2 cache this many times."""
MAX_COPIES = 48
REPLAY_US = 150.0
"""A replay repeats short kernels up to about this long, so that starting a graph does not show."""
CHECK_BYTES = 2 << 30
"""The reference is compared on at most about this many bytes (fewer rows at larger shapes)."""


class Rejected(Exception):
    """A candidate that must not be timed; the message says why."""


@dataclass
class Arm:
    """A prepared candidate: how to restore its arguments, replay it, and launches per replay."""

    config: LaunchConfig
    restore: Callable[[], None]
    replay: Callable[[], None]
    per_replay: int
    resources: dict[str, int]


class Bench:
    """One op at one shape on one device. Use inside `with clock:`."""

    def __init__(self, op: Op, sizes: tuple[int, ...], dtype: torch.dtype, clock: Clock, options: dict | None = None) -> None:
        self.op, self.sizes, self.dtype, self.clock = op, sizes, dtype, clock
        self.device, self.options = clock.device, dict(options or {})
        self.target: Target = target_of(self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        self._sample = op.sample(sizes, dtype, self.device, generator, **self.options)
        self.failed_baselines: dict[str, str] = {}
        self.calls: list[Call] = self._record()
        self._stages: dict[tuple[str, Key], "Stage"] = {}

    def _record(self) -> list[Call]:
        for tunable in self.op.tunables:
            tunable._plans.clear()
        with Recorder(repeatable=True) as seen:
            check.run(self.op.function, self._sample)
        for tunable in self.op.tunables:
            tunable._plans.clear()
        return seen.calls

    def tunables(self) -> dict[tuple[str, Key], list[Launch]]:
        """(variant, key) -> launches of everything the op launches at this shape, in order."""
        found: dict[tuple[str, Key], list[Launch]] = {}
        for call in self.calls:
            here: dict[tuple[str, Key], list[Launch]] = {}
            for one in call.launches:
                if one.plan.tunable.op == self.op.name:
                    here.setdefault((one.plan.tunable.variant, one.plan.key), []).append(one)
            for place, launches in here.items():
                found.setdefault(place, launches)
        return found

    def stage(self, variant: str, key: Key) -> "Stage":
        """What candidates of one tunable and key are measured with. Raises `Rejected` when it is not launched here."""
        place = (variant, key)
        if place not in self._stages:
            self._stages.clear()  # one at a time: it holds copies of large tensors
            for call in self.calls:
                for one in call.launches:
                    if one.plan.tunable.op == self.op.name and one.plan.tunable.variant == variant and one.plan.key == key:
                        self._stages[place] = Stage(self, call, one.plan.tunable, key)
                        return self._stages[place]
            raise Rejected(f"{self.op.name}.{variant} is not launched with key {key} at {self.sizes}")
        return self._stages[place]

    def against_reference(self) -> str:
        """Why the op and its reference disagree, or `""`, on fewer rows where the full size would not fit."""
        sizes = self.sizes
        scale = self._sample.moved // CHECK_BYTES
        while scale > 1 and sizes[0] > 256:
            sizes, scale = (max(256, sizes[0] // 2), *sizes[1:]), scale // 2
        while True:
            try:
                with strictly():
                    return check.against_reference(self.op, sizes, self.dtype, self.device, self.options)
            except torch.OutOfMemoryError:
                if sizes[0] <= 256:
                    raise
                sizes = (max(256, sizes[0] // 4), *sizes[1:])
            except LaunchFailed as failure:
                return f"{type(failure.cause).__name__}: {failure.cause}"


class Stage:
    """One tunable at one key: the baseline's results and the tensors every candidate is timed on."""

    def __init__(self, bench: Bench, call: Call, tunable: Tunable, key: Key) -> None:
        self.bench, self.call, self.tunable, self.key = bench, call, tunable, key
        self.clock, self.target, self.device = bench.clock, bench.target, bench.device
        self.baseline = self._first_that_runs()
        self.expected, launches = self._run(self.baseline, keep=lambda one: _tensor_indices(one.args))
        self.roles = [self._role(one) for one in launches]
        self.expected = [t.clone() for t in self.expected]  # replays write into the launch's own tensors
        self.bytes = sum(self._moved(one, roles) for one, roles in zip(launches, self.roles))
        footprint = max(1, sum(_footprint(one.args) for one in launches))
        self.copies = max(1, min(MAX_COPIES, math.ceil(COLD * self.target.l2 / footprint)))
        if self.clock.on_cpu:
            self.copies = 1
        self._sets: list[list[dict[int, torch.Tensor]]] = [[self._first_set(one) for one in launches]]
        self._pristine = [
            {i: one.before[i] for i, role in roles.items() if role == "inout"} for one, roles in zip(launches, self.roles)
        ]
        for _ in range(1, self.copies):
            self._sets.append([_copies(tensors) for tensors in self._sets[0]])
        self.restore_all()

    def _first_that_runs(self) -> LaunchConfig:
        """The heuristic, or the safe configuration where the heuristic does not launch."""
        for config in (self.tunable.heuristic(self.target, self.key), self.tunable.safe(self.target, self.key)):
            try:
                if self.tunable.illegal(self.target, self.key, config) is None:
                    self._run(config)
                    return config
            except Rejected as reason:
                self.bench.failed_baselines[config.to_text()] = str(reason)
        raise Rejected(f"neither the heuristic nor the safe configuration launches: {self.bench.failed_baselines}")

    def _run(self, config: LaunchConfig, keep: Any = None) -> tuple[list[torch.Tensor], list[Launch]]:
        """Results of the operator under `config`, and this tunable's launches in it."""
        plan = plan_for(self.tunable, self.target, self.device, self.key, config)
        with torch.no_grad(), strictly(), installed(plan), Recorder(keep) as seen, Poison():
            try:
                outputs = self.call.again()
            except LaunchFailed as failure:
                raise Rejected(f"{type(failure.cause).__name__}: {str(failure.cause).splitlines()[0][:200]}") from None
        launches = [one for call in seen.calls for one in call.launches if one.plan is plan]
        if not launches:
            raise Rejected("the operator did not launch the kernel with this configuration")
        return outputs, launches

    def _role(self, one: Launch) -> dict[int, str]:
        """Argument index -> `input`, `output` (fresh memory, poisoned) or `inout` (overwritten in place)."""
        roles = {}
        for i, before in one.before.items():
            now = one.args[i]
            changed = not _same_bits(now, before)
            fresh = before.is_floating_point() and bool(torch.isnan(before).all())
            roles[i] = "output" if fresh else "inout" if changed else "input"
        return roles

    def _first_set(self, one: Launch) -> dict[int, torch.Tensor]:
        return {i: one.args[i] for i in _tensor_indices(one.args)}

    def _moved(self, one: Launch, roles: dict[int, str]) -> int:
        """Bytes that must pass: each tensor once, those overwritten in place twice."""
        seen: dict[int, int] = {}
        for i, role in roles.items():
            size = one.args[i].numel() * one.args[i].element_size()
            pointer = one.args[i].data_ptr()
            seen[pointer] = max(seen.get(pointer, 0), size * (2 if role == "inout" else 1))
        return sum(seen.values())

    def restore_all(self) -> None:
        for tensors in self._sets:
            for position, kept in enumerate(self._pristine):
                for i, before in kept.items():
                    tensors[position][i].copy_(before)

    def prepare(self, config: LaunchConfig) -> Arm:
        """Check a candidate and capture it. Raises `Rejected` with the reason it must not be timed."""
        if reason := self.tunable.illegal(self.target, self.key, config):
            raise Rejected(reason)
        outputs, launches = self._run(config)
        resources = self._resources(launches)
        if reason := registry.backend(self.target.vendor).illegal(self.target, config, resources.get("shared")):
            raise Rejected(reason)
        if reason := check.disagreements(outputs, self.expected):
            raise Rejected(f"wrong result: {reason}")
        if len(launches) != len(self.roles):
            raise Rejected(f"launches {len(launches)} kernels where the heuristic launches {len(self.roles)}")
        steps = [step for number in range(self.copies) for step in self._steps(launches, number)]

        def run_once() -> None:
            for plan, kernel, grid, args, flags in steps:
                launch(plan, kernel, grid, args, flags)

        in_place = any(self._pristine)
        run_once()
        repeats = 1
        if not self.clock.on_cpu and not in_place:
            took = min(self.clock.interleaved([(_nothing, run_once)], 2)[0])
            repeats = max(1, min(256 // len(steps), int(REPLAY_US / max(took, 1.0))))

        def run() -> None:
            for _ in range(repeats):
                run_once()

        replay = self.clock.graph(run)
        return Arm(config, self.restore_all if in_place else _nothing, replay, self.copies * repeats, resources)

    def _steps(self, launches: list[Launch], number: int) -> list[tuple]:
        """The launches with their tensors replaced by shared set `number`; odd-shaped ones get their own copies."""
        steps = []
        for position, one in enumerate(launches):
            shared, own = self._sets[number][position], {}
            args = list(one.args)
            for i in _tensor_indices(one.args):
                mine, theirs = one.args[i], shared.get(i)
                if theirs is not None and _alike(mine, theirs):
                    args[i] = theirs
                elif number:
                    args[i] = own.setdefault((mine.data_ptr(), mine.shape), copy_of(mine))
            steps.append((one.plan, one.kernel, one.grid, tuple(args), one.flags))
        return steps

    def _resources(self, launches: list[Launch]) -> dict[str, int]:
        """Registers, spills and shared memory of the compiled kernels, the largest of each, where they can be read."""
        found: dict[str, int] = {}
        for one in launches:
            values = {
                "registers": getattr(one.compiled, "n_regs", None),
                "spills": getattr(one.compiled, "n_spills", None),
                "shared": getattr(getattr(one.compiled, "metadata", None), "shared", None),
            }
            for name, value in values.items():
                if isinstance(value, int):
                    found[name] = max(found.get(name, 0), value)
        return found

    def time(self, arms: list[Arm], rounds: int) -> list[list[float]]:
        """Microseconds of one launch, `rounds` samples for each arm, interleaved."""
        raw = self.clock.interleaved([(arm.restore, arm.replay) for arm in arms], rounds)
        return [[sample / arm.per_replay for sample in samples] for arm, samples in zip(arms, raw)]

    def verify(self, config: LaunchConfig) -> str:
        """Why the whole op under `config` disagrees with its reference, or `""`."""
        plan = plan_for(self.tunable, self.target, self.device, self.key, config)
        with everywhere(plan):
            return self.bench.against_reference()


def _nothing() -> None:
    pass


def _tensor_indices(args: tuple) -> list[int]:
    return [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]


def _footprint(args: tuple) -> int:
    return sum({args[i].data_ptr(): args[i].numel() * args[i].element_size() for i in _tensor_indices(args)}.values())


def _copies(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies that keep strides, and share memory where the originals did."""
    made: dict[tuple, torch.Tensor] = {}
    return {
        i: made.setdefault((t.data_ptr(), t.shape, t.stride(), t.dtype), copy_of(t))
        if (t.data_ptr(), t.shape, t.stride(), t.dtype) not in made
        else made[t.data_ptr(), t.shape, t.stride(), t.dtype]
        for i, t in tensors.items()
    }


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of equal shape hold equal elements, NaN equal to NaN; without full-size copies."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat_a.numel(), check.CHUNK):
        x, y = flat_a[start : start + check.CHUNK], flat_b[start : start + check.CHUNK]
        if not bool(((x == y) | (x.isnan() & y.isnan())).all()):
            return False
    return True
