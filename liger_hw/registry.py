"""Chooses the launch configuration of an op's kernel on a device. Read this file first.

An op (`kernels/<family>/<op>.py`) declares a `Tunable` for each kernel that it launches ("fwd", "bwd") and calls

    plan = FWD.plan(x.device, key)          # one dictionary hit, at most 0.5 us

for a `Plan`: a `LaunchConfig` lowered to launch keywords, with the layer it came from. The first of these layers that
has a legal configuration is used:

    0 explicit (override(), LIGER_HW_CONFIG_<OP>)   4 shipped table of the architecture
    1 lock file                                     5 shipped table of the family
    2 user cache                                    6 the op's heuristic, from Target fields
    3 shipped table of the exact device             7 the op's always-legal safe configuration

Layers 1 to 5 are one dictionary per device, read when the device is first used (`table`). A key is a tuple of ints, and
only an equal key matches. A key without a stored configuration gets the heuristic's, and is noted in the user cache for
a later `liger-hw autotune`. A configuration that fails to launch is quarantined, and the next layer is used.
`explain()` shows every candidate and why it was refused.

This file imports `ops.py` (the table of ops, Tunable, Plan) and `autotune/store.py` (the stored configurations).
Callers import the names of both from here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from . import env
from .autotune import store
from .autotune.store import Table
from .backends import LaunchConfig, Target, known_target, target_of
from .locks import fork_safe
from .ops import (  # noqa: F401
    Entry,
    Key,
    Op,
    Plan,
    Sample,
    Tunable,
    backend,
    backend_of,
    columns_key,
    expect,
    get_op,
    get_tunable,
    interpreting,
    is_capturing_or_tracing,
    next_power_of_2,
    normal,
    ops,
    plans,
    pretended,
    pretending,
    register,
    register_file,
    registered,
    row_key,
    tile_space,
    tunables,
)
from .text import first_line

if TYPE_CHECKING:
    import torch

log = logging.getLogger("liger_hw")

LAYERS = ("explicit", "lock", "user", "shipped-device", "shipped-arch", "shipped-family", "heuristic", "safe")
_BUILT_IN = ("heuristic", "safe")
Failure = tuple[str, str, Key, str]
"""A configuration that failed to launch: (arch, tunable, key, text of the configuration)."""

_lock = fork_safe(threading.RLock())
_tables: dict[Target, Table] = {}
_overrides: list[tuple[str, LaunchConfig]] = []
_failed: dict[Failure, str] = {}
"""Configurations that failed to launch in this process -> why; the tables have failures of earlier processes."""
replay_cache: dict[tuple, Any] = {}
"""Recorded calls of the current plans (`runtime/recording.py`). A change of plans replaces the dictionary, so that a
recording that another thread is making goes into the old one."""
_deterministic: bool | None = None


# -- resolution ------------------------------------------------------------------------------------------------------


def _resolve(tunable: Tunable, device: Any, key: Key) -> Plan:
    """Make the plan of a key, for `Tunable.plan`."""
    with _lock:
        if (plan := tunable.plans.get((device, key))) is not None:  # another thread has resolved it meanwhile
            return plan
        target, may_not_read = pretended() or target_of(device), is_capturing_or_tracing()
        plan = Plan(tunable, target, device, key, choose(tunable, target, key))
        if plan.layer in _BUILT_IN and device.type != "cpu" and not pretended():
            entries = table(target).get(plan.name, ())
            if not any(entry.kind == "heuristic" and entry.version == tunable.version for entry in entries):
                store.note(plan, "missed")
        if not may_not_read or target in _tables:  # else no table was read: resolve again when files may be opened
            tunable.plans[device, key] = plan
        return plan


Tunable.resolve = _resolve


def choose(tunable: Tunable, target: Target, key: Key) -> Entry:
    """The configuration of the first layer that has a legal one. Stores no plan and notes no miss."""
    with _lock:
        for candidate in _candidates(tunable, target, key):
            if not candidate.rejected:
                return candidate
            # an illegal entry of a lock file is an error, except on a CPU, where it is ignored without a warning
            is_legal_lock = candidate.layer == "lock" and not tunable.illegal(target, key, candidate.config)
            if candidate.layer == "explicit" or is_legal_lock:
                ignored = tunable.name, candidate.layer, candidate.rejected
                log.warning("liger_hw: %s: %s configuration ignored: %s", *ignored)
    raise RuntimeError(
        f"{tunable.name}: no legal configuration for {key} on {target.arch}; this is a bug, please report it"
    )


def _candidates(tunable: Tunable, target: Target, key: Key) -> Iterator[Entry]:
    """Every layer's configuration, best first; `rejected` is why it must not be used, or ""."""
    entries = table(target).get((tunable.op, tunable.variant, key), ())
    failed_earlier = {
        entry.config: str(entry.provenance.get("reason"))
        for entry in entries
        if entry.kind == "failed" and entry.version == tunable.version
    }
    heuristic = tunable.heuristic(target, key)
    for candidate in _answers_of_layers(tunable, target, key, heuristic, store.answers(entries)):
        config, why_invalid = candidate.config, candidate.rejected
        if is_deterministic() and candidate.layer not in ("explicit", *_BUILT_IN):
            config = _keep_numerics(tunable, heuristic, config)
        why_invalid = why_invalid or tunable.illegal(target, key, config)
        if not why_invalid and candidate.layer != "safe":  # `safe` is never quarantined: its failure is raised
            failure = target.arch, tunable.name, key, config.to_text()
            why_invalid = _failed.get(failure) or failed_earlier.get(config)
        yield replace(candidate, config=config, rejected=why_invalid or "")


