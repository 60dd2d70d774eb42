"""The lock file: every configuration of a job pinned in one text file, the same on every rank and machine.

`liger-hw lock --model mistral-7b` writes it, `LIGER_HW_LOCK_FILE=liger-hw.lock` makes it layer 1 of the registry. What
it names answers on any device, whatever is tuned there later; the heuristic's choices are pinned too, since they depend
on the device. An entry that is illegal on the device at hand is an error, unless the file says `allow_other_device`:
then the next layer answers. Its digest covers every key and configuration.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Iterable, Mapping

from .. import files, registry
from ..backends import Target
from ..registry import Entry, Key, Plan, Tunable
from . import lock_file, tables
from .tables import Name

log = logging.getLogger("liger_hw")


def pin(target: Target, keys: Iterable[tuple[Tunable, Key]]) -> dict[Name, Entry]:
    """What the registry answers on `target` for each tunable and key, as lock entries."""
    table: dict[Name, Entry] = {}
    for tunable, key in keys:
        chosen = registry.choose(tunable, target, key)
        table[tunable.op, tunable.variant, key] = Entry(chosen.config, _provenance(chosen.layer, chosen.provenance))
    return table


def pin_plans(plans: Iterable[Plan]) -> dict[Name, Entry]:
    """What a running program resolved so far (`registry.plans()`), as lock entries."""
    return {
        (p.tunable.op, p.tunable.variant, p.key): Entry(p.config, _provenance(p.layer, p.provenance)) for p in plans
    }


def _provenance(layer: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Where a pinned configuration came from. Pinned is pinned: a changed kernel source does not unpin it."""
    kept = {k: provenance[k] for k in ("median_us", "gain", "device", "triton", "date") if k in provenance}
    return {"kind": str(provenance.get("kind", "heuristic")), "layer": layer, **kept}


def write(path: Path, table: Mapping[Name, Entry], about: Mapping[str, Any]) -> str:
    """Write a lock file; returns its digest. Raises `OSError`."""
    mark = lock_file.digest(table)
    text = tables.render({"kind": "lock", "digest": mark, **about}, table)
    files.write_text(path, text)
    return mark


def save(path: str | Path = "liger-hw.lock", allow_other_device: bool = False) -> str:
    """Pin everything this process launched so far; returns the digest. For a training script after its first step.

    allow_other_device: where an entry is illegal on the device it is used on, the next layer answers; else an error
    """
    plans = registry.plans()
    if not plans:
        log.warning("liger_hw: nothing was launched so far, so %s pins nothing; save it after the first step", path)
    devices = sorted({plan.target.name for plan in plans})
    return write(Path(path), pin_plans(plans), about(", ".join(devices), allow_other_device))


def about(device: str, allow_other_device: bool, **more: Any) -> dict[str, Any]:
    """What a lock file says of itself beside its digest."""
    return {"device": device, **more, **({"allow_other_device": True} if allow_other_device else {})}
