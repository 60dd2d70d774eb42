"""What a compiled NVIDIA kernel takes: registers from the cubin, memory widths and instructions from its PTX.

The cubin is read by the `cuobjdump` that Triton's wheel brings. PTX is before register allocation and scheduling, so the
instruction counts say what was asked for, not the cycles it takes. Registers are handed out by the warp in steps of 256,
warps in fours, and each resident block keeps 1 KiB of shared memory for itself (CUDA C++ Programming Guide, "Compute
Capabilities"; Hopper Tuning Guide, "Shared Memory").
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from typing import Any

from .._text import instructions
from ..base import INSTRUCTIONS, Resources, Target

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w]*(?:\.[\w:]+)+)(.*)$")
_LABEL = re.compile(r"^(\$L__BB\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+);")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_WIDTH = re.compile(r"(?:\.v(\d))?\.[bsuf](\d+)$")
_COPY = re.compile(r"\],\s*(0x[0-9a-f]+|\d+)")
_KINDS = (
    ("atomic", ("atom.", "red.")),
    ("matrix", ("mma.", "wgmma.", "tcgen05.", "ldmatrix.", "stmatrix.")),
    ("shuffle", ("shfl.", "redux.", "vote.")),
    ("barrier", ("bar.", "barrier.", "mbarrier.", "cp.async.wait", "fence.")),
    ("special", ("ex2.", "lg2.", "rsqrt.", "sqrt.", "rcp.", "tanh.", "sin.", "cos.", "div.")),
    ("shared", ("ld.shared", "st.shared")),
    ("spill", ("ld.local", "st.local")),
)
_KIB = 1024
_MOST_BLOCKS = 32


def resources(target: Target, compiled: Any) -> Resources:
    """Resources of a `triton.compiler.CompiledKernel` made for an NVIDIA target."""
    registers, stack, local = _usage(compiled.asm["cubin"])
    threads = compiled.metadata.num_warps * target.warp_size
    shared = compiled.metadata.shared
    loads, stores, kinds, looped = _count(compiled.asm["ptx"])
    return Resources(
        registers=registers,
        spills=(stack + local) // 4,
        scratch=stack + local,
        shared=shared,
        threads=threads,
        occupancy=_occupancy(target, registers, shared, threads),
        loads=loads,
        stores=stores,
        instructions=kinds,
        looped=looped,
    )


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """(registers a thread, bytes of stack, bytes of local memory): a kernel without local arrays has both from spills."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(text)
    if found is None:
        raise ValueError(f"cuobjdump printed no resource usage: {text.strip()[:200]!r}")
    return int(found[1]), int(found[2]), int(found[4])


def _count(ptx: str) -> tuple[dict[int, int], dict[int, int], dict[str, int], dict[str, int]]:
    loads, stores, kinds, looped = Counter(), Counter(), Counter(), Counter()
    for found, repeated in instructions(ptx, _INSTRUCTION, _LABEL, _BRANCH):
        name, operands = found.groups()
        if name.startswith("cp.async.") and ".shared" in name and ".bulk" not in name:
            size = _COPY.search(operands)
            loads[8 * int(size[1], 0) if size else 0] += 1
            kind = "load"
        elif name.startswith(("ld.global", "cp.async.bulk.tensor")):
            loads[_bits(name)] += 1
            kind = "load"
        elif name.startswith("st.global"):
            stores[_bits(name)] += 1
            kind = "store"
        else:
            kind = next((kind for kind, starts in _KINDS if name.startswith(starts)), "other")
        kinds[kind] += 1
        looped[kind] += repeated
    sort = lambda found: dict(sorted(found.items()))  # noqa: E731
    return sort(loads), sort(stores), *({kind: n[kind] for kind in INSTRUCTIONS} for n in (kinds, looped))


def _bits(name: str) -> int:
    found = _WIDTH.search(name)
    return int(found[1] or 1) * int(found[2]) if found else 0


def _occupancy(target: Target, registers: int, shared: int, threads: int) -> float:
    warps = -(-threads // target.warp_size)
    of_a_warp = -(-registers * target.warp_size // 256) * 256
    resident_warps = target.registers // max(of_a_warp, 1) // 4 * 4
    blocks = min(
        _MOST_BLOCKS,
        resident_warps // warps,
        target.max_threads_per_multiprocessor // threads,
        (target.shared_memory + _KIB) // (shared + _KIB),
    )
    return blocks * threads / target.max_threads_per_multiprocessor
