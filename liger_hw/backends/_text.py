"""What the readers of assembly share: instructions, told apart by whether a loop may repeat them."""

from __future__ import annotations

import re
from typing import Iterator


def instructions(
    text: str, instruction: re.Pattern[str], label: re.Pattern[str], branch: re.Pattern[str]
) -> Iterator[tuple[re.Match[str], bool]]:
    """(match, whether it stands between a label and a later branch back to it) of every instruction."""
    lines = text.splitlines()
    labels: dict[str, int] = {}
    depth = [0] * (len(lines) + 1)  # +1 where a loop begins, -1 after it ends
    for number, line in enumerate(lines):
        if found := label.match(line):
            labels[found[1]] = number
        elif (found := branch.search(line)) and found[1] in labels:
            depth[labels[found[1]]] += 1
            depth[number + 1] -= 1
    inside = 0
    for number, line in enumerate(lines):
        inside += depth[number]
        if found := instruction.match(line):
            yield found, inside > 0
