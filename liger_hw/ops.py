"""The table of ops, the classes that describe them (`Op`, `Tunable`, `Plan`, `Entry`), and keys that kernels share.

`register_file(__name__, ...)` at the end of an op's file adds the op; tests, bench, tuner and CLI iterate over `ops()`.
Callers import these names from `registry`.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping

from . import env
from .backends import VENDORS, Backend, LaunchConfig, Target, backend, target_of
from .kernels import EXPORTS, home_of

if TYPE_CHECKING:
    import torch

Key = tuple[int, ...]
"""The key of a launch: problem sizes, rounded by the tunable's `key` function, and bytes per element."""


@dataclass(frozen=True)
class Entry:
    """A configuration in a stored table or from another layer of the registry.

    provenance: at least `{"kind": ...}`; `autotune/store.py` lists the kinds that are stored
    version: the `Tunable.version` for which it was stored, the only one for which it is used
    source: file and line from which it was read; layer: its layer of the registry
    rejected: why the registry must not use it, or ""
    """

    config: LaunchConfig
    provenance: Mapping[str, Any] = field(default_factory=dict)
    version: int = 1
    source: str = ""
    layer: str = ""
    rejected: str = ""

    @property
    def kind(self) -> str:
        return str(self.provenance.get("kind", ""))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.to_json(), "provenance": dict(self.provenance)}


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (1 for n <= 1). `triton.next_power_of_2` is many times slower."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def row_key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    """Key of a row kernel: columns rounded up to a power of two, log2 of the rows rounded up, bytes per element."""
    return next_power_of_2(n_cols), (n_rows - 1).bit_length() if n_rows > 1 else 0, itemsize


def columns_key(*sizes: int) -> Key:
    """Key without rows, for sizes (..., columns, bytes per element): columns rounded up to a power of two, and bytes.

    For kernels that always have enough rows to fill the device.
    """
    *_, n_cols, itemsize = sizes
    return next_power_of_2(n_cols), itemsize


def expect(value: Any, kinds: Any, name: str, expected: str) -> None:
    """Raise `TypeError` unless `value` is of these types. expected: in words, for the error"""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}: {value!r}")


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter in this process."""
    from .runtime.triton_import import INTERPRET

    return INTERPRET


@functools.cache
def _device_types() -> tuple[str, ...]:
    return tuple({backend(vendor).device_type: None for vendor in VENDORS if vendor != "cpu"})


