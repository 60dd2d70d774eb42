"""A kernel's TTIR without a compiler for its target, and what can be told from it.

The front half of Triton is the same for every vendor: it specialises the kernel, checks types and shapes, inlines and
simplifies. Where the stock Triton goes no further (Intel), this is how far a kernel is proven, and `estimate` says what
it would take of the device by counting: not a compiler's word (entries chosen by it are `modelled`).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, Iterator, Mapping

from ..backends import LaunchConfig, Target
from ..backends.base import INSTRUCTIONS, Resources
from .accesses import _LOCATION, Access

_FRONT_OPTIONS = ("num_warps", "num_stages")
_OPERATION = re.compile(r"= (?:\"?)(arith|math|tt)\.(\w+)")
_SHAPE = re.compile(r"tensor<((?:\d+x)+)")
_SPECIAL = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "erf", "sin", "cos", "divf")
_FREE = (
    "constant",
    "splat",
    "broadcast",
    "expand_dims",
    "reshape",
    "make_range",
    "bitcast",
    "addptr",
    "store",
    "reduce",
    "return",
)
_LARGE_FILE = 2
"""How many times the registers of a work-item the large register file has, at as many times fewer of them."""


def lower(kernel: Any, args: list[Any], options: Mapping[str, Any], device: Any) -> Any:
    """What Triton's front half makes of `kernel` for these arguments: an object whose `asm` has the TTIR.

    device: what stands for the driver; its target only decides which compiler's front end is asked
    """
    with standing_in(device):
        kernel.device_caches[device.get_current_device()]  # makes Triton's binder, which sets `kernel.compile`
        compiler, kernel.compile = kernel.compile, _front
        try:
            return kernel.warmup(*args, grid=(1,), **{k: v for k, v in options.items() if k in _FRONT_OPTIONS})
        finally:
            kernel.compile = compiler


@contextlib.contextmanager
def standing_in(device: Any) -> Iterator[None]:
    """`device` is Triton's driver inside the block; behind it, the one that was (none, where none was asked for yet)."""
    from triton.runtime import driver

    slot = "_active" if "_active" in vars(driver) else "active"  # the latter in older releases
    before = vars(driver)[slot]
    driver.set_active(device)
    try:
        yield
    finally:
        setattr(driver, slot, before)


def _front(source: Any, target: Any, options: Mapping[str, Any], **_more: Any) -> Any:
    """`triton.compile` up to and with the stage `ttir`."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    front = make_backend(target)
    parsed = front.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    front.load_dialects(context)
    stages: dict[str, Any] = {}
    front.add_stages(stages, parsed, source.language)
    codegen, modules = front.get_codegen_implementation(parsed), front.get_module_map()
    module = source.make_ir(target, parsed, codegen, modules, context)
    metadata = {"target": target, **parsed.__dict__}
    return SimpleNamespace(asm={"ttir": str(stages["ttir"](module, metadata))}, metadata=SimpleNamespace(**metadata))


def estimate(
    ttir: str, accesses: list[Access], target: Target, config: LaunchConfig, options: Mapping[str, Any]
) -> Resources:
    """What a kernel takes of `target`, counted from its TTIR.

    Every operation on a tensor is spread over the threads; a reduction is a shuffle a halving of the warp and a meeting of
    the warps; accesses are 16 bytes wide where a thread has that many. Registers: the widest tiles in fp32, those that are
    loaded together twice (as loaded, as computed with), and a few for addresses.
    """
    threads = config.num_warps * target.warp_size
    once, looped = Counter(), Counter()
    tiles = [0]  # elements a thread of each load
    for line, inside in _body(ttir):
        counts = looped if inside else once
        shape, found = _SHAPE.search(line), _OPERATION.search(line)
        each = -(-math.prod(int(n) for n in shape[1].split("x")[:-1]) // threads) if shape else 1
        if line.lstrip().startswith("})"):  # the end of a reduction, where its type stands
            counts["other"] += each
            counts["shuffle"] += target.warp_size.bit_length() - 1
            counts["barrier"] += 2 * (config.num_warps > 1)
        elif found and found[2] == "load":
            tiles.append(each)
        elif found and found[2] not in _FREE:
            counts["special" if found[2] in _SPECIAL else "other"] += each
    widths: dict[str, Counter] = {"load": Counter(), "store": Counter()}
    for access in accesses:
        each = max(1, access.tile // threads)
        width = min(16, 1 << (each.bit_length() - 1))
        kind = "load" if access.kind == "load" else "store"
        widths[kind][8 * width] += -(-each // width)
        (looped if access.looped else once)[access.kind] += -(-each // width)
    registers = 20 + max(tiles) * (1 + sum(2 * tile >= max(tiles) for tile in tiles))
    large = str(options.get("grf_mode", "")) == "256"
    file = target.registers // target.max_threads_per_multiprocessor * (_LARGE_FILE if large else 1)
    resident = target.max_threads_per_multiprocessor // (_LARGE_FILE if large else 1)
    kinds = Counter({kind: once[kind] + looped[kind] for kind in INSTRUCTIONS})
    return Resources(
        registers=min(registers, file),
        spills=max(0, registers - file),
        scratch=4 * max(0, registers - file),
        shared=4 * config.num_warps if kinds["barrier"] else 0,
        threads=threads,
        occupancy=resident // threads * threads / target.max_threads_per_multiprocessor,
        loads=dict(widths["load"]),
        stores=dict(widths["store"]),
        instructions={kind: kinds[kind] for kind in INSTRUCTIONS},
        looped={kind: looped[kind] for kind in INSTRUCTIONS},
    )


def _body(ttir: str) -> Iterator[tuple[str, bool]]:
    """(line, whether it stands in a loop) of the kernel's function."""
    regions: list[bool] = []
    for line in ttir.splitlines():
        bare = _LOCATION.sub("", line.strip())
        if bare.startswith("}") and regions:
            regions.pop()
        if regions:
            yield line, any(regions)
        if bare.endswith("{"):
            regions.append("scf.for" in bare or "scf.while" in bare or bare.startswith("} do"))
