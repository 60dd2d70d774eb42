"""Which launch configuration an op's kernel uses on the device at hand. Read this file first.

An op (`kernels/<family>/<op>.py`) declares one `Tunable` for each kernel that it launches ("fwd", "bwd") and asks

    plan = FWD.plan(x.device, key)          # one dictionary hit, at most 0.5 us

and gets a `Plan`: a `LaunchConfig` already lowered to launch keywords, with the layer it came from. The layers, first
legal answer wins:

    0 explicit (override(), LIGER_HW_CONFIG_<OP>)   4 shipped table of the architecture
    1 lock file                                     5 shipped table of the family
    2 user cache                                    6 the op's heuristic, from Target fields
    3 shipped table of the exact device             7 the op's always-legal safe configuration

A key is a tuple of ints and nothing is matched approximately. A miss never tunes: it takes the heuristic and is noted
in `misses()`. A configuration that fails to launch is quarantined, and the next layer answers. `explain()` shows every
candidate and why it was or was not taken.

Below this file: `ops.py` (the table of ops, Tunable, Plan), `answers.py` (what a layer answers), `autotune/store.py`
(what is stored), `autotune/notes.py` (what this process notes for later ones). Callers take all their names from here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping

from . import env
from .answers import LAYERS, Candidate, Entry, Explanation, Key  # noqa: F401  callers take all of these from here
from .autotune import notes, store
from .autotune.notes import is_quiet
from .backends import Backend, LaunchConfig, Target, backend, known_target, target_of
from .locks import fork_safe
from .ops import (  # noqa: F401
    Op,
    Plan,
    Sample,
    Tunable,
    expect,
    get_op,
    get_tunable,
    interpreting,
    next_power_of_2,
    normal,
    ops,
    register,
    registered,
    row_key,
    tile_space,
    tunables,
    unregister,
)
from .text import first_line

if TYPE_CHECKING:
    import torch

log = logging.getLogger("liger_hw")

_ALWAYS_TAKEN = ("heuristic", "safe")
Layers = list[tuple[str, Mapping[tuple[str, str, Key], Entry]]]
"""(name of a layer, its entries), best first."""
Mark = tuple[str, str, Key, str]
"""A configuration that failed to launch: (arch, tunable, key, text of the configuration)."""

_lock = fork_safe(threading.RLock())
_overrides: list[tuple[str, LaunchConfig]] = []
_pretended: list[list[Target]] = []
_quarantined: dict[Mark, str] = {}
_quarantined_before: dict[Mark, dict[int, str]] = {}
"""(arch, tunable, key, configuration) that failed in an earlier process -> {version of the kernel: reason}"""
_tables: dict[Target, Layers] = {}
_misses: dict[tuple[str, str, Key], Target] = {}
_explicit: dict[str, tuple[str, str] | None] = {}
replay_cache: dict[tuple, Any] = {}
"""What the runtime keeps for the plans in force (`runtime/replay.py`): a new dictionary whenever they change, so that
what another thread records meanwhile goes with the old one."""
tune_on_miss: Callable[[Tunable, Target, Any, Key], bool] | None = None
"""(tunable, target, device, key) -> whether an entry was stored; `autotune/inline.py` sets it."""
_deterministic: bool | None = None
"""What `set_deterministic` said last."""


# -- resolution ------------------------------------------------------------------------------------------------------


def _target(device: Any) -> Target:
    return pretended() or target_of(device)


def _resolve(tunable: Tunable, device: Any, key: Key) -> Plan:
    """What `Tunable.plan` asks where it has no plan yet."""
    with _lock:
        if (found := tunable.plans.get((device, key))) is not None:  # another thread asked at the same time
            return found
        target, quiet = _target(device), is_quiet()
        chosen = choose(tunable, target, key)
        if chosen.layer in _ALWAYS_TAKEN and not pretended():
            name = tunable.op, tunable.variant, key
            _misses[name] = target
            if device.type != "cpu":
                notes.note_miss(name, target)
            if not quiet and env.get("LIGER_HW_AUTOTUNE") and _tune(tunable, target, device, key):
                chosen = choose(tunable, target, key)
        plan = Plan(tunable, target, device, key, chosen)
        if not quiet or target in _tables:  # else the tables are still unread: ask again when files may be opened
            tunable.plans[device, key] = plan
        return plan


Tunable.resolve = _resolve


def _tune(tunable: Tunable, target: Target, device: Any, key: Key) -> bool:
    if target.vendor == "cpu" and not interpreting():
        return False
    if tune_on_miss is None:
        importlib.import_module(f"{__package__}.autotune.inline")  # it is above the registry, and registers itself
    return tune_on_miss(tunable, target, device, key)


def choose(tunable: Tunable, target: Target, key: Key) -> Candidate:
    """The first legal answer of the layers for one key. Resolves nothing and notes no miss."""
    with _lock:
        for candidate in _candidates(tunable, target, key):
            if not candidate.rejected:
                return candidate
            # an illegal entry of a lock file is one that the file itself allows to be left out
            pinned = candidate.layer == "lock" and not tunable.illegal(target, key, candidate.config)
            if candidate.layer == "explicit" or pinned:
                why = tunable.name, candidate.layer, candidate.rejected
                log.warning("liger_hw: %s: %s configuration ignored: %s", *why)
    raise RuntimeError(
        f"{tunable.name}: no legal configuration for {key} on {target.arch}; this is a bug, please report it"
    )


def _candidates(tunable: Tunable, target: Target, key: Key) -> Iterator[Candidate]:
    """Every answer the layers offer, best first, each with the reason it is refused (if it is)."""
    tables(target)  # also reads what failed before, which may be an explicit configuration
    heuristic = tunable.heuristic(target, key)
    for layer, config, provenance, source, stale in _offers(tunable, target, key, heuristic):
        if is_deterministic() and layer not in _ALWAYS_TAKEN and layer != "explicit":
            config = _keep_numerics(tunable, heuristic, config)
        reason = stale or tunable.illegal(target, key, config)
        if not reason and layer != "safe":  # the last resort is never quarantined: what fails there is raised
            mark = target.arch, tunable.name, key, config.to_text()
            reason = _quarantined.get(mark)
            if not reason and mark in _quarantined_before:
                reason = _quarantined_before[mark].get(tunable.version)
        yield Candidate(layer, config, provenance, source, reason or "")


def _offers(tunable: Tunable, target: Target, key: Key, heuristic: LaunchConfig) -> Iterator[tuple]:
    for scope, config in reversed(_overrides):
        if scope in (tunable.op, tunable.name):
            yield "explicit", config, {"kind": "explicit"}, "override()", ""
    forced = forced_config(tunable)
    if forced is not None:
        name, text = forced
        try:
            yield "explicit", LaunchConfig.from_json(json.loads(text)), {"kind": "explicit"}, name, ""
        except (ValueError, RecursionError) as error:
            yield "explicit", heuristic, {"kind": "explicit"}, name, f"{name} is not a launch configuration: {error}"
    for layer, table in tables(target):
        entry = table.get((tunable.op, tunable.variant, key))
        if entry is None:
            continue
        stale = ""
        if layer != "lock" and entry.version != tunable.version:  # a newer version of a kernel unpins nothing
            stale = f"stored for version {entry.version} of the kernel, this is version {tunable.version}"
        yield layer, entry.config, entry.provenance, entry.source, stale
    yield "heuristic", heuristic, {"kind": "heuristic"}, "", ""
    yield "safe", tunable.safe(target, key), {"kind": "safe"}, "", ""


def forced_config(tunable: Tunable) -> tuple[str, str] | None:
    """(variable, JSON text) of the configuration that `LIGER_HW_CONFIG_<OP>` forces, or None; read once."""
    if tunable.name not in _explicit:
        _explicit[tunable.name] = env.explicit_config(tunable.op, tunable.variant)
        variants = [one.variant for one in registered() if one.op == tunable.op]
        for name in env.unknown_variants(tunable.op, variants):
            if name not in _explicit:
                _explicit[name] = None  # once
                log.warning("liger_hw: %s is set, but %s has the variants %s", name, tunable.op, ", ".join(variants))
    return _explicit[tunable.name]


def _keep_numerics(tunable: Tunable, heuristic: LaunchConfig, config: LaunchConfig) -> LaunchConfig:
    """The heuristic, with only the knobs of `config` that cannot change a result's bits; a block is named as it is."""
    neutral = {name: getattr(config, name) for name in tunable.neutral if hasattr(config, name)}
    blocks = {name: size for name, size in config.blocks.items() if name in tunable.neutral}
    return replace(heuristic, blocks={**heuristic.blocks, **blocks}, **neutral)