def _answers_of_layers(
    tunable: Tunable, target: Target, key: Key, heuristic: LaunchConfig, entries: Sequence[Entry]
) -> Iterator[Entry]:
    """Every layer's configuration, best first; `rejected` if it cannot be parsed or is for another kernel version."""
    for scope, config in reversed(_overrides):
        if scope in (tunable.op, tunable.name):
            yield Entry(config, {"kind": "explicit"}, source="override()", layer="explicit")
    if (forced := forced_config(tunable)) is not None:
        name, text = forced
        offer = Entry(heuristic, {"kind": "explicit"}, source=name, layer="explicit")
        try:
            yield replace(offer, config=LaunchConfig.from_json(json.loads(text)))
        except (ValueError, RecursionError) as error:
            yield replace(offer, rejected=f"{name} is not a launch configuration: {error}")
    for entry in entries:
        stale = ""
        if entry.layer != "lock" and entry.version != tunable.version:  # a lock file applies to every version
            stale = f"stored for version {entry.version} of the kernel, this is version {tunable.version}"
        yield replace(entry, rejected=stale)
    yield Entry(heuristic, {"kind": "heuristic"}, layer="heuristic")
    yield Entry(tunable.safe(target, key), {"kind": "safe"}, layer="safe")


@functools.cache
def forced_config(tunable: Tunable) -> tuple[str, str] | None:
    """(variable, JSON text) of the configuration in `LIGER_HW_CONFIG_<OP>`, or None; read once."""
    variants = [one.variant for one in registered() if one.op == tunable.op]
    for name in env.unknown_variants(tunable.op, variants):
        store.warn_once(f"{name} is set, but {tunable.op} has the variants {', '.join(variants)}")
    return env.explicit_config(tunable.op, tunable.variant)


def _keep_numerics(tunable: Tunable, heuristic: LaunchConfig, config: LaunchConfig) -> LaunchConfig:
    """`config`, but with the heuristic's value for every option that can change a result's bits."""
    neutral = {name: getattr(config, name) for name in tunable.neutral if hasattr(config, name)}
    blocks = {name: size for name, size in config.blocks.items() if name in tunable.neutral}
    return replace(heuristic, blocks={**heuristic.blocks, **blocks}, **neutral)


def is_deterministic() -> bool:
    """Whether options that affect numerics are fixed: by `set_deterministic`, else by `LIGER_HW_DETERMINISTIC`."""
    return env.LIGER_HW_DETERMINISTIC if _deterministic is None else _deterministic


def table(target: Target) -> Table:
    """Everything stored for a target: (op, variant, key) -> entries, best first. Read once.

    Empty if it is not read yet and a graph is being captured or torch.compile is tracing, when no file may be opened.
    """
    for pretended_target, contents in pretending[-1:]:
        if contents is not None and pretended_target == target:
            return contents
    contents = _tables.get(target)
    if contents is None:
        if is_capturing_or_tracing():
            return {}
        contents = _tables.setdefault(target, store.read(target))
    return contents


