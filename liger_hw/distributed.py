"""The same kernels on every rank.

    import liger_hw.distributed
    digest = liger_hw.distributed.sync()      # after init_process_group, before the first step

Two ranks whose caches differ would launch differently tuned kernels: another order of summation, another speed.
`sync` gives every rank rank 0's tables, then compares a digest of all that decides a launch. There are no collectives
anywhere else in liger_hw.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from . import env, registry
from .autotune import tables
from .backends import Target

if TYPE_CHECKING:
    import torch

log = logging.getLogger("liger_hw")


def sync(group: Any = None, device: "torch.device | str | None" = None) -> str:
    """Answer from rank 0's tables on every rank of `group`, and return the digest they agree on.

    device: this rank's device (default: the current accelerator, or the CPU). Collective: every rank must call it. What
    any rank has quarantined is quarantined on all. Holds until `registry.reload()`. Without an initialised process
    group it only returns the digest. Raises `RuntimeError` on every rank when ranks still differ (other devices, other
    kernel sources, another LIGER_HW_DETERMINISTIC) or when one cannot use its LIGER_HW_LOCK_FILE.
    """
    import torch.distributed as dist

    target = registry.target_named(device)
    if not (dist.is_available() and dist.is_initialized()):
        return digest(target)
    try:
        failed = [
            [list(mark[:2]), list(mark[2]), mark[3], reason] for mark, reason in registry.quarantined(target).items()
        ]
        mine = {"layers": _as_json(target) if dist.get_rank(group) == 0 else [], "failed": failed}
    except env.SettingError as error:  # raised alone, it would leave the other ranks waiting
        mine = {"refused": str(error)}
    everyone = _all_gather(mine, group)
    refused = [f"rank {number}: {rank['refused']}" for number, rank in enumerate(everyone) if "refused" in rank]
    if refused:
        raise RuntimeError(f"liger_hw.distributed.sync: {len(refused)} of {len(everyone)} ranks cannot: {refused[0]}")
    source = f"rank 0 of {len(everyone)}"
    layers = []
    for layer, records in everyone[0]["layers"]:
        layers.append((layer, dict(tables.from_record(record, source) for record in records)))
    failed = [one for rank in everyone for one in rank["failed"]]
    marks = {(*names, tuple(key), config): reason for names, key, config, reason in reversed(failed)}
    registry.set_tables(target, layers, marks)
    facts = facts_of(target)
    reports = _all_gather(facts, group)
    wrong = [
        f"rank {number}: {_difference(reports[0], report)}"
        for number, report in enumerate(reports)
        if report != reports[0]
    ]
    if wrong:
        raise RuntimeError(
            f"liger_hw.distributed.sync: {len(wrong)} of {len(reports)} ranks would launch other kernels than rank 0. "
            f"{'; '.join(wrong[:4])}. Run the same liger_hw and environment on the same devices, "
            "or pin with LIGER_HW_LOCK_FILE"
        )
    found = _hash(facts)
    if dist.get_rank(group) == 0:
        log.info("liger_hw: %d ranks agree on kernel configurations, digest %s", len(reports), found)
    return found


def digest(target: Target | None = None) -> str:
    """Hash of everything that decides which kernel configurations this process launches on `target`."""
    return _hash(facts_of(target or registry.target_named(None)))


def facts_of(target: Target) -> dict[str, Any]:
    """What the digest covers, as JSON data."""
    tunables = registry.tunables()
    kernels = {name: tunable.kernel_hash() for name, tunable in tunables.items()}
    configurations = [
        [
            layer,
            sorted(
                [op, variant, list(key), e.config.to_json(), e.kernel_hash] for (op, variant, key), e in table.items()
            ),
        ]
        for layer, table in registry.tables(target)
    ]
    return {
        "target": {k: v for k, v in json.loads(json.dumps(target.to_json())).items() if k != "name"},
        "deterministic": registry.is_deterministic(),
        "kernels": _hash(kernels),
        "overrides": [[scope, config.to_text()] for scope, config in registry.overrides()],
        "environment": [f"{t.name}={forced[1]}" for t in tunables.values() if (forced := registry.forced_config(t))],
        "failed": sorted([*mark[:2], list(mark[2]), mark[3]] for mark in registry.quarantined(target)),
        "interpreted": env.get("LIGER_HW_INTERPRET"),
        "configurations": configurations,
    }


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    names = [name for name in first if first[name] != other.get(name)]
    said = []
    for name in names:
        if name == "target":
            fields = [k for k in first[name] if first[name][k] != other[name].get(k)]
            said.append(", ".join(f"{k} {other[name].get(k)} instead of {first[name][k]}" for k in fields[:3]))
        elif name in ("deterministic", "interpreted", "kernels"):
            said.append(f"{name} {other[name]} instead of {first[name]}")
        else:
            said.append(f"different {name}")
    return ", ".join(said)


def _as_json(target: Target) -> list[Any]:
    return [
        [layer, [tables.to_record(name, entry) for name, entry in sorted(table.items())]]
        for layer, table in registry.tables(target)
    ]


def _all_gather(data: Any, group: Any) -> list[Any]:
    """JSON data of every rank. As bytes in tensors: torch's object collectives would unpickle what ranks send."""
    import torch
    import torch.distributed as dist

    place = _tensor_device(group)
    payload = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8).to(place)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([payload.numel()], dtype=torch.int64, device=place), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=place)
    padded[: payload.numel()] = payload
    received = [torch.zeros_like(padded) for _ in range(world)]
    dist.all_gather(received, padded, group=group)
    return [json.loads(bytes(part[:length].cpu().numpy())) for part, length in zip(received, lengths)]


def _tensor_device(group: Any) -> "torch.device":
    """A device the group can send from: the CPU where one of its backends serves it, else the current accelerator."""
    import torch
    import torch.distributed as dist

    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type, torch.get_device_module(accelerator.type).current_device())