def is_deterministic() -> bool:
    """Whether numerics-affecting knobs are fixed: by `set_deterministic`, else by `LIGER_HW_DETERMINISTIC`."""
    return env.get("LIGER_HW_DETERMINISTIC") if _deterministic is None else _deterministic


def tables(target: Target) -> Layers:
    """(layer, entries) of everything stored for a target, best layer first; read once, then kept.

    Empty, and not kept, while a graph is captured or torch.compile traces: no file is opened then.
    """
    found = _tables.get(target)
    if found is None:
        if is_quiet():
            return []
        found = _tables.setdefault(target, store.layers(target))
        for name, key, config, reason, version in notes.read_quarantined(target):
            _quarantined_before.setdefault((target.arch, name, key, config.to_text()), {})[version] = reason
    return found


def set_tables(target: Target, layers: Layers, quarantined: Mapping[Mark, str] | None = None) -> None:
    """Answer for `target` from these tables only, until `reload()`. `distributed.sync` does this on every rank.

    quarantined: replaces what earlier processes quarantined on this architecture
    """
    with _lock:
        _tables[target] = layers
        if quarantined is not None:
            for mark in [mark for mark in _quarantined_before if mark[0] == target.arch]:
                del _quarantined_before[mark]
            for mark, reason in quarantined.items():
                _quarantined.setdefault(mark, reason)
        invalidate()


