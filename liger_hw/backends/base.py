"""Descriptions of hardware: a `Target` is one device, a `Backend` is one vendor.

Each vendor has one folder beside this file, which says how a device is detected and described, what is legal on it, and
how a vendor-neutral `LaunchConfig` becomes launch options of Triton. No other module may test for a vendor's name.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Mapping

KIB, MIB = 1024, 1024 * 1024
HINTS = ("none", "stream", "keep")
MAX_TILE_ELEMENTS, MAX_THREAD_ELEMENTS = 65536, 1024
"""Limits for the elements of a program's tile, the product of its two largest blocks, and for a thread's part of them.
With 1024 elements a thread ptxas takes half a minute; its time grows faster than the number of elements."""


@dataclass(frozen=True)
class Target:
    """Facts of one device for the launch rules. Sizes are in bytes.

    multiprocessors: number of SMs, CUs or Xe-cores; registers: 32-bit ones of a multiprocessor; max_threads: of a block
    bandwidth: of device memory in GB/s, from the data sheet, 0 if unknown; float8: as in `Arch`
    cooperative: whether the driver starts all programs of a cooperative launch together or refuses the launch
    """

    vendor: str
    arch: str
    name: str
    multiprocessors: int
    warp_size: int
    warp_sizes: tuple[int, ...]
    max_threads: int
    shared_memory: int
    registers: int
    l2: int
    bandwidth: int = 0
    family: str = ""
    max_threads_per_multiprocessor: int = 2048
    cooperative: bool = False
    float8: str = ""

    @property
    def max_warps(self) -> int:
        return self.max_threads // self.warp_size

    def warps(self, elements: int, per_thread: int, most: int = 32) -> int:
        """The number of warps, a power of two, with which each thread has about `per_thread` of `elements`.

        most: the largest number of threads, in units of 32; the device's limit also holds
        """
        needed = max(1, elements // (per_thread * self.warp_size))
        warps = 1 << (needed.bit_length() - 1)
        limit = min(most * 32 // self.warp_size, self.max_warps)
        return max(1, min(warps, limit))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Target":
        return cls(**{**data, "warp_sizes": tuple(data["warp_sizes"])})


@dataclass(frozen=True)
class Arch:
    """Facts that all devices of an architecture share: a row of a vendor's `archs`.

    warp_sizes: kernels use the largest; shared_memory: bytes of a block; registers, max_threads: of a multiprocessor;
    clock: GHz under load; float8: FP8 dtypes of its matrix units: `fn` (float8_e4m3fn, float8_e5m2), `fnuz`
    (float8_e4m3fnuz, float8_e5m2fnuz) or "" for none
    """

    family: str
    warp_sizes: tuple[int, ...]
    shared_memory: int
    registers: int
    max_threads: int
    clock: float = 2.0
    float8: str = ""


@dataclass(frozen=True)
class Device:
    """Facts in which devices of an architecture differ, as in `Target`: a row of a vendor's `devices`."""

    name: str
    arch: str
    multiprocessors: int
    l2: int
    bandwidth: int


def _words(name: str) -> str:
    """`NVIDIA H200` -> ` nvidia h200 `, in which whole words can be searched."""
    return f" {' '.join(re.findall('[a-z0-9]+', name.lower()))} "


