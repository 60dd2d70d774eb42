"""Ahead-of-time compilation of an op's launches for a GPU that is not here, with the resources of each kernel.

`trace` runs the launchers of an op's forward and backward on fake tensors while the registry pretends to be the target.
Each launch is recorded with what Triton specialises it on: dtypes, pointer alignment and range, integers that are 1,
divisible by 16 or wide. `certify` compiles the recorded launches with the stock Triton compiler in worker processes and
reads registers, spills, shared memory, occupancy, access widths and the instruction mix from the binary. An abort or a
hang of the compiler is recorded as an error. If the installed Triton has no compiler for the target, kernels are
lowered to TTIR, Triton's first, vendor-neutral form, and resources are estimated.

    with CompilePool(2) as pool:
        for certificate in certify(trace("rms_norm", (8192, 4096), torch.bfloat16, known_target("gfx942")), pool):
            print(certificate)
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

from .. import registry
from ..backends import LaunchConfig, Target, backend
from ..backends.base import Resources
from . import store, ttir
from .ttir import Access

if TYPE_CHECKING:
    import torch

_INT32 = 1 << 31


@dataclass(frozen=True)
class Launch:
    """One recorded launch.

    kernel: `module:name`; options: the compiler's; grid: programs
    args: for each argument `("ptr", dtype, aligned, within 2 GiB)`, a number that Triton specialises in the same way or
    a tuple of them, None, or a constexpr's value
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
        """Equal for launches that Triton compiles alike."""
        return self.target.arch, self.kernel, self.args, self.options


@dataclass(frozen=True)
class Certificate:
    """The result of compiling a launch: `resources`, or the compiler's `error`; `illegal` says why it must not run.

    accesses: the loads and stores of its tensors; unread: why they cannot be read, or ""
    level: how far it was compiled: `binary`, or `ttir`, where `resources` are an estimate
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
            "accesses": [list(access) for access in self.accesses],
            **({"unread": self.unread} if self.unread else {}),
        }

    def __str__(self) -> str:
        head = f"{self.launch.target.arch} {self.launch.tunable} {self.launch.key} {self.launch.layer}"
        r = self.resources
        if r is None:
            return f"{head}: {self.error}"
        what = f"{r.registers} registers, {r.spills} spilled, {r.shared} B shared, {r.threads} threads"
        return f"{head}: {what}, occupancy {r.occupancy:.0%}{', ILLEGAL: ' + self.illegal if self.illegal else ''}"


# -- what is compiled to prove an op ---------------------------------------------------------------------------------

DEPTHS = ("quick", "deep", "full")


@dataclass(frozen=True)
class Case:
    """One forward and backward: `workload` names `sizes`."""

    workload: str
    sizes: tuple[int, ...]
    dtype: str
    options: Mapping[str, Any]


def trace_cases(
    op: registry.Op, target: Target, depth: str, dtypes: Sequence[str] | None = None, shipped: bool = True
) -> Iterator[tuple[Case, Launch]]:
    """Each case of the op at a depth with each of its launches; nothing if the target cannot run the op.

    quick: the first workload in bf16. deep: that with every option set, and in fp32. full: every workload with every
    option set, in bf16 and fp32. dtypes: instead of the depth's
    """
    import torch

    if op.why_not(target):
        return
    workloads = list(op.workloads.items())
    for name, sizes in workloads if depth == "full" else workloads[:1]:
        for dtype in dtypes or (("bfloat16",) if depth == "quick" else ("bfloat16", "float32")):
            every = depth == "full" or (depth == "deep" and dtype == "bfloat16")
            for options in op.options if every else op.options[:1]:
                case = Case(name, tuple(sizes), dtype, options)
                for launch in trace(op.name, sizes, getattr(torch, dtype), target, options, shipped=shipped):
                    yield case, launch


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
    user: bool = False,
) -> list[Launch]:
    """The launches of one forward and backward of `op` at problem sizes `sizes` on `target`, in their order. Nothing
    runs and nothing is compiled.

    options: of the op's `sample`; configs: configurations to force, by op or `op.variant`
    shipped, user: whether the shipped tables, and the user's cache and lock file, answer before the heuristic
    """
    import torch

    from ..runtime import triton_import as _triton
    from ..runtime.launch import tuned_values
    from .record import foresee

    _triton.require()
    if _triton.INTERPRET:
        raise RuntimeError("kernels are interpreted in this process; compile in one without LIGER_HW_INTERPRET")
    launches: list[Launch] = []

    def note(plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        values = (*args, *flags, *tuned_values(plan, kernel, args, flags))
        launches.append(
            Launch(
                *(target, plan.tunable.name, plan.key, plan.layer, plan.config),
                kernel=f"{kernel.fn.__module__}:{kernel.fn.__name__}",
                args=stand_ins(kernel, values),
                options=tuple(sorted(plan.options.items())),
                grid=tuple(grid),
                sizes=tuple(value.nbytes if isinstance(value, torch.Tensor) else 0 for value in values),
            )
        )

    with contextlib.ExitStack() as stack:
        for scope, config in (configs or {}).items():
            stack.enter_context(registry.override(scope, config))
        table = store.read(target) if shipped or user else {}
        layers = {
            name: [one for one in entries if (shipped if one.layer.startswith("shipped") else user)]
            for name, entries in table.items()
        }
        foresee(op, sizes, dtype, target, note, options, layers)
    return launches


def stand_ins(kernel: Any, values: tuple) -> tuple:
    """`Launch.args` of a kernel's arguments."""
    return tuple(_stand_in(parameter, value) for parameter, value in zip(kernel.params, values))


