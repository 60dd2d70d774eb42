"""Ahead-of-time compilation of an op's launches for a GPU that is not here, with the resources of each kernel.

`trace` runs the launchers of an op's forward and backward on fake tensors, with the registry set to the target. A
launch's record has what Triton specialises on: dtypes, pointer alignment and range, and whether an integer is 1,
divisible by 16 or wide. `certify` compiles the launches in worker processes with the stock Triton and reads registers,
spills, shared memory, occupancy, access widths and the instruction mix from the binary. A compiler that aborts or hangs
is recorded as an error. If the installed Triton has no compiler for the target, kernels are lowered to TTIR, Triton's
vendor-neutral first IR, and resources are estimated.

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

    kernel: `module:name`; options: the compiler's; grid: numbers of programs
    args: `("ptr", dtype, aligned, within 2 GiB)` for a tensor; a number that Triton specialises in the same way; a
    tuple of these; None; or a constexpr's value
    sizes: bytes of each tensor argument, 0 for other arguments
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

    def compile_key(self) -> tuple:
        """Equal for launches that Triton compiles alike."""
        return self.target.arch, self.kernel, self.args, self.options


@dataclass(frozen=True)
class Certificate:
    """The result of compiling a launch: `resources`, or the compiler's `error`. `illegal`: why it must not be launched.

    accesses: the kernel's loads and stores; unread: why they could not be read from the TTIR, or ""
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


# -- the cases of an op ----------------------------------------------------------------------------------------------

DEPTHS = ("quick", "deep", "full")


@dataclass(frozen=True)
class Case:
    """One forward and backward. workload: the name of `sizes`"""

    workload: str
    sizes: tuple[int, ...]
    dtype: str
    options: Mapping[str, Any]


def trace_cases(
    op: registry.Op, target: Target, depth: str, dtypes: Sequence[str] | None = None, shipped: bool = True
) -> Iterator[tuple[Case, Launch]]:
    """(case, launch) for each launch of each case of the op; nothing if the target cannot run the op.

    depth: `quick` is the first workload in bf16; `deep` adds the op's other options, and fp32; `full` is every workload
    with all options in bf16 and fp32. dtypes: replace the depth's
    """
    import torch

    if op.why_not(target):
        return
    workloads = list(op.workloads.items())
    for name, sizes in workloads if depth == "full" else workloads[:1]:
        for dtype in dtypes or (("bfloat16",) if depth == "quick" else ("bfloat16", "float32")):
            all_options = depth == "full" or (depth == "deep" and dtype == "bfloat16")
            for options in op.options if all_options else op.options[:1]:
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
    """The launches, in order, of one forward and backward of `op` on `target`. Nothing is run or compiled.

    sizes: problem sizes; options: of the op's `sample`; configs: configurations to force, by op or `op.variant`
    shipped, user: whether the shipped tables, and the user's cache and lock file, are used before the heuristic
    """
    import torch

    from ..runtime import triton_import as _triton
    from ..runtime.launch import tuned_values
    from .record import trace_launches

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
        trace_launches(op, sizes, dtype, target, note, options, layers)
    return launches


def stand_ins(kernel: Any, values: tuple) -> tuple:
    """`Launch.args` for a kernel's arguments."""
    return tuple(_stand_in(parameter, value) for parameter, value in zip(kernel.params, values))


def _stand_in(parameter: Any, value: Any) -> Any:
    """An element of `Launch.args`, equal for all values for which Triton compiles the same kernel."""
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
    """The Certificate of each launch, in order. Launches with one `compile_key` are compiled once."""
    launches = list(launches)
    for launch in launches:
        pool.submit(launch.compile_key(), "compile", launch)
    for launch in launches:
        yield certificate_from(launch, pool.wait(launch.compile_key()))


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
    """The fields of a launch's Certificate that compiling it gives, or only the compiler's `error`."""
    target, unread = launch.target, ""
    try:
        kernel = build(target, launch.kernel, launch.args, dict(launch.options))
        try:
            accesses = ttir.accesses(kernel.asm["ttir"], _ttir_positions(launch.kernel, launch.args))
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
    """Compile a recorded kernel as far as the installed Triton can; an object whose `asm` has the IR of each stage."""
    goal = backend(target.vendor).triton_target(target)
    if goal is None:
        return lower(kernel, args, options)
    with driver_stub(goal):
        return _kernel(kernel).warmup(*arguments(args), grid=(1,), **options)


def lower(kernel: str, args: Sequence[Any], options: Mapping[str, Any], capability: int = 80) -> Any:
    """Lower a recorded kernel by Triton's front end. Returns an object whose `asm` has only the TTIR.

    The front end is the same for every vendor: it specialises the kernel, checks types and shapes, inlines and
    simplifies. capability: the CUDA compute capability to lower for.
    """
    from triton.backends.compiler import GPUTarget

    function = _kernel(kernel)
    front = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    with driver_stub(GPUTarget("cuda", capability, 32), "front end only") as stub:
        function.device_caches[stub.get_current_device()]  # makes Triton's binder, which sets `kernel.compile`
        compiler, function.compile = function.compile, _front_end
        try:
            return function.warmup(*arguments(args), grid=(1,), **front)
        finally:
            function.compile = compiler


def _front_end(source: Any, target: Any, options: Mapping[str, Any], **_unused: Any) -> Any:
    """`triton.compile` up to the stage `ttir`."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    compiler = make_backend(target)
    parsed = compiler.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    stages: dict[str, Any] = {}
    compiler.add_stages(stages, parsed, source.language)
    codegen, modules = compiler.get_codegen_implementation(parsed), compiler.get_module_map()
    module = source.make_ir(target, parsed, codegen, modules, context)
    metadata = {"target": target, **parsed.__dict__}
    return SimpleNamespace(asm={"ttir": str(stages["ttir"](module, metadata))}, metadata=SimpleNamespace(**metadata))


def _kernel(name: str) -> Any:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _ttir_positions(kernel: str, args: Sequence[Any]) -> list[int]:
    """For each parameter of the kernel's TTIR, its position among the kernel's parameters: constexprs and numbers that
    Triton makes constants are missing, and a tuple stands once for each of its numbers."""
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
    """Arguments for Triton's `warmup`, from `Launch.args`."""
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
"""Target and purpose -> device number. Triton caches kernels by device, so each pair gets a device of its own."""


@contextlib.contextmanager
def driver_stub(target: Any, purpose: str = "") -> Iterator[Any]:
    """Replace Triton's driver by a stub whose current device is `target`."""
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