@dataclass(frozen=True)
class LaunchConfig:
    """How to launch one kernel, independent of the vendor.

    blocks: the kernel's tile sizes by constexpr name, for example `{"BLOCK_SIZE": 4096, "ROWS": 1}`
    num_warps, num_stages: as in Triton
    ctas_per_mp: programs per multiprocessor of a persistent grid; 0 for one program per tile
    hint: cache hint of loads: `stream` (the data is not read again), `keep` (the data is read again) or `none`
    vendor: options of one vendor (waves_per_eu, grf_mode, maxnreg, ...), refused on any other
    """

    blocks: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1
    ctas_per_mp: int = 0
    hint: str = "none"
    vendor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", MappingProxyType(dict(self.blocks)))
        object.__setattr__(self, "vendor", MappingProxyType(dict(self.vendor)))

    def __hash__(self) -> int:
        return hash(self.to_text())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LaunchConfig) and self.to_json() == other.to_json()

    def __reduce__(self):
        return LaunchConfig.from_json, (self.to_json(),)

    def to_json(self) -> dict[str, Any]:
        return {
            "blocks": dict(sorted(self.blocks.items())),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "ctas_per_mp": self.ctas_per_mp,
            "hint": self.hint,
            "vendor": dict(sorted(self.vendor.items())),
        }

    def to_text(self) -> str:
        """JSON; equal configurations give equal text."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    def in_words(self) -> str:
        """`BLOCK_SIZE=4096 ROWS=2 warps=8 stages=1`"""
        words = [f"{name}={value}" for name, value in (*self.blocks.items(), *self.vendor.items())]
        words += [f"warps={self.num_warps}", f"stages={self.num_stages}"]
        words += [f"ctas={self.ctas_per_mp}"] if self.ctas_per_mp else []
        return " ".join([*words, self.hint] if self.hint != "none" else words)

    @classmethod
    def from_json(cls, data: Any) -> "LaunchConfig":
        """A configuration from untrusted JSON. Raises `ValueError` that names the bad field."""
        if not isinstance(data, dict):
            raise ValueError(f"a launch configuration is a JSON object, got {type(data).__name__}")
        known = {"blocks", "num_warps", "num_stages", "ctas_per_mp", "hint", "vendor"}
        if extra := sorted(set(data) - known):
            raise ValueError(f"unknown field {extra[0]!r}; a launch configuration has {', '.join(sorted(known))}")
        for name in ("num_warps", "num_stages", "ctas_per_mp"):
            if name in data and type(data[name]) is not int:
                raise ValueError(f"{name} must be an integer, got {data[name]!r}")
        for name in ("blocks", "vendor"):
            if not isinstance(data.get(name, {}), dict):
                raise ValueError(f"{name} must be an object, got {data[name]!r}")
        for name, value in data.get("blocks", {}).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"blocks.{name} must be a positive integer, got {value!r}")
        if data.get("hint", "none") not in HINTS:
            raise ValueError(f"hint must be one of {', '.join(HINTS)}, got {data['hint']!r}")
        return cls(**data)


INSTRUCTIONS = ("load", "store", "atomic", "shared", "shuffle", "barrier", "matrix", "special", "spill", "other")
"""Kinds of instructions that `Resources` counts; `special` is exp, log, rsqrt and the like."""


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel, read from its binary and assembly.

    registers: 32-bit vector registers of a thread; spills: registers spilled to memory; scratch: bytes of that memory
    shared: bytes of shared memory a block; threads: threads of a block
    occupancy: resident threads of a multiprocessor divided by their maximum
    loads, stores: bits that a thread accesses in global memory -> number of instructions
    instructions: kind (`INSTRUCTIONS`) -> number of instructions; looped: the same for instructions inside a loop
    """

    registers: int
    spills: int
    scratch: int
    shared: int
    threads: int
    occupancy: float
    loads: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[int, int] = field(default_factory=dict)
    instructions: Mapping[str, int] = field(default_factory=dict)
    looped: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Resources":
        widths = {name: {int(bits): count for bits, count in data[name].items()} for name in ("loads", "stores")}
        return cls(**{**data, **widths})


@dataclass(frozen=True)
class Pace:
    """Speed of a multiprocessor, for the model of time in `autotune/static.py`.

    clock: GHz; issue: warp instructions a cycle; latency: nanoseconds of an access to device memory
    virtual: whether `Resources.instructions` counts a virtual instruction set such as PTX
    into_registers: whether Triton's pipelined loops prefetch into registers, not only into shared memory
    """

    clock: float
    issue: float
    latency: float
    virtual: bool = False
    into_registers: bool = False