def is_capturing_or_tracing() -> bool:
    """Whether a graph is being captured or torch.compile is tracing. No file may then be opened."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    for name in _device_types():
        module = getattr(torch, name, None)
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is not None and module.is_initialized() and capturing():
            return True
    return False


pretending: list[tuple[Target, Any]] = []
"""(target, table to use instead of the stored one) of each open `registry.pretend`, the innermost last."""


def pretended() -> Target | None:
    """The target of the innermost open `registry.pretend`."""
    for target, _ in pretending[-1:]:  # a slice, since another thread may end its block meanwhile
        return target
    return None


def backend_of(device: "torch.device") -> Backend:
    """The Backend that serves a torch device."""
    return backend((pretended() or target_of(device)).vendor)


def tile_space(
    target: Target,
    tiles: Iterable[Mapping[str, int]],
    warps: Iterable[int],
    *,
    per_thread: tuple[int, int],
    stages: Iterable[int] = (1,),
    ctas: Iterable[int] = (0,),
    hints: Iterable[str] = ("none",),
    width: int = 1,
    staged_bytes: int = 0,
) -> list[LaunchConfig]:
    """Candidates for the tuner: each of `tiles` (a kernel's blocks) with every choice of the other options.

    per_thread: minimum and maximum of a tile's elements per thread
    width: size of the tile in the dimensions that are not blocks
    staged_bytes: shared memory per element of a tile, for each stage after the first
    Persistent grids (`ctas` programs per multiprocessor) whose programs cannot all be resident are left out.
    """
    candidates = []
    for blocks, n_warps, n_stages, n_ctas, hint in itertools.product(tiles, warps, stages, ctas, hints):
        elements, threads = width * math.prod(blocks.values()), n_warps * target.warp_size
        resident = (
            n_ctas * threads <= target.max_threads_per_multiprocessor
            and staged_bytes * (n_stages - 1) * elements * max(1, n_ctas) <= target.shared_memory
        )
        if per_thread[0] <= elements // threads <= per_thread[1] and resident:
            candidates.append(LaunchConfig(blocks, n_warps, n_stages, n_ctas, hint))
    return candidates


class Plan:
    """A resolved launch: the configuration, lowered to arguments of the kernel and of Triton.

    layer, config, provenance: of the Entry that the registry chose
    constexprs: values of a kernel's tunable parameters by name: the configuration's blocks, STAGES, LOAD_HINT (the
    cache hint), LOAD_EVICT (the hint if it is an eviction policy, which stores take too), FAST_LOG2, and DEPENDENT
    (whether programmatic dependent launch is used)
    options: the compiler's keywords (num_warps, num_stages, and the vendor's)
    programs: number of programs of a persistent grid, else 0
    compiled: specialisation -> compiled kernel (`runtime/launch.py`), or None if Triton makes the launches
    """

    __slots__ = ("tunable", "target", "device", "key", "layer", "config", "provenance")
    __slots__ += ("constexprs", "options", "programs", "compiled")

    def __init__(self, tunable: "Tunable", target: Target, device: Any, key: Key, chosen: Entry) -> None:
        vendor, config = backend(target.vendor), chosen.config
        self.tunable, self.target, self.device, self.key = tunable, target, device, key
        self.layer, self.config, self.provenance = chosen.layer, config, chosen.provenance
        cache, evict = vendor.load_hint(config.hint)
        interpreted = interpreting()
        dependent = (
            vendor.dependent_launch(target)
            if tunable.dependent_launch and tunable.dependent_launch(key) and not interpreted
            else {}
        )
        self.constexprs = {
            **config.blocks,
            "STAGES": config.num_stages,
            "LOAD_HINT": cache or evict,
            "LOAD_EVICT": evict,
            "FAST_LOG2": vendor.fast_log2 and not interpreted,
            "DEPENDENT": bool(dependent),
        }
        self.options = vendor.lower(config) | dependent
        self.programs = config.ctas_per_mp * target.multiprocessors
        fast = vendor.fast_launch and not interpreted and env.LIGER_HW_FAST_LAUNCH
        self.compiled: dict | None = {} if fast else None

    @property
    def name(self) -> tuple[str, str, Key]:
        """(op, variant, key): the name of its stored configurations."""
        return self.tunable.op, self.tunable.variant, self.key

    def __repr__(self) -> str:
        return f"Plan({self.tunable.name} {self.key} on {self.target.arch}: {self.layer} {self.config.to_text()})"


class Tunable:
    """One kernel launch that has a configuration, named `op.variant`, for example `rms_norm.fwd`.

    kernels: the jit functions that it launches
    version: increase it when the kernels change so that stored configurations may no longer be the best; an entry is
    used only for its version (`ci/kernel_digests.py` records the code of each version)
    key: (problem sizes..., itemsize) -> Key, which launchers call too; dims: the names of the sizes
    heuristic, safe: (target, key) -> LaunchConfig; the safe one must be legal on every Target
    space: (target, key) -> candidates for the tuner
    neutral: options that cannot change a result's bits; `deterministic` fixes all others
    valid: (config, key) -> why the configuration cannot be used for this key, or None
    dependent_launch: key -> whether its kernels, which start with `wait_for_previous(DEPENDENT)`, use programmatic
    dependent launch (`runtime/dependent_launch.py`)
    """

    resolve: Callable[["Tunable", Any, Key], Plan]
    """Makes the plan of a device and key; set by `registry`."""

    def __init__(
        self,
        op: str,
        variant: str,
        *,
        kernels: tuple[Any, ...],
        key: Callable[..., Key],
        dims: tuple[str, ...],
        heuristic: Callable[[Target, Key], LaunchConfig],
        safe: Callable[[Target, Key], LaunchConfig],
        space: Callable[[Target, Key], Iterable[LaunchConfig]],
        neutral: frozenset[str] = frozenset({"num_stages", "hint"}),
        valid: Callable[[LaunchConfig, Key], str | None] | None = None,
        dependent_launch: Callable[[Key], bool] | None = None,
        version: int = 1,
    ) -> None:
        self.op, self.variant, self.name = op, variant, f"{op}.{variant}"
        self.kernels, self.key, self.dims = kernels, key, dims
        self.heuristic, self.safe, self.space = heuristic, safe, space
        self.neutral, self.valid, self.dependent_launch, self.version = neutral, valid, dependent_launch, version
        self.plans: dict[tuple[Any, Key], Plan] = {}

    def plan(self, device: "torch.device", key: Key) -> Plan:
        """The resolved launch for a device and a key."""
        plan = self.plans.get((device, key))
        return plan if plan is not None else self.resolve(device, key)

    def illegal(self, target: Target, key: Key, config: LaunchConfig) -> str | None:
        """Why `config` cannot be launched for `key` on `target`, or None."""
        try:
            block_names = [set(choose(target, key).blocks) for choose in (self.heuristic, self.safe)]
        except (ArithmeticError, IndexError, MemoryError, TypeError, ValueError):  # a stored key may be anything
            return f"{key} is not a key of {self.name}"
        if set(config.blocks) not in block_names:  # each block is a constexpr parameter of the kernel
            return f"blocks must be {' and '.join(sorted(block_names[0]))}, got {dict(config.blocks)}"
        why_invalid = backend(target.vendor).illegal(target, config)
        if why_invalid is None and self.valid is not None:
            why_invalid = self.valid(config, key)
        return why_invalid

    def serves(self, target: Target, key: Key) -> bool:
        """Whether the safe configuration is legal for this key, so that the registry can always fall back to it."""
        return not self.illegal(target, key, self.safe(target, key))


@dataclass(frozen=True)
class Op:
    """An op, as its file registers it.

    function: the public `liger_<op>`
    reference: its specification in plain differentiable torch; computes in fp32, or in fp64 if its inputs are fp64
    workloads: name -> problem sizes, in the order of the tunables' `dims`
    sample: (sizes, dtype, device, generator, **options) -> Sample, inputs for tests, bench and tuner
    options: keywords of `sample` for each variation that the shared tests run; the first is the default
    small: small problem sizes for tests, including odd ones; if empty, the first workload is shrunk
    why_not: target -> why it cannot run the op, or ""
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    tunables: tuple[Tunable, ...]
    workloads: Mapping[str, tuple[int, ...]]
    sample: Callable[..., "Sample"]
    options: tuple[Mapping[str, Any], ...] = ({},)
    small: tuple[tuple[int, ...], ...] = ()
    why_not: Callable[[Target], str] = lambda target: ""

    @property
    def small_sizes(self) -> tuple[int, ...]:
        return self.small[0] if self.small else tuple(min(n, 256) for n in next(iter(self.workloads.values())))


