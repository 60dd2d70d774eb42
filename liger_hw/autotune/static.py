"""Choosing without the device: what a candidate would launch."""

from __future__ import annotations

import json
import time
from typing import Any, Iterable, Mapping

from ..backends import LaunchConfig, Target
from ..backends.base import Resources
from . import compile as aot
from . import plan
from .accesses import Access
from .compile import Certificate, Launch


def affected(
    op: str, variant: str, sizes: tuple[int, ...], dtype: str, target: Target, configs: Iterable[LaunchConfig]
) -> list[list[Launch]]:
    """For each configuration of one tunable: its launches, and those of other kernels that depend on the choice.

    A persistent backward's grid decides how many partial sums another kernel adds up.
    """
    name = f"{op}.{variant}"
    traced = [_once(plan.trace(op, tuple(sizes), dtype, target, {name: config})) for config in configs]
    alike = set.intersection(*({(l.kernel, l.key, l.grid, l.sizes) for l in found} for found in traced)) if traced else set()
    return [
        [l for l in found if l.tunable == name or (l.kernel, l.key, l.grid, l.sizes) not in alike] for found in traced
    ]


def _once(launches: list[Launch]) -> list[Launch]:
    """The first launch of each kernel and key: the rest of a chunked loop repeats it."""
    return list({(l.tunable, l.kernel, l.key): l for l in reversed(launches)}.values())[::-1]


def compile_here(launch: Launch) -> Certificate:
    """The certificate of a launch, compiled in this process."""
    began = time.monotonic()
    try:
        answer = aot._compile(json.loads(json.dumps(aot._job(launch))))
    except Exception as error:
        return Certificate(launch, None, f"{type(error).__name__}: {error}".strip()[:500], time.monotonic() - began)
    moved = tuple(Access(*access) for access in answer.get("accesses", ()))
    resources = Resources.from_json(answer["resources"])
    return Certificate(launch, resources, "", time.monotonic() - began, moved, answer.get("unread", ""))


def from_record(record: Mapping[str, Any], target: Target) -> Certificate:
    """A certificate from what `Certificate.to_json` gave."""
    config = LaunchConfig.from_json(record["config"])
    head = target, record["tunable"], tuple(record["key"]), record["layer"], config
    launch = Launch(*head, f"{record['tunable']}:{record['kernel']}", (), (), tuple(record["grid"]), tuple(record["sizes"]))
    resources = Resources.from_json(record["resources"]) if record["resources"] else None
    moved = tuple(Access(*access) for access in record["accesses"])
    return Certificate(launch, resources, record["error"], record["seconds"], moved, record.get("unread", ""))
