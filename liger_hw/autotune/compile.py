"""Ahead-of-time compilation: what an op would launch on a GPU that is not here, compiled, with what each kernel takes.

`trace` runs an op forward and backward on fake tensors (no memory, no arithmetic) while the registry pretends to be the
target. The real launchers run; each launch is recorded with exactly what Triton would specialise it on: dtypes, pointer
alignment and range, integers that are 1, divisible by 16 or wide. `certify` compiles the recorded launches with the stock
Triton compiler in worker processes, where an abort or a hang of the compiler is a finding and not the end, and reads
registers, spills, shared memory, occupancy, memory widths and the instruction mix from the binary. For a target that the
Triton at hand has no compiler for, kernels go as far as TTIR (`ttir.py`).

    with Workers(2) as workers:
        for certificate in certify(trace("rms_norm", (8192, 4096), torch.bfloat16, known_target("gfx942")), workers):
            print(certificate)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

from .. import registry
from ..backends import LaunchConfig, Target, backend
from ..backends.base import Resources
from . import ttir
from .accesses import Access, accesses

if TYPE_CHECKING:
    import torch

_INT32 = 1 << 31


@dataclass(frozen=True)
class Launch:
    """One recorded launch. Two that Triton would compile alike are `same()`.

    kernel: `module:name`; args: what stands for each argument: `("ptr", dtype, aligned, within 2 GiB)`, a number of the
    class Triton distinguishes, None, or a constexpr's value; options: the compiler's; grid: programs, which compile alike
    sizes: bytes of the tensors among the arguments, 0 for the others
    """

    target: Target
    tunable: str
    key: registry.Key
    layer: str
    config: LaunchConfig
    kernel: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def same(self) -> tuple:
        return self.target.arch, self.kernel, self.args, self.options


@dataclass(frozen=True)
class Certificate:
    """What became of a launch: `resources`, or the `error` of the compiler; `illegal` says why it must not run.

    accesses: the loads and stores of its tensors; empty, and `unread` says why, where they cannot be told
    level: how far it was compiled: `binary`, or `ttir` where the Triton at hand has no compiler for the target and
    `resources` are counted, not a compiler's
    """

    launch: Launch
    resources: Resources | None = None
    error: str = ""
    seconds: float = 0.0
    accesses: tuple[Access, ...] = ()
    unread: str = ""
    level: str = "binary"

    @property
    def illegal(self) -> str:
        if self.resources is None:
            return ""
        target, rules = self.launch.target, backend(self.launch.target.vendor)
        return rules.illegal(target, self.launch.config) or rules.illegal_resources(target, self.resources) or ""

    @property
    def ok(self) -> bool:
        return self.resources is not None and not self.illegal

    def to_json(self) -> dict[str, Any]:
        launch = self.launch
        return {
            "target": launch.target.arch,
            "tunable": launch.tunable,
            "key": list(launch.key),
            "layer": launch.layer,
            "config": launch.config.to_json(),
            "kernel": launch.kernel.split(":")[1],
            "grid": list(launch.grid),
            "level": self.level,
            "error": self.error,
            "illegal": self.illegal,
            "seconds": round(self.seconds, 3),
            "resources": self.resources.to_json() if self.resources else None,
            "sizes": list(launch.sizes),
            "accesses": [access.to_json() for access in self.accesses],
            **({"unread": self.unread} if self.unread else {}),
        }

    def __str__(self) -> str:
        head = f"{self.launch.target.arch} {self.launch.tunable} {self.launch.key} {self.launch.layer}"
        r = self.resources
        if r is None:
            return f"{head}: {self.error}"
        what = f"{r.registers} registers, {r.spills} spilled, {r.shared} B shared, {r.threads} threads"
        return f"{head}: {what}, occupancy {r.occupancy:.0%}{', ILLEGAL: ' + self.illegal if self.illegal else ''}"


# -- recording -------------------------------------------------------------------------------------------------------


def trace(
    op: str,
    sizes: Sequence[int],
    dtype: "torch.dtype",
    target: Target,
    options: Mapping[str, Any] | None = None,
    *,
    configs: Mapping[str, LaunchConfig] | None = None,
    shipped: bool = True,
    own: bool = False,
) -> list[Launch]:
    """The launches of one forward and backward of `op` at problem sizes `sizes` on `target`, in their order.

    options: of the op's `sample`; configs: configurations to force, by op or `op.variant`; shipped, own: whether the
    shipped tables, and the user's own cache and lock file, are asked before the heuristic. Nothing runs and nothing is
    compiled.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ..runtime import triton_import as _triton
    from ..runtime.launch import tuned_values
    from ..runtime.observe import Observer, observing
    from ..runtime.operator import LauncherMode

    _triton.require()
    if _triton.INTERPRET:
        raise RuntimeError("kernels are interpreted in this process; compile in one without LIGER_HW_INTERPRET")
    entry = registry.get_op(op)
    found: list[Launch] = []

    class Record(Observer):
        def launch(
            self, proceed: Any, plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple
        ) -> None:
            values = (*args, *flags, *tuned_values(plan, kernel, args, flags))
            args = tuple(_stand_in(parameter, value) for parameter, value in zip(kernel.params, values))
            name = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
            choices = tuple(sorted(plan.options.items()))
            chosen = target, plan.tunable.name, plan.key, plan.layer, plan.config
            sizes = tuple(value.nbytes if isinstance(value, torch.Tensor) else 0 for value in values)
            found.append(Launch(*chosen, name, args, choices, tuple(grid), sizes))

    with contextlib.ExitStack() as stack:
        stack.enter_context(registry.pretend(target))
        stack.enter_context(_tables_of(target, shipped, own))
        for scope, config in (configs or {}).items():
            stack.enter_context(registry.override(scope, config))
        stack.enter_context(observing(Record()))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(LauncherMode())
        sample = entry.sample(tuple(sizes), dtype, torch.device("cpu"), None, **(options or {}))
        outputs = entry.function(*sample.args, **sample.kwargs)
        outputs = [o for o in _tensors(outputs) if o.requires_grad]
        inputs = [t for t in _tensors((sample.args, sample.kwargs)) if t.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, inputs, [torch.empty_like(o) for o in outputs], allow_unused=True)
    return found