def add_entries(target: Target, entries: Mapping[tuple[str, str, Key], Entry]) -> None:
    """Answer from these new entries of the user cache too; keys without a plan see them at once."""
    with _lock:
        layers = tables(target)
        place = sum(layer == "lock" for layer, _ in layers)
        layers.insert(place, ("user", entries))


@contextlib.contextmanager
def only_tables(target: Target, layers: Layers) -> Iterator[None]:
    """Answer for `target` from these tables only inside a `with` block; what was missed inside is forgotten."""
    with _lock:
        before, missed = _tables.get(target), dict(_misses)
        set_tables(target, layers)
    try:
        yield
    finally:
        with _lock:
            if before is None:
                _tables.pop(target, None)
            else:
                _tables[target] = before
            _misses.clear()
            _misses.update(missed)
            invalidate()


# -- what callers may change -----------------------------------------------------------------------------------------


def invalidate() -> None:
    """Forget every resolved plan; the next launch resolves again."""
    with _lock:
        drop_replays()
        for tunable in registered():
            tunable.plans.clear()


def drop_replays() -> None:
    """Forget every recorded call: some plan that it was made with no longer holds."""
    global replay_cache
    replay_cache = {}


def reload() -> None:
    """Read the environment and every table again. What failed at launch in this process stays quarantined."""
    with _lock:
        env.clear()
        store.forget_warnings()
        _tables.clear()
        _explicit.clear()
        _quarantined_before.clear()
        invalidate()


