"""Makes every rank launch the same kernels.

    digest = liger_hw.distributed.sync()      # after init_process_group, before the first step

`sync` copies rank 0's tables of configurations to every rank, and compares what else decides a launch. Ranks exchange
JSON through the store of `init_process_group`, without collectives and without waiting for a GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
from dataclasses import replace
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from .. import env, registry
from ..autotune import tables
from ..autotune.store import answers
from ..backends import LaunchConfig, Target
from ..registry import Entry

log = logging.getLogger("liger_hw")
_checked_store: Any = None
"""Store of the process group whose ranks were found to agree, or need no comparison."""


def sync(group: Any = None, device: torch.device | str | None = None, seconds: float | None = None) -> str:
    """Use rank 0's tables on every rank of `group`, and return their common `digest`.

    Every rank of the group must call it. A configuration that one rank has quarantined is quarantined on all. The
    tables are used until `registry.reload()`. Without an initialised process group only the digest is computed.

    device: this rank's device (default: the current accelerator, or the CPU)
    seconds: how long to wait for the other ranks (default: LIGER_HW_SYNC_SECONDS)

    Raises `RuntimeError` on every rank if ranks differ otherwise (in devices, versions of kernels or
    LIGER_HW_DETERMINISTIC), if a rank fails, or if one does not answer in time.
    """
    if seconds is not None and not 0 < seconds < 3.2e8:
        raise ValueError(f"liger_hw.distributed.sync: seconds must be above 0 and below ten years, got {seconds!r}")
    if not (dist.is_available() and dist.is_initialized()):
        return digest(registry.target_named(device))
    return _sync(group, lambda: registry.target_named(device), seconds, {})


def _sync(group: Any, find_target: Callable[[], Target], seconds: float | None, more: dict[str, Any]) -> str:
    ranks, store = dist.get_process_group_ranks(group or dist.group.WORLD), _store()
    first = ranks[0] == dist.get_rank()
    if store is None:
        raise RuntimeError("liger_hw.distributed.sync: this process group has no store (MPI): pin with a lock file")

    def describe() -> dict[str, Any]:
        target = find_target()
        facts = {name: fact for name, fact in facts_of(target).items() if name not in ("failed", "configurations")}
        failed = [
            [name, list(key), config, why]
            for (arch, name, key, config), why in registry.quarantined(target).items()
            if arch == target.arch
        ]
        table = [
            [entry.layer, tables.to_record(name, entry)]
            for name, entries in (registry.table(target).items() if first else ())
            for entry in answers(entries)
        ]
        return {"facts": facts | more, "table": table, "failed": failed}

    seconds = seconds or env.LIGER_HW_SYNC_SECONDS or 300.0
    everyone = _exchange(store, _key_prefix(store, ranks), describe, ranks, seconds)
    differences = (_difference(everyone[0]["facts"], rank["facts"]) for rank in everyone)
    wrong = [f"rank {number}: {difference}" for number, difference in zip(ranks, differences) if difference]
    if wrong:
        raise RuntimeError(
            f"liger_hw.distributed.sync: {len(wrong)} of {len(ranks)} ranks would launch other kernels than rank "
            f"{ranks[0]}. {'; '.join(wrong[:4])}. Run the same liger_hw and environment on the same devices, "
            "or pin with LIGER_HW_LOCK_FILE"
        )
    source = f"rank {ranks[0]} of {len(ranks)}"
    table: registry.Table = {}
    for layer, record in everyone[0]["table"]:
        name, entry = tables.from_record(record, source)
        table.setdefault(name, []).append(replace(entry, layer=layer))
    for tunable, key, config, why in (one for rank in everyone for one in rank["failed"]):
        about = {"kind": "failed", "reason": why}
        entry = Entry(LaunchConfig.from_json(json.loads(config)), about, registry.get_tunable(tunable).version)
        table.setdefault((*tunable.split("."), tuple(key)), []).append(entry)
    registry.set_table(find_target(), table)
    agreed = digest(find_target())
    if first:
        log.info("liger_hw: %d ranks agree on kernel configurations, digest %s", len(ranks), agreed)
    return agreed


def at_first_step(model: torch.nn.Module, parts: Callable[[torch.nn.Module], dict[str, int]]) -> None:
    """`sync` before the first step of a patched causal LM; called by each training forward in a process group.

    After ranks have agreed once in a process group it does nothing; in a step that is captured in a graph or traced by
    torch.compile it waits for the next step. LIGER_HW_SYNC_SECONDS=0 switches it off. Raises as `sync` does.

    parts: returns kernel -> number of a model's patched modules, which must agree if the ranks' models are the same
    """
    global _checked_store
    store = _store()
    if store is None or store is _checked_store:
        return
    if dist.get_world_size() == 1 or dist.get_backend() == "fake" or not env.LIGER_HW_SYNC_SECONDS:
        _checked_store = store
        return
    if registry.is_capturing_or_tracing():
        return
    device = next((p.device for p in model.parameters()), None)
    modules = _hash([f"{name} {type(module).__name__}" for name, module in model.named_modules()])
    try:
        _sync(None, lambda: registry.target_named(device), None, {"patched": {"modules": modules, **parts(model)}})
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}. (A patched model's first step compares the ranks; LIGER_HW_SYNC_SECONDS=0 switches this off, "
            "for jobs whose ranks differ on purpose)"
        ) from error
    _checked_store = store


def digest(target: Target | None = None) -> str:
    """Hash of everything that decides which kernel configurations this process launches on `target`."""
    return _hash(facts_of(target or registry.target_named(None)))


def facts_of(target: Target) -> dict[str, Any]:
    """Everything that `digest` hashes, as JSON data."""
    tunables = registry.tunables()
    kernels = {name: tunable.version for name, tunable in tunables.items()}
    configurations = [
        [*name, [[one.layer, one.config.to_json(), one.version] for one in answers(entries)]]
        for name, entries in sorted(registry.table(target).items(), key=lambda item: item[0])
        if answers(entries)
    ]
    return {
        "target": {k: v for k, v in target.to_json().items() if k != "name"},
        "deterministic": registry.is_deterministic(),
        "kernels": _hash(kernels),
        "overrides": [[scope, config.to_text()] for scope, config in registry.overrides()],
        "environment": [f"{t.name}={forced[1]}" for t in tunables.values() if (forced := registry.forced_config(t))],
        "failed": sorted([*mark[:2], list(mark[2]), mark[3]] for mark in registry.quarantined(target)),
        "interpreted": env.LIGER_HW_INTERPRET,
        "configurations": configurations,
    }


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """How two ranks' facts differ, or ""."""
    differences = []
    for name, expected in first.items():
        value = other.get(name)
        if isinstance(expected, dict) and isinstance(value, dict):
            parts = [part for part in {**expected, **value} if expected.get(part) != value.get(part)]
            if "modules" not in parts:  # stages of a pipeline differ in modules, so their counts may differ
                words = (f"{part} {value.get(part, 0)} instead of {expected.get(part, 0)}" for part in parts[:3])
                differences += [f"{name} {text}" for text in words]
        elif value != expected:
            differences.append(f"different {name}" if isinstance(expected, list) else f"{name} {value}, not {expected}")
    return ", ".join(differences)


