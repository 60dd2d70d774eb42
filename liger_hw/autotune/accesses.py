"""Which arguments a kernel loads and stores, in tiles of what size, in a loop or not: read from its TTIR.

TTIR is Triton's first form of a kernel, the same for every vendor, before layouts and registers: `tt.load %p` of a tensor
of pointers, whose base is followed back to an argument of the function. What a launch moves follows from it, the sizes
of its tensors and its grid.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Sequence

_ARGUMENT = re.compile(r"(%[\w.$-]+): (!tt\.ptr<|[\w<>!.:]+)")
_DEFINITION = re.compile(
    r"^\s*(%[\w.$-]+)(?::\d+)? = (?:\"?)(tt\.addptr|tt\.splat|tt\.broadcast|tt\.expand_dims|tt\.bitcast|tt\.reshape|arith\.select|ttg?\.\w+)\S* (.*)$"
)
_LOOP_ARGUMENT = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+)")
_ACCESS = re.compile(r"\b(tt\.load|tt\.store|tt\.atomic_\w+) (?:\w+, \w+, \w+, )?(%[\w.$-]+)")
_POINTERS = re.compile(r"(?:tensor<((?:\d+x)+))?!tt\.ptr<(\w+)(?:, \d+)?>>?")
_NAME = re.compile(r"%[\w.$-]+")
_BITS = re.compile(r"(\d+)")
_LOCATION = re.compile(r" loc\(.*\)$")


@dataclass(frozen=True)
class Access:
    """One load, store or atomic statement. argument: its position in the kernel's parameters; tile: bytes of one execution
    by one program; looped: whether it stands in a loop."""

    argument: int
    kind: str
    tile: int
    looped: bool

    def to_json(self) -> list[Any]:
        return [self.argument, self.kind, self.tile, self.looped]


def accesses(ttir: str, positions: Sequence[int]) -> list[Access]:
    """The accesses of a kernel; `positions` are the parameters that its TTIR function still has, in order.

    Of two branches the one that moves more counts. Raises `ValueError` where an argument cannot be told.
    """
    base: dict[str, str] = {}
    position: dict[str, int] = {}
    regions = [_Region(False, [])]
    for line in ttir.splitlines():
        bare = _LOCATION.sub("", line.strip())
        if bare.startswith("}") and len(regions) > 1:
            closed = regions.pop()
            if bare.startswith("} else"):
                regions.append(_Region(False, [], closed.found))
                continue
            most = max(closed.found, closed.instead, key=lambda found: sum(access.tile for access in found))
            regions[-1].found.extend(most)
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
            what = {"tt.load": "load", "tt.store": "store"}.get(accessed[1], "atomic")
            looped = any(region.loop for region in regions)
            regions[-1].found.append(Access(position[name], what, _tile(line), looped))
        if bare.endswith("{"):
            regions.append(_Region("scf.for" in bare or "scf.while" in bare or bare.startswith("} do"), []))
    return regions[0].found


@dataclass
class _Region:
    """What stands between braces; `instead` is what the branch before an else has."""

    loop: bool
    found: list[Access]
    instead: list[Access] = field(default_factory=list)


def _tile(line: str) -> int:
    """Bytes that the tensor of pointers on this line points to."""
    shape, kind = _POINTERS.findall(line)[-1]
    return math.prod(int(size) for size in shape.split("x")[:-1]) * _bytes(kind)


def _bytes(kind: str) -> int:
    bits = _BITS.search(kind)
    return max(1, int(bits[1]) // 8) if bits and not kind.startswith("f8") else 1