def _stand_in(parameter: Any, value: Any) -> Any:
    """What stands for an argument: equal for values that Triton compiles alike."""
    if parameter.is_constexpr or value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        wide = not -_INT32 <= value < _INT32
        if value == 1 and not parameter.do_not_specialize:
            return 1
        aligned = value % 16 == 0 and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        return (1 << 40 if wide else 16) + (0 if aligned else 1)
    if isinstance(value, float):
        return 0.5
    aligned = value.storage_offset() * value.itemsize % 16 == 0
    return "ptr", str(value.dtype).removeprefix("torch."), aligned, value.untyped_storage().nbytes() < _INT32


def _tables_of(target: Target, shipped: bool, own: bool) -> contextlib.AbstractContextManager[None]:
    """The registry with no tables of `target` but the shipped ones, the user's own, or both."""
    from . import store

    layers = []
    if shipped or own:
        layers = [one for one in store.layers(target) if (shipped if one[0].startswith("shipped") else own)]
    return registry.only_tables(target, layers)


def _tensors(tree: Any) -> list["torch.Tensor"]:
    import dataclasses

    import torch

    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    elif dataclasses.is_dataclass(tree):
        tree = tuple(getattr(tree, f.name) for f in dataclasses.fields(tree))
    return [t for part in tree for t in _tensors(part)] if isinstance(tree, (tuple, list)) else []


# -- compiling -------------------------------------------------------------------------------------------------------


def certify(launches: Iterable[Launch], workers: "Workers") -> Iterator[Certificate]:
    """One Certificate a launch, in order of completion; launches that Triton compiles alike are compiled once."""
    groups: dict[tuple, list[Launch]] = {}
    for launch in launches:
        groups.setdefault(launch.same(), []).append(launch)
    known = list(groups.values())
    for index, answer in workers.run([_job(group[0]) for group in known]):
        for launch in known[index]:
            yield certificate_from(launch, answer)


def certificate_from(launch: Launch, answer: Mapping[str, Any]) -> Certificate:
    """The Certificate of a worker's answer (or of `Certificate.to_json`)."""
    resources = Resources.from_json(answer["resources"]) if answer.get("resources") else None
    moved = tuple(Access(*access) for access in answer.get("accesses", ()))
    said = answer.get("error", ""), answer["seconds"], moved, answer.get("unread", ""), answer.get("level", "binary")
    return Certificate(launch, resources, *said)


def _job(launch: Launch) -> dict[str, Any]:
    target = {**launch.target.to_json(), "warp_sizes": list(launch.target.warp_sizes)}
    return {
        "target": target,
        "kernel": launch.kernel,
        "args": launch.args,
        "options": dict(launch.options),
        "config": launch.config.to_json(),
    }


