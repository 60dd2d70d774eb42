"""Every environment variable that liger_hw reads, typed, in one table.

The first use of any variable reads and stores all, since `os.environ.get` takes longer than a plan's look-up. A value
that cannot be parsed raises, an unknown name gives a warning. After changing `os.environ` inside a process, call
`liger_hw.registry.reload()`.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import Any, Callable

from .kernels import EXPORTS

log = logging.getLogger("liger_hw")

PREFIX = "LIGER_HW_"


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 1 or 0")


def _number(convert: Callable[[str], Any], minimum: float, expected: str) -> Callable[[str], Any]:
    """A parser of numbers from `minimum` to 3.2e8. expected: in words, for the error"""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not minimum <= value < 3.2e8:
            raise ValueError(f"expected {expected}")
        return value

    return parse


_mebibytes = _number(int, 1, "a positive number of MiB, as 512")
_seconds = _number(float, 0, "a number of seconds, 0 or more, of ten years at most")


@dataclass(frozen=True)
class Variable:
    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str


_TABLE = (
    Variable("LIGER_HW_DISABLE", _flag, False, "patch nothing, and run every op's reference in torch, on a GPU too"),
    Variable("LIGER_HW_INTERPRET", _flag, False, "run the Triton kernels in Triton's interpreter on CPU tensors"),
    Variable("LIGER_HW_CACHE_DIR", str, None, "folder of the user cache (default: $XDG_CACHE_HOME/liger_hw)"),
    Variable("LIGER_HW_LOCK_FILE", str, None, "lock file that pins every configuration (default: none)"),
    Variable("LIGER_HW_DETERMINISTIC", _flag, False, "fix every numerics-affecting knob to the heuristic's value"),
    Variable("LIGER_HW_DISABLE_SHIPPED", _flag, False, "ignore the tables shipped with the package"),
    Variable("LIGER_HW_SHADOW_LIGER", _flag, False, "let `liger-hw shim` hide an installed liger-kernel"),
    Variable("LIGER_HW_COMPILE_AHEAD", _flag, True, "compile a patched model's kernels in threads, at its first step"),
    Variable(
        "LIGER_HW_SYNC_SECONDS",
        _seconds,
        300.0,
        "how long ranks wait for each other where they compare their kernels, as before a patched model's first step "
        "(default: 300; 0: that step compares nothing)",
    ),
    Variable("LIGER_HW_FAST_LAUNCH", _flag, True, "launch compiled kernels directly where the backend allows it"),
    Variable("LIGER_HW_CPU_REFERENCE", _flag, False, "on a CPU, patched parts run the kernels' references"),
    Variable("LIGER_HW_DEBUG", _flag, False, "show the traceback of a bug in the command line"),
    Variable(
        "LIGER_HW_CHECK_TARGETS", _flag, False, "check targets and expert indices on the host (syncs), name the row"
    ),
    Variable(
        "LIGER_HW_LOSS_MEMORY_MIB",
        _mebibytes,
        None,
        "memory of a fused linear loss, in MiB: gradients and a chunk of "
        "logits (default: 1024, in chunks of at most 4096 rows, of divergences 8192; more is a little faster)",
    ),
)
VARIABLES = {variable.name: variable for variable in _TABLE}

CONFIG_PREFIX = "LIGER_HW_CONFIG_"
"""`LIGER_HW_CONFIG_<OP>` (JSON of a LaunchConfig; `<OP>__<VARIANT>` for one variant) sets layer 0 of the registry."""


class SettingError(ValueError):
    """An environment variable has an unusable value; the message names the variable."""


def __getattr__(name: str) -> Any:
    """Value of a LIGER_HW_ variable (`env.LIGER_HW_DISABLE`). The first call makes all plain attributes of this module.

    Raises `SettingError` if any variable that is set cannot be parsed.
    """
    if name not in VARIABLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    values = {known: _parsed(variable) for known, variable in VARIABLES.items()}
    for other in unknown():
        log.warning("liger_hw: %s is set but means nothing%s", other, suggestion(other))
    globals().update(values)
    return values[name]


def _parsed(variable: Variable) -> Any:
    text = os.environ.get(variable.name)
    try:
        return variable.default if text is None else variable.parse(text)
    except ValueError as error:
        raise SettingError(f"{variable.name}={text!r}: {error}. The variable means: {variable.help}") from None


def launcher_number(name: str, default: int) -> int:
    """A number that torchrun sets, such as RANK or WORLD_SIZE; the default if it is unset or not a number."""
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def ignore(name: str) -> None:
    """Use a variable's default until `clear()`, even if it is set."""
    if name not in globals():
        __getattr__(name)  # reads all of them
    globals()[name] = VARIABLES[name].default


def explicit_config(op: str, variant: str) -> tuple[str, str] | None:
    """(variable name, JSON text) of the configuration that the environment sets for a variant, or None."""
    for suffix in (f"{op}__{variant}", op):
        name = CONFIG_PREFIX + suffix.upper()
        if name in os.environ:
            return name, os.environ[name]
    return None


def unknown_variants(op: str, variants: list[str]) -> list[str]:
    """The variables `LIGER_HW_CONFIG_<OP>__<VARIANT>` that are set for a variant that the op does not have."""
    prefix = f"{CONFIG_PREFIX}{op.upper()}__"
    known = {prefix + variant.upper() for variant in variants}
    return sorted(name for name in os.environ if name.startswith(prefix) and name not in known)


def unknown() -> list[str]:
    """LIGER_HW_ variables that are set but do not exist, mostly because of a spelling mistake."""
    configs = _config_names()
    return sorted(
        name
        for name in os.environ
        if name.startswith(PREFIX) and name not in VARIABLES and name.split("__")[0] not in configs
    )


def suggestion(name: str) -> str:
    """`; did you mean ...?`, or ""."""
    from difflib import get_close_matches

    head, mark, variant = name.partition("__")
    near = get_close_matches(head, [*VARIABLES, *_config_names()], 1, 0.75)
    return f"; did you mean {near[0]}{mark}{variant}?" if near else ""


def _config_names() -> set[str]:
    """`LIGER_HW_CONFIG_<OP>` of the package's ops, imported or not, and of ops from outside the package."""
    names = {module.rpartition(".")[2] for module in EXPORTS} | _registered
    return {CONFIG_PREFIX + name.upper() for name in names}


_registered: set[str] = set()


def know_op_name(name: str) -> None:
    """Accept `LIGER_HW_CONFIG_<OP>` for an op from outside the package."""
    _registered.add(name)


def clear() -> None:
    """Forget the stored values; the next use reads the environment again."""
    for name in VARIABLES:
        globals().pop(name, None)
