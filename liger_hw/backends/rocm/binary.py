"""What a compiled AMD kernel takes, read from the assembly text Triton keeps beside the code object.

The compiler writes registers, spills, private segment and the waves a SIMD can hold (`; Occupancy`). Triton's LDS is
dynamic and stands in the kernel's metadata only. A compute unit of CDNA and a work-group processor of RDNA, which is what
HIP calls a multiprocessor there, both have four SIMDs; a work-group processor has two compute units' LDS (RDNA 3 ISA,
"Local data share").
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from .._text import instructions
from ..base import INSTRUCTIONS, Resources, Target

_INSTRUCTION = re.compile(r"^\s+([a-z]+_\w+)(.*)$")
_LABEL = re.compile(r"^(\.LBB\w+):")
_BRANCH = re.compile(r"^\s+s_c?branch\w*\s+(\.LBB\w+)")
_MEMORY = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:lds_)?(?:d16_|format_)*(\w+?)(?:_d16|_hi|_lds)*$")
_BITS = {"ubyte": 8, "sbyte": 8, "ushort": 16, "sshort": 16, "short": 16, "byte": 8, "dword": 32}
_KINDS = (
    ("atomic", ("global_atomic", "buffer_atomic", "flat_atomic")),
    ("spill", ("scratch_",)),
    ("matrix", ("v_mfma", "v_smfma", "v_wmma", "v_swmma")),
    (
        "shuffle",
        ("ds_bpermute", "ds_permute", "ds_swizzle", "v_permlane", "v_readlane", "v_writelane", "v_readfirstlane"),
    ),
    ("shared", ("ds_",)),
    ("barrier", ("s_barrier",)),
    ("special", ("v_exp", "v_log", "v_rsq", "v_rcp", "v_sqrt", "v_sin", "v_cos", "v_div_", "v_tanh")),
)
_SIMDS = 4


def resources(target: Target, compiled: Any) -> Resources:
    """Resources of a `triton.compiler.CompiledKernel` made for an AMD target."""
    text = compiled.asm["amdgcn"]
    threads = compiled.metadata.num_warps * target.warp_size
    shared = compiled.metadata.shared
    loads, stores, kinds, looped = _count(text)
    return Resources(
        registers=_field(text, r"\.vgpr_count:\s+(\d+)"),
        spills=_field(text, r"\.vgpr_spill_count:\s+(\d+)"),
        scratch=_field(text, r"\.private_segment_fixed_size:\s+(\d+)"),
        shared=shared,
        threads=threads,
        occupancy=_occupancy(target, _field(text, r"; Occupancy: (\d+)"), shared, threads),
        loads=loads,
        stores=stores,
        instructions=kinds,
        looped=looped,
    )


def _field(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's assembly has no {pattern!r}")
    return int(found[1])


def _count(text: str) -> tuple[dict[int, int], dict[int, int], dict[str, int], dict[str, int]]:
    loads, stores, kinds, looped = Counter(), Counter(), Counter(), Counter()
    for found, repeated in instructions(text, _INSTRUCTION, _LABEL, _BRANCH):
        name, rest = found.groups()
        memory = _MEMORY.match(name)
        if (
            "Folded" in rest
        ):  # what the compiler notes beside a spill or reload; gfx90a does them with buffer instructions
            kind = "spill"
        elif memory:
            kind, width = memory.groups()
            (loads if kind == "load" else stores)[_bits(width)] += 1
        else:
            kind = next((kind for kind, starts in _KINDS if name.startswith(starts)), "other")
            kind = "shuffle" if name.endswith("_dpp") else kind
        kinds[kind] += 1
        looped[kind] += repeated
    sort = lambda found: dict(sorted(found.items()))  # noqa: E731
    return sort(loads), sort(stores), *({kind: n[kind] for kind in INSTRUCTIONS} for n in (kinds, looped))


def _bits(width: str) -> int:
    """`dwordx4`, `b128`, `ushort`, `u16` -> bits."""
    if width in _BITS:
        return _BITS[width]
    if width.startswith("dwordx"):
        return 32 * int(width[6:])
    return int(width[1:]) if width[1:].isdigit() else 0


def _occupancy(target: Target, waves_a_simd: int, shared: int, threads: int) -> float:
    waves = -(-threads // target.warp_size)
    lds = target.shared_memory * (2 if target.warp_size == 32 else 1)
    blocks = min(
        waves_a_simd * _SIMDS // waves,
        target.max_threads_per_multiprocessor // threads,
        lds // shared if shared else 1 << 30,
    )
    return blocks * threads / target.max_threads_per_multiprocessor
