"""What can be read from a kernel's TTIR, Triton's first form of it, before layouts and registers.

`accesses` finds which arguments a kernel loads and stores, in tiles of what size, inside a loop or not: `tt.load %p` of
a tensor of pointers, whose base is followed back to an argument of the function.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple, Sequence

_LOCATION = re.compile(r" loc\(.*\)$")
_NAME = re.compile(r"%[\w.$-]+")
_ARGUMENT = re.compile(r"(%[\w.$-]+): (!tt\.ptr<|[\w<>!.:]+)")
_POINTER_OPERATIONS = (
    r"tt\.addptr|tt\.splat|tt\.broadcast|tt\.expand_dims|tt\.bitcast|tt\.reshape|arith\.select|ttg?\.\w+"
)
_DEFINITION = re.compile(rf"^\s*(%[\w.$-]+)(?::\d+)? = (?:\"?)({_POINTER_OPERATIONS})\S* (.*)$")
_LOOP_ARGUMENT = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+)")
_ACCESS = re.compile(r"\b(tt\.load|tt\.store|tt\.atomic_\w+) (?:\w+, \w+, \w+, )?(%[\w.$-]+)")
_POINTERS = re.compile(r"(?:tensor<((?:\d+x)+))?!tt\.ptr<(\w+)(?:, \d+)?>>?")
_BITS = re.compile(r"(\d+)")


class Access(NamedTuple):
    """One load, store or atomic statement.

    argument: position in the kernel's parameters; kind: `load`, `store` or `atomic`; tile: bytes of one execution by
    one program; looped: whether it stands in a loop
    """

    argument: int
    kind: str
    tile: int
    looped: bool


@dataclass
class _Region:
    """What stands between braces; `other` is what the branch before an `else` accesses."""

    loop: bool
    accesses: list[Access] = field(default_factory=list)
    other: list[Access] = field(default_factory=list)


def accesses(ttir: str, positions: Sequence[int]) -> list[Access]:
    """The accesses of a kernel; `positions` are the parameters that its TTIR function still has, in order.

    Of two branches the one that moves more counts. Raises `ValueError` where an access has no known argument.
    """
    base: dict[str, str] = {}
    position: dict[str, int] = {}
    regions = [_Region(False)]
    for line in ttir.splitlines():
        bare = _LOCATION.sub("", line.strip())
        if bare.startswith("}") and len(regions) > 1:
            closed = regions.pop()
            if bare.startswith("} else"):
                regions.append(_Region(False, other=closed.accesses))
                continue
            most = max(closed.accesses, closed.other, key=lambda branch: sum(access.tile for access in branch))
            regions[-1].accesses.extend(most)
        if "tt.func public" in line:
            names = [name for name, _ in _ARGUMENT.findall(line.split("attributes")[0])]
            if len(names) != len(positions):
                raise ValueError(f"the kernel's TTIR has {len(names)} parameters, expected {len(positions)}")
            position = dict(zip(names, positions))
            continue
        if "iter_args(" in line:
            base.update({new: old for new, old in _LOOP_ARGUMENT.findall(line[line.index("iter_args(") :])})
        defined = _DEFINITION.match(line)
        if defined and "!tt.ptr<" in line:
            operands = _NAME.findall(defined[3])
            base[defined[1]] = operands[1] if defined[2] == "arith.select" else operands[0]
        if accessed := _ACCESS.search(line):
            name = accessed[2]
            while name in base and name not in position:
                name = base[name]
            if name not in position:
                raise ValueError(f"cannot tell which argument is accessed by: {line.strip()[:200]}")
            kind = {"tt.load": "load", "tt.store": "store"}.get(accessed[1], "atomic")
            looped = any(region.loop for region in regions)
            regions[-1].accesses.append(Access(position[name], kind, _tile(line), looped))
        if bare.endswith("{"):
            regions.append(_Region("scf.for" in bare or "scf.while" in bare or bare.startswith("} do")))
    return regions[0].accesses


def _tile(line: str) -> int:
    """Bytes that the tensor of pointers on this line points to."""
    shape, element = _POINTERS.findall(line)[-1]
    bits = _BITS.search(element)
    width = max(1, int(bits[1]) // 8) if bits and not element.startswith("f8") else 1
    return math.prod(int(size) for size in shape.split("x")[:-1]) * width