class Backend:
    """One vendor, with the rules that all vendors share.

    device_type: `torch.device.type` of its devices
    torch_version: the attribute of `torch.version` that torch builds for this vendor have
    compiler: the name of its compiler in Triton
    devices: known devices, by a part of the name that torch reports; an architecture's first one represents it
    options: launch options beyond num_warps and num_stages
    cooperative: `Target.cooperative` of its devices
    fast_launch: compiled kernels may be launched without Triton's argument binder; True only if tested on hardware
    fast_log2: `libdevice.fast_log2f` exists and has fewer instructions than `tl.log2`
    convolves_channels_last: torch convolves 16-bit tensors faster with channels last; True only if measured
    gemm_alignment: GEMMs are slow if the rows of an operand are not multiples of this number of bytes. A linear head
    then splits the vocabulary into two products (`kernels/heads/linear_head.py`)
    """

    vendor: str
    device_type: str
    torch_version: str
    compiler: str
    archs: Mapping[str, Arch] = {}
    devices: Mapping[str, Device] = {}
    options: frozenset[str] = frozenset()
    cooperative = False
    fast_launch = False
    fast_log2 = False
    convolves_channels_last = False
    gemm_alignment = 1

    # -- devices -----------------------------------------------------------------------------------------------------

    def present(self) -> bool:
        """Whether torch was built for this vendor. Must not create a device context."""
        import torch

        return getattr(torch.version, self.torch_version, None) is not None

    def describe(self, index: int) -> Target:
        """The Target of device `index`, from torch's device properties."""
        return self.target_from_properties(self.properties(index))

    def properties(self, index: int) -> Any:
        """torch's properties of device `index`."""
        import torch

        return torch.get_device_module(self.device_type).get_device_properties(index)

    def driver(self, index: int) -> str:
        """The version of the device's kernel driver, or ""."""
        return str(getattr(self.properties(index), "driver_version", ""))

    def target_from_properties(self, properties: Any) -> Target:
        """The Target for torch's device properties."""
        raise NotImplementedError

    def target(self, arch_name: str, arch: Arch, device: Device | None, /, **reported: Any) -> Target:
        """The Target from rows of `archs` and `devices`. reported: facts that torch reports, which take precedence."""
        facts = {
            "vendor": self.vendor,
            "arch": arch_name,
            "warp_size": arch.warp_sizes[-1],
            "warp_sizes": arch.warp_sizes,
            "max_threads": 1024,
            "shared_memory": arch.shared_memory,
            "registers": arch.registers,
            "family": arch.family,
            "max_threads_per_multiprocessor": arch.max_threads,
            "cooperative": self.cooperative,
            "float8": arch.float8,
        }
        if device is not None:
            facts |= {name: getattr(device, name) for name in ("name", "multiprocessors", "l2", "bandwidth")}
        return Target(**{**facts, **reported})

    def known_target(self, name: str) -> Target | None:
        """The Target of a known device (`h200`, `RTX 4090`) or of an architecture's first device (`sm90`), else None.
        The device need not be in this machine."""
        device = self._known(name)
        return None if device is None else self.target(device.arch, self.archs[device.arch], device)

    def _known(self, name: str) -> Device | None:
        """The row of `devices` for a name of `known_devices` or `known_archs`; case and spaces do not count."""
        name = _words(name).replace(" ", "")
        return next((d for key, d in self.devices.items() if name in (_words(key).replace(" ", ""), d.arch)), None)

    def known_archs(self) -> tuple[str, ...]:
        """Names of architectures for `known_target`."""
        return tuple(dict.fromkeys(device.arch for device in self.devices.values()))

    def known_devices(self) -> tuple[str, ...]:
        """Names of devices for `known_target`, in lower case."""
        return tuple(_words(key).replace(" ", "") for key in self.devices)

    def device_named(self, name: str) -> Device | None:
        """The row of `devices` for a name that torch reports, or None."""
        return next((device for key, device in self.devices.items() if _words(key) in _words(name)), None)

    def is_called(self, target: Target, name: str) -> bool:
        """Whether `name` is a name of the target's architecture or device."""
        device = self.device_named(target.name)
        return name.lower() == target.arch or (device is not None and device is self._known(name))

    # -- legality ----------------------------------------------------------------------------------------------------

    def illegal(self, target: Target, config: LaunchConfig) -> str | None:
        """Why `config` must not be launched on `target`, or None."""
        warps, stages = config.num_warps, config.num_stages
        if warps < 1 or warps & (warps - 1):
            return f"num_warps={warps!r} is not a power of two"
        threads = warps * target.warp_size
        if threads > target.max_threads:
            return (
                f"{warps} warps of {target.warp_size} are {threads} threads; "
                f"{target.arch} allows {target.max_threads} a block"
            )
        if not 1 <= stages <= 8:
            return f"num_stages={stages!r} is outside 1..8"
        if not 0 <= config.ctas_per_mp <= 32:
            return f"ctas_per_mp={config.ctas_per_mp!r} is outside 0..32"
        for name, value in config.blocks.items():
            if value < 1 or value & (value - 1):
                return f"{name}={value!r} is not a power of two"
        tile = math.prod(sorted(config.blocks.values())[-2:])
        if tile > min(MAX_TILE_ELEMENTS, MAX_THREAD_ELEMENTS * threads):
            return (
                f"a tile of {tile} elements for {threads} threads; the limits are {MAX_TILE_ELEMENTS} a program and "
                f"{MAX_THREAD_ELEMENTS} a thread: larger tiles compile for minutes to hours, and their registers spill"
            )
        for name in config.vendor:
            if name not in self.options:
                return f"option {name!r} is unknown to {self.vendor}"
        return self.illegal_here(target, config)

    def illegal_here(self, target: Target, config: LaunchConfig) -> str | None:
        """`illegal` by the vendor's rules; the shared rules are already checked."""
        return None

    def illegal_resources(self, target: Target, resources: Resources) -> str | None:
        """Why one block of a compiled kernel does not fit a multiprocessor of `target`, or None if it fits."""
        if resources.shared > target.shared_memory:
            return f"{resources.shared} bytes of shared memory; {target.arch} has {target.shared_memory} a block"
        needed = resources.registers * resources.threads
        if needed > target.registers:
            return (
                f"{resources.threads} threads of {resources.registers} registers need {needed}; "
                f"{target.arch} has {target.registers}"
            )
        return None

    # -- libraries ---------------------------------------------------------------------------------------------------

    def multiplies_from_shared(self, target: Target) -> bool:
        """Whether matrix units read both operands from shared memory, so that they take no registers."""
        return False

    def has_grouped_gemm(self, target: Target) -> bool:
        """Whether torch's grouped GEMM of bf16 is one kernel on `target`, not a loop that synchronises the device."""
        return False

    # -- lowering and compiling --------------------------------------------------------------------------------------

    def load_hint(self, hint: str) -> tuple[str, str]:
        """(cache_modifier, eviction_policy) of a load with this hint. At least one is "": PTX does not allow both (PTX
        ISA, "Data Movement and Conversion Instructions: ld")."""
        return "", ""

    def lower(self, config: LaunchConfig) -> dict[str, Any]:
        """The compiler's options, for Triton's launch."""
        return {"num_warps": config.num_warps, "num_stages": config.num_stages, **config.vendor}

    def dependent_launch(self, target: Target) -> dict[str, Any]:
        """The launch options of programmatic dependent launch; empty if the target has none."""
        return {}

    def triton_target(self, target: Target) -> Any:
        """The `triton.backends.compiler.GPUTarget`, or None if released Triton cannot compile for the target."""
        return None

    def pace(self, target: Target) -> Pace:
        raise NotImplementedError

    def resources(self, target: Target, compiled: Any) -> Resources:
        """The Resources of a kernel that Triton compiled for `triton_target(target)`; needs no device."""
        return import_module(f"{__package__}.{self.vendor}.binary").resources(target, compiled)
