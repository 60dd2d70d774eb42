"""What torch says about devices we do not have.

Recorded from public documents, not from devices of ours (the H200 is the exception, see below). The fields before `|`
of each entry's source were printed by torch on the real device and published; the rest are the vendor's published
figures in torch's field names. A value nobody published is left out, as an older torch would leave it out.

NVIDIA: `print(torch.cuda.get_device_properties(0))` in public logs for name, capability, memory, multiprocessors and
L2 of A100, H100, H200, B200 and RTX 4090; Inductor's DeviceProperties in public generated code for RTX 5090 (170
multiprocessors, 1536 threads each, 65536 registers) and B200 | shared memory and threads: CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability"; RTX 5090 name, memory, L2: NVIDIA RTX Blackwell architecture paper.
AMD: public prints of MI250X (110 multiprocessors, 8 MB), MI300X (304, 4 MB, ROCm/ROCm issue 4203), RX 7900 XTX (48, 6
MB) and RX 9070 XT (32, 8 MB); Inductor's DeviceProperties for gfx950 (256, 131072 registers), gfx942 (65536), gfx90a
(65536 with older, 131072 with newer ROCm), all 2048 threads | `hipinfo` of an RX 7900 XTX: 2048 threads, warp 32, 64
KB; `rocminfo` of an MI355X: 160 KB of LDS, 4 MB L2.
Intel: public prints of Max 1550 (one tile), A770, Arc Pro B60 and a Lunar Lake laptop | B580: same silicon as the B60,
12 GB.
"""

from __future__ import annotations

from types import SimpleNamespace

KIB, MIB = 1024, 1024 * 1024


def _nvidia(name, major, minor, memory, multiprocessors, l2, optin, per_multiprocessor, threads):
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        total_memory=memory * MIB,
        multi_processor_count=multiprocessors,
        warp_size=32,
        L2_cache_size=l2 * MIB,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * KIB,
        shared_memory_per_block_optin=optin * KIB,
        shared_memory_per_multiprocessor=per_multiprocessor * KIB,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
    )


def _amd(name, major, minor, gcn, memory, multiprocessors, wavefront, l2, lds, registers):
    found = SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        gcnArchName=gcn,
        total_memory=memory * MIB,
        multi_processor_count=multiprocessors,
        warp_size=wavefront,
        L2_cache_size=l2 * MIB,
        shared_memory_per_block=lds * KIB,
        max_threads_per_multi_processor=2048,
    )
    if registers:
        found.regs_per_multiprocessor = registers
    return found


def _intel(name, device_id, memory, engines, cores, sub_groups, most_sub_groups, local, cache=None):
    found = SimpleNamespace(
        name=name,
        platform_name="Intel(R) oneAPI Unified Runtime over Level-Zero",
        type="gpu",
        total_memory=memory * MIB,
        max_compute_units=engines,
        gpu_eu_count=engines,
        gpu_subslice_count=cores,
        max_work_group_size=1024,
        max_num_sub_groups=most_sub_groups,
        sub_group_sizes=list(sub_groups),
        has_fp16=True,
        has_atomic64=True,
    )
    if device_id:
        found.device_id = device_id
    if local:
        found.local_mem_size = local * KIB
    if cache:
        found.last_level_cache_size = cache * KIB
    return found


CUDA = {
    "A100": _nvidia("NVIDIA A100-SXM4-80GB", 8, 0, 81920, 108, 40, 163, 164, 2048),
    "H100": _nvidia("NVIDIA H100 80GB HBM3", 9, 0, 81090, 132, 50, 227, 228, 2048),
    "H200": _nvidia("NVIDIA H200", 9, 0, 143156, 132, 60, 227, 228, 2048),
    "B200": _nvidia("NVIDIA B200", 10, 0, 182631, 148, 126, 227, 228, 2048),
    "RTX 4090": _nvidia("NVIDIA GeForce RTX 4090", 8, 9, 24563, 128, 72, 99, 100, 1536),
    "RTX 5090": _nvidia("NVIDIA GeForce RTX 5090", 12, 0, 32607, 170, 96, 99, 100, 1536),
}
ROCM = {
    "MI250X": _amd("AMD Instinct MI250X", 9, 0, "gfx90a:sramecc+:xnack-", 65520, 110, 64, 8, 64, 65536),
    "MI300X": _amd("AMD Instinct MI300X", 9, 4, "gfx942:sramecc+:xnack-", 196592, 304, 64, 4, 64, 65536),
    "MI355X": _amd("AMD Instinct MI355X", 9, 5, "gfx950:sramecc+:xnack-", 294896, 256, 64, 4, 160, 131072),
    "RX 7900 XTX": _amd("Radeon RX 7900 XTX", 11, 0, "gfx1100", 24560, 48, 32, 6, 64, None),
    "RX 9070 XT": _amd("AMD Radeon RX 9070 XT", 12, 0, "gfx1201", 16304, 32, 32, 8, 64, None),
}
XPU = {
    "Max 1550": _intel("Intel(R) Data Center GPU Max 1550", 0xBD5, 65520, 512, 64, (16, 32), 64, 128, 196608),
    "Arc B580": _intel("Intel(R) Arc(TM) B580 Graphics", 0xE20B, 11873, 160, 20, (16, 32), 64, 128, 18432),
    "Arc A770": _intel("Intel(R) Arc(TM) A770 Graphics", None, 15473, 512, 32, (8, 16, 32), 128, None),
    "Lunar Lake": _intel("Intel(R) Graphics [0x64a0]", None, 16870, 64, 8, (16, 32), 64, None),
}
DEVICES = {"cuda": CUDA, "rocm": ROCM, "xpu": XPU}
