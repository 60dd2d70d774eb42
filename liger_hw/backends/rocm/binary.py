"""Resources of a compiled AMD kernel, read from the assembly text that Triton keeps beside the code object.

The text has registers, spills, the size of the private segment, and the waves that a SIMD can hold (`; Occupancy`). The
size of the LDS, which Triton allocates dynamically, is in the kernel's metadata. HIP's multiprocessor is a compute unit
on CDNA and a work-group processor on RDNA. Both have four SIMDs; a work-group processor has the LDS of two compute
units (RDNA 3 ISA, "Local data share").
"""

from __future__ import annotations

import re
from typing import Any

from ..assembly import Assembly
from ..base import Resources, Target

_MEMORY = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:lds_)?(?:d16_|format_)*(\w+?)(?:_d16|_hi|_lds)*$")
_BITS = {"ubyte": 8, "sbyte": 8, "ushort": 16, "sshort": 16, "short": 16, "byte": 8, "dword": 32}
_SIMDS = 4


def _classify(name: str, operands: str) -> tuple[str, int | None] | None:
    if "Folded" in operands:  # a comment of the compiler at spills and reloads, which are buffer instructions on gfx90a
        return "spill", None
    if memory := _MEMORY.match(name):
        return memory[1], _bits(memory[2])
    return ("shuffle", None) if name.endswith("_dpp") else None


def _bits(width: str) -> int:
    """`dwordx4`, `b128`, `ushort`, `u16` -> bits."""
    if width in _BITS:
        return _BITS[width]
    if width.startswith("dwordx"):
        return 32 * int(width[6:])
    return int(width[1:]) if width[1:].isdigit() else 0


GCN = Assembly(
    instruction=re.compile(r"^\s+([a-z]+_\w+)(.*)$"),
    label=re.compile(r"^(\.LBB\w+):"),
    branch=re.compile(r"^\s+s_c?branch\w*\s+(\.LBB\w+)"),
    classify=_classify,
    kinds=(
        ("atomic", ("global_atomic", "buffer_atomic", "flat_atomic")),
        ("spill", ("scratch_",)),
        ("matrix", ("v_mfma", "v_smfma", "v_wmma", "v_swmma")),
        ("shuffle", ("ds_bpermute", "ds_permute", "ds_swizzle", "v_permlane", "v_readlane", "v_writelane")),
        ("shuffle", ("v_readfirstlane",)),
        ("shared", ("ds_",)),
        ("barrier", ("s_barrier",)),
        ("special", ("v_exp", "v_log", "v_rsq", "v_rcp", "v_sqrt", "v_sin", "v_cos", "v_div_", "v_tanh")),
    ),
)


def resources(target: Target, compiled: Any) -> Resources:
    """Resources of a `triton.compiler.CompiledKernel` made for an AMD target."""
    text = compiled.asm["amdgcn"]
    threads, shared = compiled.metadata.num_warps * target.warp_size, compiled.metadata.shared
    return Resources(
        registers=_field(text, r"\.vgpr_count:\s+(\d+)"),
        spills=_field(text, r"\.vgpr_spill_count:\s+(\d+)"),
        scratch=_field(text, r"\.private_segment_fixed_size:\s+(\d+)"),
        shared=shared,
        threads=threads,
        occupancy=_occupancy(target, _field(text, r"; Occupancy: (\d+)"), shared, threads),
        **GCN.count(text),
    )


def _field(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's assembly has no {pattern!r}")
    return int(match[1])


def _occupancy(target: Target, simd_waves: int, shared: int, threads: int) -> float:
    waves = -(-threads // target.warp_size)
    lds = target.shared_memory * (2 if target.warp_size == 32 else 1)
    blocks = min(
        simd_waves * _SIMDS // waves,
        target.max_threads_per_multiprocessor // threads,
        lds // shared if shared else 1 << 30,
    )
    return blocks * threads / target.max_threads_per_multiprocessor
