"""Counts the instructions in a kernel's assembly text, for `binary.py` of the vendors."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from .base import INSTRUCTIONS


@dataclass(frozen=True)
class Assembly:
    """How to read one vendor's assembly.

    instruction: matches a line, with groups name and operands; label, branch: match a line, with the label as group
    classify: (name, operands) -> (kind, bits that a thread loads or stores, else None), or None to use `kinds`
    kinds: (kind of `base.INSTRUCTIONS`, prefixes of instruction names); the first match counts
    """

    instruction: re.Pattern[str]
    label: re.Pattern[str]
    branch: re.Pattern[str]
    classify: Callable[[str, str], tuple[str, int | None] | None]
    kinds: tuple[tuple[str, tuple[str, ...]], ...]

    def count(self, text: str) -> dict[str, Any]:
        """`loads`, `stores`, `instructions` and `looped` of a kernel's `Resources`."""
        widths, kinds, looped = {"load": Counter(), "store": Counter()}, Counter(), Counter()
        for name, operands, in_loop in self.instructions(text):
            kind, bits = self.classify(name, operands) or (self._kind(name), None)
            if bits is not None:
                widths[kind][bits] += 1
            kinds[kind] += 1
            looped[kind] += in_loop
        return {
            "loads": dict(sorted(widths["load"].items())),
            "stores": dict(sorted(widths["store"].items())),
            "instructions": {kind: kinds[kind] for kind in INSTRUCTIONS},
            "looped": {kind: looped[kind] for kind in INSTRUCTIONS},
        }

    def _kind(self, name: str) -> str:
        return next((kind for kind, prefixes in self.kinds if name.startswith(prefixes)), "other")

    def instructions(self, text: str) -> Iterator[tuple[str, str, bool]]:
        """(name, operands, whether it is in a loop: between a label and a later branch to this label)."""
        lines = text.splitlines()
        labels: dict[str, int] = {}
        depth_change = [0] * (len(lines) + 1)  # +1 where a loop begins, -1 after it ends
        for number, line in enumerate(lines):
            if match := self.label.match(line):
                labels[match[1]] = number
            elif (match := self.branch.search(line)) and match[1] in labels:
                depth_change[labels[match[1]]] += 1
                depth_change[number + 1] -= 1
        depth = 0
        for number, line in enumerate(lines):
            depth += depth_change[number]
            if match := self.instruction.match(line):
                yield match[1], match[2], depth > 0