def _key_prefix(store: Any, ranks: Sequence[int]) -> str:
    """The prefix of one `sync`'s keys: each rank counts its calls in the store, so all ranks get the same number.

    A new process group has a new store, so processes that were in an earlier group start at 0 as new ones do.
    """
    group = f"liger_hw/{_hash(list(ranks))}"
    return f"{group}/{store.add(f'{group}/turns/{dist.get_rank()}', 1)}"


def _exchange(
    store: Any, prefix: str, describe: Callable[[], dict[str, Any]], ranks: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """`describe()` of every rank, in the order of `ranks`. prefix: of the keys in the store

    The process that holds the store may end after this call, so each rank waits up to 10 seconds until all have read.
    Raises `RuntimeError` on every rank if one fails or has not answered after `seconds`.
    """
    try:
        message = describe()
    except Exception as error:  # sent to the other ranks, which would wait otherwise
        message = {"error": f"{type(error).__name__}: {error}"}
    store.set(f"{prefix}/{dist.get_rank()}", json.dumps(message))
    keys = [f"{prefix}/{rank}" for rank in ranks]
    try:
        store.wait(keys, datetime.timedelta(seconds=seconds))
        messages = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    except Exception as error:  # torch's stores raise different types
        raise RuntimeError(f"liger_hw.distributed.sync: {_missing(store, ranks, keys)} ({error})") from error
    with contextlib.suppress(Exception):  # a rank may have ended
        store.set(f"{prefix}/{dist.get_rank()}/read", "")
        store.wait([f"{key}/read" for key in keys], datetime.timedelta(seconds=min(seconds, 10.0)))
    everyone = [json.loads(one) for one in messages]
    errors = [f"rank {rank}: {one['error']}" for rank, one in zip(ranks, everyone) if "error" in one]
    if errors:
        raise RuntimeError(f"liger_hw.distributed.sync: {len(errors)} of {len(ranks)} ranks cannot: {errors[0]}")
    return everyone


def _missing(store: Any, ranks: Sequence[int], keys: Sequence[str]) -> str:
    try:
        missing = [str(rank) for rank, key in zip(ranks, keys) if not store.check([key])]
    except Exception:
        return "the store does not answer: the process that holds it, mostly rank 0, has ended"
    return (
        f"rank {', '.join(missing)} of {len(ranks)} has not answered in time: it died, is late, or does not call sync, "
        "as in jobs in which only some ranks train a patched model"
    )


def _store() -> Any:
    """The store of the default process group, or None if its backend has none."""
    from torch.distributed import distributed_c10d  # a torch without distributed lacks it

    try:
        return distributed_c10d._get_default_store()
    except (ValueError, RuntimeError, KeyError):
        return None
