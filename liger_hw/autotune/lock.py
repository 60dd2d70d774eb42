"""The lock file: every configuration of a job pinned in one text file, the same on every rank and machine.

`liger-hw lock --model mistral-7b` writes it, `LIGER_HW_LOCK_FILE=liger-hw.lock` makes it layer 1 of the registry. What
it names answers on any device, whatever is tuned there later; the heuristic's choices are pinned too, since they depend
on the device. An entry that is illegal on the device at hand is an error, unless the file says `allow_other_device`:
then the next layer answers. Its digest covers every key and configuration.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Mapping

from .. import files, registry
from ..registry import Candidate, Entry, Plan
from . import lock_file, tables
from .tables import Name

log = logging.getLogger("liger_hw")


def pinned(chosen: Candidate | Plan) -> Entry:
    """What was chosen, as a lock entry. Pinned is pinned: a newer version of the kernel does not unpin it."""
    came = {k: v for k, v in chosen.provenance.items() if k in ("median_us", "gain", "device", "triton", "date")}
    kind = str(chosen.provenance.get("kind", "heuristic"))
    return Entry(chosen.config, {"kind": kind, "layer": chosen.layer, **came})


def write(path: str | Path, table: Mapping[Name, Entry], about: Mapping[str, Any]) -> str:
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
    table = {(plan.tunable.op, plan.tunable.variant, plan.key): pinned(plan) for plan in plans}
    return write(path, table, about(", ".join(devices), allow_other_device))


def about(device: str, allow_other_device: bool, **more: Any) -> dict[str, Any]:
    """What a lock file says of itself beside its digest."""
    return {"device": device, **more, **({"allow_other_device": True} if allow_other_device else {})}