def set_table(target: Target, contents: Table) -> None:
    """Use this table for `target` until `reload()`, as `distributed.sync` does on every rank."""
    with _lock:
        _tables[target] = contents
        invalidate()


# -- what callers may change -----------------------------------------------------------------------------------------


def invalidate() -> None:
    """Forget every resolved plan; the next launch resolves again."""
    with _lock:
        drop_replays()
        for tunable in registered():
            tunable.plans.clear()


def drop_replays() -> None:
    """Forget every recorded call; needed when a plan changes."""
    global replay_cache
    replay_cache = {}


def reload() -> None:
    """Read the environment and every table again. Configurations that failed in this process stay in quarantine."""
    with _lock:
        env.clear()
        store.warn_once.cache_clear()
        _tables.clear()
        forced_config.cache_clear()
        invalidate()


@contextlib.contextmanager
def override(scope: str, config: LaunchConfig) -> Iterator[None]:
    """Force `config` for an op (`"rms_norm"`) or one variant (`"rms_norm.bwd"`) inside a `with` block, process-wide.

    Raises `ValueError` for an unknown op or variant and for invalid values, `TypeError` for another type. If the
    configuration is illegal on a device, a warning gives the reason, and the next layer is used.
    """
    expect(scope, str, "scope", "the name of an op or variant, as 'rms_norm' or 'rms_norm.bwd'")
    expect(config, LaunchConfig, "config", "a LaunchConfig (LaunchConfig.from_json makes one from JSON data)")
    LaunchConfig.from_json(config.to_json())
    op = get_op(scope.split(".")[0])
    known = [op.name, *(tunable.name for tunable in op.tunables)]
    if scope not in known:
        raise ValueError(f"unknown variant {scope!r}; known: {', '.join(known)}")
    with _pushed(_overrides, (scope, config)):
        yield


@contextlib.contextmanager
def pretend(target: Target, contents: Table | None = None) -> Iterator[None]:
    """Resolve every device as `target` inside a `with` block, to test another vendor's configurations.

    contents: used instead of the stored table of `target`
    Nothing is written to the user's cache inside the block.
    """
    expect(target, Target, "target", "a Target (liger_hw.backends.known_target describes one by name)")
    with _pushed(pretending, (target, contents)):
        yield


@contextlib.contextmanager
def _pushed(stack: list, item: Any) -> Iterator[None]:
    """Push `item` on a stack inside a `with` block. Blocks of several threads or generators may end in any order."""
    with _lock:
        stack.append(item)
        invalidate()
    try:
        yield
    finally:
        with _lock:
            stack[:] = [other for other in stack if other is not item]
            invalidate()


def overrides() -> tuple[tuple[str, LaunchConfig], ...]:
    """(scope, configuration) of every open `override`, the innermost last."""
    return tuple(_overrides)


def set_deterministic(on: bool | None) -> None:
    """Fix every option that affects numerics to the heuristic's value, so that tuning cannot change a loss curve.

    None returns to `LIGER_HW_DETERMINISTIC`.
    """
    global _deterministic
    expect(on, (bool, type(None)), "on", "True, False or None")
    with _lock:
        _deterministic = on
        invalidate()


def reset() -> None:
    """Return to the state of a new process, for tests: `reload()`, and end every override and quarantine."""
    global _deterministic
    with _lock:
        _deterministic = None
        for state in (_overrides, pretending, _failed):
            state.clear()
        store.forget()
        reload()