@dataclass
class Sample:
    """One call of an op: `op.function(*args, **kwargs)`, and `op.reference` with the same arguments.

    Gradients are checked for every floating-point tensor in `args` that requires grad.
    reduction, grad_reduction: the most terms that are summed for an output element and for a gradient element; tests
    derive tolerances from them
    moved: bytes that forward and backward must move; floors are computed from them
    exact: further arguments of the reference in fp64: roundings in the op's definition at which the result jumps
    float8: whether results are FP8 products, which a device sums with fewer bits than fp32 has and returns in bf16
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    reduction: int = 1
    grad_reduction: int = 1
    moved: int = 0
    exact: dict[str, Any] = field(default_factory=dict)
    float8: bool = False


def normal(dtype: "torch.dtype", device: Any, generator: "torch.Generator") -> Callable[..., "torch.Tensor"]:
    """A function (*shape) -> standard normal values that require a gradient, drawn in fp32 and rounded: all dtypes get
    the same values."""
    import torch

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)
        return values.to(dtype).requires_grad_()

    return drawn


_ops: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an op to the table. Raises `ValueError` if the name is taken or the op has no workloads."""
    if op.name in _ops:
        raise ValueError(f"op {op.name!r} is registered twice")
    if not op.workloads:
        raise ValueError(f"op {op.name!r} has no workloads; tests, bench and tuner draw on them")
    _ops[op.name] = op
    env.know_op_name(op.name)
    return op


def register_file(module: str, **more: Any) -> Op:
    """Add the op of a kernel file: `register_file(__name__, tunables=...)` at its end.

    The op has the file's name. The file defines `liger_<op>`, `<op>_reference`, `WORKLOADS` and `sample`.
    more: the other fields of `Op`
    """
    contents, name = vars(sys.modules[module]), module.rpartition(".")[2]
    function, reference = contents[f"liger_{name}"], contents[f"{name}_reference"]
    workloads, sample = contents["WORKLOADS"], contents["sample"]
    return register(Op(name, function, reference, workloads=workloads, sample=sample, **more))


def registered() -> tuple[Tunable, ...]:
    """The tunables of all ops whose files are imported."""
    return tuple(tunable for op in tuple(_ops.values()) for tunable in op.tunables)


def plans() -> list[Plan]:
    """Every plan that this process has resolved."""
    return [plan for tunable in registered() for plan in list(tunable.plans.values())]


def ops() -> Mapping[str, Op]:
    """Every op, by name; imports the kernel files on first use."""
    for module in EXPORTS:
        import_module(f"{__package__}.kernels.{module}")
    return dict(sorted(_ops.items()))


def get_op(name: str) -> Op:
    """The op of this name; imports only its file. For an unknown name: `ValueError` with similar names."""
    expect(name, str, "op", "the name of an op")
    if name in _ops:
        return _ops[name]
    home = home_of(name)
    if home is not None:
        import_module(home)
    if name not in _ops:
        import difflib

        table = ops()
        near = difflib.get_close_matches(name, table, 3)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(table)}"
        raise ValueError(f"unknown op {name!r}; {hint}")
    return _ops[name]


def tunables() -> dict[str, Tunable]:
    """Every tunable of every op, by its full name (`rms_norm.bwd`); imports the kernel files on first use."""
    return {tunable.name: tunable for op in ops().values() for tunable in op.tunables}


def get_tunable(name: str) -> Tunable:
    """The tunable of this full name (`rms_norm.bwd`); imports only the op's file. Raises `ValueError`."""
    op = get_op(name.split(".")[0])
    for tunable in op.tunables:
        if tunable.name == name:
            return tunable
    raise ValueError(f"unknown kernel {name!r}; {op.name} has {', '.join(one.name for one in op.tunables)}")