@contextlib.contextmanager
def override(scope: str, config: LaunchConfig) -> Iterator[None]:
    """Force `config` for an op (`"rms_norm"`) or one variant (`"rms_norm.bwd"`) inside a `with` block, process-wide.

    Raises `ValueError` for an unknown op or variant and for values no configuration has, `TypeError` for another type.
    A configuration that is illegal on the device is refused with a warning that says why, and the next layer answers.
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
def pretend(target: Target) -> Iterator[None]:
    """Resolve every device as `target` inside a `with` block: how another vendor's configurations are tested here.

    Nothing that happens inside is written to the user's cache or counted in `misses()`.
    """
    expect(target, Target, "target", "a Target (liger_hw.backends.known_target describes one by name)")
    with _pushed(_pretended, [target]):  # a list, as equal targets may be pretended at once
        yield


@contextlib.contextmanager
def _pushed(stack: list, item: Any) -> Iterator[None]:
    """`item` on top of a stack inside a `with` block; blocks may end in any order, as in threads and generators."""
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
    """(scope, configuration) of every `override` that is open, the innermost last."""
    return tuple(_overrides)


def pretended() -> Target | None:
    """The target of the innermost `pretend` that is open."""
    if not _pretended:
        return None
    innermost = _pretended[-1:]  # a slice, as another thread may end its block now
    return innermost[0][0] if innermost else None


def set_deterministic(on: bool | None) -> None:
    """Fix every numerics-affecting knob to the heuristic's value, so re-tuning cannot move a loss curve.

    None returns to `LIGER_HW_DETERMINISTIC`.
    """
    global _deterministic
    expect(on, (bool, type(None)), "on", "True, False or None")
    with _lock:
        _deterministic = on
        invalidate()


def reset() -> None:
    """As in a new process: `reload()`, and nothing is overridden, pretended, deterministic, quarantined or missed."""
    global _deterministic
    with _lock:
        _deterministic = None
        for learned in (_overrides, _pretended, _quarantined, _misses):
            learned.clear()
        notes.forget()
        reload()


def quarantine(plan: Plan, error: BaseException) -> bool:
    """No longer use a configuration that failed to launch; returns whether another layer can answer.

    It is kept on disk for later processes too: not where it may be the interpreter or a test that failed (CPU tensors,
    a pretended target). On every device of the architecture its plans for this key are dropped.
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
        mark = (plan.target.arch, plan.tunable.name, plan.key, plan.config.to_text())
        if mark in _quarantined:  # another thread or device met it first
            return True
        _quarantined[mark] = f"failed at launch: {reason}"
        if plan.device.type != "cpu" and not pretended():
            notes.note_failure(plan, _quarantined[mark], error)
    failed = plan.layer, plan.config.to_text(), plan.tunable.name, reason
    log.warning("liger_hw: %s configuration %s of %s failed and is quarantined: %s", *failed)
    return True


def quarantined(target: Target | None = None) -> dict[Mark, str]:
    """What failed to launch in this process -> why; with a target, also what failed there in earlier ones."""
    with _lock:
        if target is None:
            return dict(_quarantined)
        tables(target)  # also reads what failed in earlier processes
        known = {name: tunable.version for name, tunable in tunables().items()}
        before = {
            mark: reasons[known[mark[1]]]
            for mark, reasons in _quarantined_before.items()
            if mark[0] == target.arch and known.get(mark[1]) in reasons
        }
        return {**before, **_quarantined}


def release(marks: Iterable[Mark]) -> None:
    """Give configurations that failed in this process another chance."""
    with _lock:
        for mark in marks:
            _quarantined.pop(mark, None)
        invalidate()


def misses() -> dict[tuple[str, str, Key], Target]:
    """(op, variant, key) -> Target of every resolution on a real device that found no table entry in this process."""
    return dict(_misses)


def plans() -> list[Plan]:
    """Every launch this process resolved so far."""
    with _lock:
        return [plan for tunable in registered() for plan in tunable.plans.values()]


# -- explain ---------------------------------------------------------------------------------------------------------


def explain(op: str, shape: tuple[int, ...], dtype: "torch.dtype", device: Any = None) -> list[Explanation]:
    """One Explanation for each kernel of `op` itself at problem sizes `shape` (see the op's `dims`).

    device: a torch device, a Target, a name of a device or architecture (`h200`, `gfx942`), None: the accelerator
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
    """What `tunable` launches with for one key, and why."""
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


def backend_of(device: "torch.device") -> Backend:
    """The Backend that serves a torch device."""
    return backend(_target(device).vendor)