class Workers:
    """Processes that compile, one kernel at a time each. A context manager.

    count: processes; timeout: seconds after which a compilation counts as hung and its process is replaced
    """

    def __init__(self, count: int = 2, timeout: float = 300.0) -> None:
        self.count, self.timeout = count, timeout
        self._idle: list[_Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_exception: Any) -> None:
        while self._idle:
            self._idle.pop().stop()

    def run(self, jobs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index of the job, its answer) as they come: `{"resources": ..., "seconds": ...}` or `{"error": ...}`."""
        waiting = deque(enumerate(jobs))
        busy: dict[_Worker, int] = {}
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or busy:
                    while waiting and len(busy) < self.count:
                        worker = self._idle.pop() if self._idle else _Worker()
                        index, job = waiting.popleft()
                        worker.send(job)
                        busy[worker] = index
                        selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                    deadline = min(worker.since for worker in busy) + self.timeout
                    ready = {key.data for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                    late = {w for w in busy if w not in ready and time.monotonic() - w.since >= self.timeout}
                    for worker in ready | late:
                        selector.unregister(worker.process.stdout)
                        index = busy.pop(worker)
                        answer = (
                            worker.receive() if worker in ready else worker.kill(f"no end after {self.timeout:.0f} s")
                        )
                        if worker.process.poll() is None:
                            self._idle.append(worker)
                        yield index, answer
            finally:
                for worker in busy:
                    worker.kill("abandoned")


class _Worker:
    """A process running this module; jobs and answers are lines of JSON, its stderr is kept for the last words."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "LIGER_HW_INTERPRET")}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._words = tempfile.TemporaryFile()
        command = [sys.executable, "-c", f"from {__name__} import _serve; _serve()"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env=environment
        )
        self.since = 0.0

    def send(self, job: Mapping[str, Any]) -> None:
        self.since = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # a dead worker is found when it is asked for its answer
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.process.wait()
        return self.kill(
            f"the compiler ended its process with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        )

    def kill(self, why: str) -> dict[str, Any]:
        seconds = time.monotonic() - self.since
        self.stop()
        return {"error": why, "seconds": seconds}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._words.close()


# -- in a worker -----------------------------------------------------------------------------------------------------


def _serve() -> None:
    """Compile what comes in on stdin until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints must not get between the answers
    for line in sys.stdin.buffer:
        started = time.monotonic()
        try:
            answer = _compile(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".strip()[:2000]}
        answer["seconds"] = time.monotonic() - started
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _compile(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile one job: `resources`, and `accesses` or why those cannot be told (`unread`)."""
    target = Target(**{**job["target"], "warp_sizes": tuple(job["target"]["warp_sizes"])})
    vendor = backend(target.vendor)
    module, name = job["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    args = [_Pointer(*arg[1:]) if isinstance(arg, list) else arg for arg in job["args"]]
    kept = [i for i, p in enumerate(kernel.params) if not p.is_constexpr and args[i] is not None]
    kept = [i for i in kept if args[i] != 1 or kernel.params[i].do_not_specialize]
    compiled, answer = _built(target, vendor, kernel, args, job["options"]), {}
    found: list[Access] = []
    try:
        found = accesses(compiled.asm["ttir"], kept)
        answer["accesses"] = [access.to_json() for access in found]
    except ValueError as error:
        answer["unread"] = str(error)
    if set(compiled.asm) == {"ttir"}:
        config = LaunchConfig.from_json(job["config"])
        resources, answer["level"] = ttir.estimate(compiled.asm["ttir"], found, target, config, job["options"]), "ttir"
    else:
        resources, answer["level"] = vendor.resources(target, compiled), "binary"
    return {"resources": resources.to_json(), **answer}


def _built(target: Target, vendor: Any, kernel: Any, args: list[Any], options: Mapping[str, Any]) -> Any:
    """The kernel as far as the Triton at hand can build it: a binary, or its TTIR where it has no compiler."""
    from triton.backends.compiler import GPUTarget

    goal = vendor.triton_target(target)
    if goal is None:
        return ttir.lower(kernel, args, options, _device(GPUTarget("cuda", 80, 32), "front half only"))
    with ttir.standing_in(_device(goal)):
        return kernel.warmup(*args, grid=(1,), **options)


class _Pointer:
    """Looks to Triton's argument binder like a tensor."""

    def __init__(self, dtype: str, aligned: bool, small: bool) -> None:
        import torch

        self.dtype = getattr(torch, dtype)
        self._address, self._range = 0 if aligned else 4, 1 << 20 if small else 1 << 40

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return self._range


class _device:
    """Stands for Triton's driver. Each target is a device of its own number, as the JIT keeps its kernels by device."""

    _numbers: dict[str, int] = {}

    def __init__(self, target: Any, purpose: str = "") -> None:
        self.target = target
        self.number = self._numbers.setdefault(f"{target}{purpose}", len(self._numbers))

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0
