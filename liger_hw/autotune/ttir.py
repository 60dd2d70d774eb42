"""Reads a kernel's TTIR, Triton's first IR, which has no layouts or registers yet.

`accesses` finds the arguments that a kernel loads and stores, the sizes of their tiles, and whether that is in a loop,
by following each access's pointers back to an argument. `estimate` estimates a kernel's resources for devices for which
the installed Triton has no compiler.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from ..backends import LaunchConfig, Target
from ..backends.base import INSTRUCTIONS, Resources

_LOCATION = re.compile(r" loc\(.*\)$")
_NAME = re.compile(r"%[\w.$-]+")
_ARGUMENT = re.compile(r"(%[\w.$-]+): (!tt\.ptr<|[\w<>!.:]+)")
_DEFINITION = re.compile(r"^\s*(%[\w.$-]+)(?::\d+)? = (?:\"?)(arith\.select|ttg?\.\w+)\S* (.*)$")
_LOOP_ARGUMENT = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+)")
_ACCESS = re.compile(r"\b(tt\.load|tt\.store|tt\.atomic_\w+) (?:\w+, \w+, \w+, )?(%[\w.$-]+)")
_POINTERS = re.compile(r"(?:tensor<((?:\d+x)+))?!tt\.ptr<(\w+)(?:, \d+)?>>?")
_BITS = re.compile(r"(\d+)")

_OPERATION = re.compile(r"= (?:\"?)(arith|math|tt)\.(\w+)")
_SHAPE = re.compile(r"tensor<((?:\d+x)+)")
_SPECIAL = {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "erf", "sin", "cos", "divf"}
_FREE = {"constant", "splat", "broadcast", "expand_dims", "reshape", "make_range", "bitcast", "addptr"}
_FREE |= {"store", "reduce", "return"}  # `estimate` counts these otherwise


class Access(NamedTuple):
    """One load, store or atomic statement.

    argument: position in the kernel's parameters; kind: `load`, `store` or `atomic`
    tile: bytes that one program accesses each time; looped: whether it is in a loop
    """

    argument: int
    kind: str
    tile: int
    looped: bool


@dataclass
class _Region:
    """The accesses between two braces. if_branch: in an `else`, the accesses of the branch before it"""

    loop: bool
    accesses: list[Access] = field(default_factory=list)
    if_branch: list[Access] = field(default_factory=list)


def _opens_loop(line: str) -> bool:
    return "scf.for" in line or "scf.while" in line or line.startswith("} do")


def accesses(ttir: str, positions: Sequence[int]) -> list[Access]:
    """The accesses of a kernel. Of an `if` and its `else`, only the branch that moves more bytes counts.

    positions: for each parameter of the TTIR function, its position in the kernel's parameters
    Raises `ValueError` if the argument of an access cannot be found.
    """
    base: dict[str, str] = {}
    position: dict[str, int] = {}
    regions = [_Region(False)]
    for line in ttir.splitlines():
        bare = _LOCATION.sub("", line.strip())
        if bare.startswith("}") and len(regions) > 1:
            closed = regions.pop()
            if bare.startswith("} else"):
                regions.append(_Region(False, if_branch=closed.accesses))
                continue
            branches = closed.accesses, closed.if_branch
            regions[-1].accesses.extend(max(branches, key=lambda branch: sum(access.tile for access in branch)))
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
            regions.append(_Region(_opens_loop(bare)))
    return regions[0].accesses


def _tile(line: str) -> int:
    """Size in bytes of the tile that the pointers on this line address."""
    shape, element = _POINTERS.findall(line)[-1]
    bits = _BITS.search(element)
    width = max(1, int(bits[1]) // 8) if bits and not element.startswith("f8") else 1
    return math.prod(int(size) for size in shape.split("x")[:-1]) * width


def estimate(
    ttir: str, accesses: list[Access], target: Target, config: LaunchConfig, options: Mapping[str, Any]
) -> Resources:
    """A kernel's resources on `target`, estimated from its TTIR.

    An operation on a tensor counts once for each element of a thread. A reduction is one shuffle for each halving of
    the warp and, with several warps, two barriers. Accesses are at most 16 bytes wide. Registers hold the largest tile
    in fp32, once more every tile of at least half its size, and some addresses.
    """
    threads = config.num_warps * target.warp_size
    once, looped = Counter(), Counter()
    tiles = [0]  # elements of a thread, for each load
    for line, inside in _body(ttir):
        counts = looped if inside else once
        shape, operation = _SHAPE.search(line), _OPERATION.search(line)
        each = -(-math.prod(int(n) for n in shape[1].split("x")[:-1]) // threads) if shape else 1
        if line.lstrip().startswith("})"):  # the end of a reduction, with its shape
            counts["other"] += each
            counts["shuffle"] += target.warp_size.bit_length() - 1
            counts["barrier"] += 2 * (config.num_warps > 1)
        elif operation and operation[2] == "load":
            tiles.append(each)
        elif operation and operation[2] not in _FREE:
            counts["special" if operation[2] in _SPECIAL else "other"] += each
    widths: dict[str, Counter] = {"load": Counter(), "store": Counter()}
    for access in accesses:
        each = max(1, access.tile // threads)
        width = min(16, 1 << (each.bit_length() - 1))
        widths["load" if access.kind == "load" else "store"][8 * width] += -(-each // width)
        (looped if access.looped else once)[access.kind] += -(-each // width)
    registers = 20 + max(tiles) * (1 + sum(2 * tile >= max(tiles) for tile in tiles))
    scale = 2 if str(options.get("grf_mode", "")) == "256" else 1  # twice the registers, half the work-items
    limit = target.registers // target.max_threads_per_multiprocessor * scale
    resident = target.max_threads_per_multiprocessor // scale
    spills = max(0, registers - limit)
    return Resources(
        registers=min(registers, limit),
        spills=spills,
        scratch=4 * spills,
        shared=4 * config.num_warps if once["barrier"] + looped["barrier"] else 0,
        threads=threads,
        occupancy=resident // threads * threads / target.max_threads_per_multiprocessor,
        loads=dict(widths["load"]),
        stores=dict(widths["store"]),
        instructions={kind: once[kind] + looped[kind] for kind in INSTRUCTIONS},
        looped={kind: looped[kind] for kind in INSTRUCTIONS},
    )


def _body(ttir: str) -> Iterator[tuple[str, bool]]:
    """(line, whether it is in a loop) for each line in the kernel's function."""
    regions: list[bool] = []
    for line in ttir.splitlines():
        bare = _LOCATION.sub("", line.strip())
        if bare.startswith("}") and regions:
            regions.pop()
        if regions:
            yield line, any(regions)
        if bare.endswith("{"):
            regions.append(_opens_loop(bare))