def _stand_in(parameter: Any, value: Any) -> Any:
    """The record of an argument: equal for values that Triton compiles alike."""
    if parameter.is_constexpr or value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, tuple):
        parts = [_stand_in(parameter, part) for part in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
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


# -- compiling -------------------------------------------------------------------------------------------------------


def certify(launches: Iterable[Launch], pool: Any) -> Iterator[Certificate]:
    """One Certificate a launch, in their order; launches that Triton compiles alike are compiled once."""
    launches = list(launches)
    for launch in launches:
        pool.submit(launch.same(), "compile", launch)
    for launch in launches:
        yield certificate_from(launch, pool.wait(launch.same()))


def certificate_from(launch: Launch, answer: Mapping[str, Any]) -> Certificate:
    """The Certificate of a worker's answer (or of `Certificate.to_json`)."""
    resources = answer.get("resources")
    return Certificate(
        launch,
        resources=Resources.from_json(resources) if isinstance(resources, dict) else resources,
        error=answer.get("error") or answer.get("unknown", ""),
        seconds=answer.get("seconds", 0.0),
        accesses=tuple(Access(*access) for access in answer.get("accesses", ())),
        unread=answer.get("unread", ""),
        level=answer.get("level", "binary"),
    )


def compiled(launch: Launch) -> dict[str, Any]:
    """`resources`, `level`, and `accesses` or why those cannot be read (`unread`); or the compiler's `error`."""
    target, unread = launch.target, ""
    try:
        kernel = build(target, launch.kernel, launch.args, dict(launch.options))
        try:
            accesses = ttir.accesses(kernel.asm["ttir"], _kept(launch.kernel, launch.args))
        except ValueError as error:
            accesses, unread = [], str(error)
        if set(kernel.asm) == {"ttir"}:
            options = dict(launch.options)
            resources, level = ttir.estimate(kernel.asm["ttir"], accesses, target, launch.config, options), "ttir"
        else:
            resources, level = backend(target.vendor).resources(target, kernel), "binary"
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".strip()[:2000]}
    return {"resources": resources, "level": level, "accesses": accesses, "unread": unread}


def build(target: Target, kernel: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A recorded kernel, compiled as far as the installed Triton can: an object whose `asm` has the stages' results."""
    goal = backend(target.vendor).triton_target(target)
    if goal is None:
        return lower(kernel, args, options)
    with driver_stub(goal):
        return _kernel(kernel).warmup(*arguments(args), grid=(1,), **options)


def lower(kernel: str, args: Sequence[Any], options: Mapping[str, Any], capability: int = 80) -> Any:
    """A recorded kernel lowered by Triton's front half: an object whose `asm` has only the TTIR.

    The front half is the same for every vendor: it specialises the kernel, checks types and shapes, inlines and
    simplifies. capability: the CUDA compute capability to lower for.
    """
    from triton.backends.compiler import GPUTarget

    function = _kernel(kernel)
    front = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    with driver_stub(GPUTarget("cuda", capability, 32), "front half only") as stub:
        function.device_caches[stub.get_current_device()]  # makes Triton's binder, which sets `kernel.compile`
        compiler, function.compile = function.compile, _front_half
        try:
            return function.warmup(*arguments(args), grid=(1,), **front)
        finally:
            function.compile = compiler


def _front_half(source: Any, target: Any, options: Mapping[str, Any], **_more: Any) -> Any:
    """`triton.compile`, ended after the stage `ttir`."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    front = make_backend(target)
    parsed = front.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    front.load_dialects(context)
    stages: dict[str, Any] = {}
    front.add_stages(stages, parsed, source.language)
    codegen, modules = front.get_codegen_implementation(parsed), front.get_module_map()
    module = source.make_ir(target, parsed, codegen, modules, context)
    metadata = {"target": target, **parsed.__dict__}
    return SimpleNamespace(asm={"ttir": str(stages["ttir"](module, metadata))}, metadata=SimpleNamespace(**metadata))


def _kernel(name: str) -> Any:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _kept(kernel: str, args: Sequence[Any]) -> list[int]:
    """The positions of the parameters that remain after Triton specialised the kernel; of a tuple once for each
    number in it."""
    params = _kernel(kernel).params
    return [
        i
        for i, (param, arg) in enumerate(zip(params, args))
        for number in _numbers_in(arg)
        if not param.is_constexpr and number is not None and (param.do_not_specialize or number != 1)
    ]


def _numbers_in(arg: Any) -> Iterator[Any]:
    if isinstance(arg, tuple) and not _is_pointer(arg):
        for part in arg:
            yield from _numbers_in(part)
    else:
        yield arg


def arguments(args: Sequence[Any]) -> tuple:
    """Arguments for Triton's `warmup` in place of a launch's."""
    return tuple(_Pointer(*arg[1:]) if _is_pointer(arg) else arg for arg in args)


def _is_pointer(arg: Any) -> bool:
    return isinstance(arg, tuple) and arg[0] == "ptr"


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


_device_numbers: dict[str, int] = {}
"""Target -> device number: Triton keeps kernels by device, so each target is compiled as another device."""


@contextlib.contextmanager
def driver_stub(target: Any, purpose: str = "") -> Iterator[Any]:
    """A block in which Triton's driver is a stub whose device is `target`."""
    from triton.runtime import driver

    number = _device_numbers.setdefault(f"{target}{purpose}", len(_device_numbers))
    stub = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: number, get_current_stream=lambda device: 0
    )
    slot = "_active" if "_active" in vars(driver) else "active"  # the latter in Triton 3.4
    before = vars(driver)[slot]
    driver.set_active(stub)
    try:
        yield stub
    finally:
        setattr(driver, slot, before)