def quarantine(plan: Plan, error: BaseException) -> bool:
    """Stop using a configuration that failed to launch. Returns whether another layer can replace it.

    Every device drops its plan with this configuration and key. The failure is also stored for later processes, except
    for CPU tensors and pretended targets, and for failures of the machine: a full disk, memory, or a cooperative launch
    that was refused because of other processes on the device.
    """
    if plan.layer == "safe":
        return False
    reason = first_line(error)
    with _lock:
        drop_replays()
        plans = plan.tunable.plans
        for name, other in list(plans.items()):
            if (other.key, other.config) == (plan.key, plan.config):
                del plans[name]
        failure = plan.target.arch, plan.tunable.name, plan.key, plan.config.to_text()
        if failure in _failed:  # another thread or device was first
            return True
        _failed[failure] = f"failed at launch: {reason}"
        is_machine_failure = isinstance(error, (OSError, MemoryError)) or "cooperative launch" in reason
        if plan.device.type != "cpu" and not pretended() and not is_machine_failure:
            store.note(plan, "failed", reason=_failed[failure], date=store.today())
            if not is_capturing_or_tracing():
                store.flush()
    facts = plan.layer, plan.config.to_text(), plan.tunable.name, reason
    log.warning("liger_hw: %s configuration %s of %s failed and is quarantined: %s", *facts)
    return True


def quarantined(target: Target | None = None) -> dict[Failure, str]:
    """Configurations that failed to launch in this process -> why; with a target, also in earlier processes."""
    known = tunables() if target else {}  # outside the lock, since it may import kernel files
    with _lock:
        if target is None:
            return dict(_failed)
        earlier = {}
        for (op, variant, key), entries in table(target).items():
            name = f"{op}.{variant}"
            for entry in entries:
                if entry.kind == "failed" and name in known and known[name].version == entry.version:
                    failure = target.arch, name, key, entry.config.to_text()
                    earlier[failure] = str(entry.provenance.get("reason"))
        return {**earlier, **_failed}


# -- explain ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """How a tunable's configuration was chosen: every candidate, best first, with the reason if it was refused."""

    tunable: str
    target: Target
    key: Key
    candidates: tuple[Entry, ...]

    @property
    def chosen(self) -> Entry:
        return next(c for c in self.candidates if not c.rejected)

    def to_json(self) -> dict[str, Any]:
        chosen = self.chosen.to_json()
        return {
            "tunable": self.tunable,
            "target": self.target.to_json(),
            "key": list(self.key),
            **{name: chosen[name] for name in ("layer", "config", "provenance")},
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }

    def __str__(self) -> str:
        lines = [f"{self.tunable} on {self.target.name} ({self.target.vendor} {self.target.arch}), key {self.key}"]
        taken = self.chosen
        for c in self.candidates:
            state = "taken" if c is taken else c.rejected or "a better layer answered"
            where = f" from {c.source}" if c.source else ""
            lines.append(f"  {c.layer:<15} {c.provenance.get('kind', '?'):<10} {c.config.in_words()}{where}: {state}")
        return "\n".join(lines)


def explain(op: str, shape: tuple[int, ...], dtype: "torch.dtype", device: Any = None) -> list[Explanation]:
    """One Explanation for each kernel of `op` itself at problem sizes `shape` (see the op's `dims`).

    device: a torch device, a Target, a name of a device or architecture (`h200`, `gfx942`); None is the accelerator
    Raises `ValueError` for an unknown op, architecture, or a shape of the wrong length, `TypeError` for another type.
    """
    import torch

    expect(shape, (tuple, list), "shape", "a tuple of sizes")
    for size in shape:
        expect(size, int, "each size", "an int")
    if shape and min(shape) < 1:
        raise ValueError(f"sizes are positive, got {tuple(shape)}")
    expect(dtype, torch.dtype, "dtype", "a torch.dtype, as torch.bfloat16")
    kinds = Target, torch.device, str, type(None)
    expect(device, kinds, "device", "a torch device, a Target, a device's or an architecture's name, or None")
    target = device if isinstance(device, Target) else target_named(device)
    result = []
    for tunable in get_op(op).tunables:
        if len(shape) != len(tunable.dims):
            raise ValueError(f"{op} takes {len(tunable.dims)} sizes ({' x '.join(tunable.dims)}), got {shape}")
        result.append(explain_tunable(tunable, target, tunable.key(*shape, dtype.itemsize)))
    return result


def explain_tunable(tunable: Tunable, target: Target, key: Key) -> Explanation:
    """The Explanation of `tunable` for one key."""
    with _lock:
        return Explanation(tunable.name, target, key, tuple(_candidates(tunable, target, key)))


def target_named(device: Any) -> Target:
    """The Target of a torch device, or of a device's or an architecture's name; None is the current accelerator."""
    import torch

    if device is None:
        if pretended():
            return pretended()
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            return known_target(device)
    return target_of(device)
