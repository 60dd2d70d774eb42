"""Counts instructions in a kernel's assembly text, for the vendors' `binary.py`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from .base import INSTRUCTIONS


@dataclass(frozen=True)
class Assembly:
    """How to read one vendor's assembly.

    instruction: matches a line, with the name and the rest as groups; label, branch: have the label as their group
    classify: (name, rest) -> (kind, bits of one thread's access if it is a load or store), None to use `kinds`
    kinds: (kind of `base.INSTRUCTIONS`, how the names of such instructions begin); the first match counts
    """

    instruction: re.Pattern[str]
    label: re.Pattern[str]
    branch: re.Pattern[str]
    classify: Callable[[str, str], tuple[str, int | None] | None]
    kinds: tuple[tuple[str, tuple[str, ...]], ...]

    def count(self, text: str) -> dict[str, Any]:
        """`loads`, `stores`, `instructions` and `looped` of a kernel's `Resources`."""
        widths, kinds, looped = {"load": Counter(), "store": Counter()}, Counter(), Counter()
        for name, rest, repeated in self.instructions(text):
            kind, bits = self.classify(name, rest) or (self._kind(name), None)
            if bits is not None:
                widths[kind][bits] += 1
            kinds[kind] += 1
            looped[kind] += repeated
        return {
            "loads": dict(sorted(widths["load"].items())),
            "stores": dict(sorted(widths["store"].items())),
            "instructions": {kind: kinds[kind] for kind in INSTRUCTIONS},
            "looped": {kind: looped[kind] for kind in INSTRUCTIONS},
        }

    def _kind(self, name: str) -> str:
        return next((kind for kind, starts in self.kinds if name.startswith(starts)), "other")

    def instructions(self, text: str) -> Iterator[tuple[str, str, bool]]:
        """(name, rest, whether it is in a loop: between a label and a later branch back to it)."""
        lines = text.splitlines()
        labels: dict[str, int] = {}
        depth = [0] * (len(lines) + 1)  # +1 where a loop begins, -1 after it ends
        for number, line in enumerate(lines):
            if match := self.label.match(line):
                labels[match[1]] = number
            elif (match := self.branch.search(line)) and match[1] in labels:
                depth[labels[match[1]]] += 1
                depth[number + 1] -= 1
        inside = 0
        for number, line in enumerate(lines):
            inside += depth[number]
            if match := self.instruction.match(line):
                yield match[1], match[2], inside > 0
