"""The table of ops: what a kernel file registers, and the keys that kernels share.

`register(Op(...))` at the end of each `kernels/<op>.py` adds a line; tests, bench, tuner and CLI iterate over `ops()`.
Everything here is also a name of `registry`, which is where callers take it from.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Mapping

from . import env
from .kernels import EXPORTS, home_of

if TYPE_CHECKING:
    from .registry import Tunable

Key = tuple[int, ...]


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (1 for n <= 1). Triton's own costs 1.8 us a call."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def row_key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    """Key of a row kernel: columns rounded up to a power of two, log2 bucket of the rows, bytes an element."""
    return next_power_of_2(n_cols), (n_rows - 1).bit_length() if n_rows > 1 else 0, itemsize


def expect(value: Any, kinds: Any, name: str, expected: str) -> None:
    """Raise `TypeError` that says what was expected unless `value` is of these types."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}: {value!r}")


@dataclass(frozen=True)
class Op:
    """One op file's registration: what tests, bench, tuner and CLI iterate over.

    function: the public `liger_<op>`; reference: the same computation in plain differentiable torch
    workloads: name -> problem sizes, in the order of the tunables' `dims`
    sample: (sizes, dtype, device, generator, **options) -> Sample, inputs for tests, bench and tuner
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    tunables: tuple[Tunable, ...]
    workloads: Mapping[str, tuple[int, ...]]
    sample: Callable[..., "Sample"]
    options: tuple[Mapping[str, Any], ...] = ({},)
    """Option sets the shared tests run; the first is the default."""
    small: tuple[tuple[int, ...], ...] = ()
    """Small problem sizes for tests, odd ones among them; empty: the first workload shrunk."""


@dataclass
class Sample:
    """One call of an op: `op.function(*args, **kwargs)`, and `op.reference` with the same arguments.

    Gradients are checked for every floating tensor in `args` that requires grad. `reduction` is the longest sum behind
    one output element forward; `grad_reduction` the longest behind one gradient element (tests derive tolerances from
    them); `moved` is the bytes that must move, forward plus backward: what floors are made of.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    reduction: int = 1
    grad_reduction: int = 1
    moved: int = 0


_ops: dict[str, Op] = {}
_tunables: dict[str, Tunable] = {}


def register(op: Op) -> Op:
    """Add an op to the table. Raises `ValueError` when the name is taken or an op has no workloads."""
    if op.name in _ops:
        raise ValueError(f"op {op.name!r} is registered twice")
    if not op.workloads:
        raise ValueError(f"op {op.name!r} has no workloads; tests, bench and tuner draw on them")
    _ops[op.name] = op
    env.know_op(op.name)
    for tunable in op.tunables:
        _tunables[tunable.name] = tunable
    return op


def unregister(name: str) -> None:
    """Take an op out of the table again, as a test does with an op of its own."""
    for tunable in _ops.pop(name).tunables:
        del _tunables[tunable.name]


def ops() -> Mapping[str, Op]:
    """Every op, by name; imports the kernel files on first use."""
    for module in EXPORTS:
        importlib.import_module(f"{__package__}.kernels.{module}")
    return dict(sorted(_ops.items()))


def get_op(name: str) -> Op:
    """The op of this name; imports its file only. Raises `ValueError` with the nearest names, `TypeError` for no name."""
    expect(name, str, "op", "the name of an op")
    if name in _ops:
        return _ops[name]
    home = home_of(name)
    if home is not None:
        importlib.import_module(home)
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
    """The tunable of an op's kernel by its full name (`rms_norm.bwd`); imports the op's file. Raises as `get_op`."""
    op = get_op(name.split(".")[0])
    for tunable in op.tunables:
        if tunable.name == name:
            return tunable
    raise ValueError(f"unknown kernel {name!r}; {op.name} has {', '.join(one.name for one in op.tunables)}")
