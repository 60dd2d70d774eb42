"""Resources of a compiled NVIDIA kernel: registers from the cubin, access widths and instructions from its PTX.

The `cuobjdump` in Triton's wheel reads the cubin. PTX is the code before register allocation and scheduling, so its
instruction counts differ from the binary's. For occupancy, registers of a warp are rounded up to 256, resident warps
down to a multiple of four, and each resident block takes 1 KiB more shared memory (CUDA C++ Programming Guide, "Compute
Capabilities"; Hopper Tuning Guide, "Shared Memory").
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any

from ..assembly import Assembly
from ..base import KIB, Resources, Target

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_WIDTH = re.compile(r"(?:\.v(\d))?\.[bsuf](\d+)$")
_COPY = re.compile(r"\],\s*(0x[0-9a-f]+|\d+)")
_MAX_RESIDENT_BLOCKS = 32


def _classify(name: str, operands: str) -> tuple[str, int | None] | None:
    if name.startswith("cp.async.") and ".shared" in name and ".bulk" not in name:
        size = _COPY.search(operands)
        return "load", 8 * int(size[1], 0) if size else 0
    if name.startswith(("ld.global", "cp.async.bulk.tensor", "st.global")):
        match = _WIDTH.search(name)
        return "store" if name.startswith("st") else "load", int(match[1] or 1) * int(match[2]) if match else 0
    return None


PTX = Assembly(
    instruction=re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w]*(?:\.[\w:]+)+)(.*)$"),
    label=re.compile(r"^(\$L__BB\w+):"),
    branch=re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+);"),
    classify=_classify,
    kinds=(
        ("atomic", ("atom.", "red.")),
        ("matrix", ("mma.", "wgmma.", "tcgen05.", "ldmatrix.", "stmatrix.")),
        ("shuffle", ("shfl.", "redux.", "vote.")),
        ("barrier", ("bar.", "barrier.", "mbarrier.", "cp.async.wait", "fence.")),
        ("special", ("ex2.", "lg2.", "rsqrt.", "sqrt.", "rcp.", "tanh.", "sin.", "cos.", "div.")),
        ("shared", ("ld.shared", "st.shared")),
        ("spill", ("ld.local", "st.local")),
    ),
)


def resources(target: Target, compiled: Any) -> Resources:
    """Resources of a `triton.compiler.CompiledKernel` made for an NVIDIA target."""
    registers, stack, local = _usage(compiled.asm["cubin"])
    threads, shared = compiled.metadata.num_warps * target.warp_size, compiled.metadata.shared
    return Resources(
        registers=registers,
        spills=(stack + local) // 4,
        scratch=stack + local,
        shared=shared,
        threads=threads,
        occupancy=_occupancy(target, registers, shared, threads),
        **PTX.count(compiled.asm["ptx"]),
    )


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """(registers of a thread, bytes of stack, bytes of local memory); spills are in both memories."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = _USAGE.search(text)
    if match is None:
        raise ValueError(f"cuobjdump printed no resource usage: {text.strip()[:200]!r}")
    return int(match[1]), int(match[2]), int(match[4])


def _occupancy(target: Target, registers: int, shared: int, threads: int) -> float:
    warps = -(-threads // target.warp_size)
    registers_a_warp = -(-registers * target.warp_size // 256) * 256
    resident_warps = target.registers // max(registers_a_warp, 1) // 4 * 4
    blocks = min(
        _MAX_RESIDENT_BLOCKS,
        resident_warps // warps,
        target.max_threads_per_multiprocessor // threads,
        (target.shared_memory + KIB) // (shared + KIB),
    )
    return blocks * threads / target.max_threads_per_multiprocessor
