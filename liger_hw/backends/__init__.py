"""The vendors in order of preference, and the functions that return a vendor's Backend and a device's Target."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from .base import Backend, LaunchConfig, Target

if TYPE_CHECKING:
    import torch

__all__ = ["Backend", "LaunchConfig", "Target", "VENDORS"]
__all__ += ["backend", "backends", "known_target", "target_of", "with_index"]

VENDORS = ("cuda", "rocm", "xpu", "cpu")
"""Names of folders. If several serve one torch device type, the first that is present is used."""

_targets: dict["torch.device", Target] = {}


@lru_cache(maxsize=None)
def backend(vendor: str) -> Backend:
    """The Backend of a vendor. Raises `ValueError` for an unknown name."""
    if vendor not in VENDORS:
        raise ValueError(f"unknown vendor {vendor!r}; known: {', '.join(VENDORS)}")
    return import_module(f"{__name__}.{vendor}").BACKEND


@lru_cache(maxsize=None)
def backends() -> tuple[Backend, ...]:
    """The backends that this build of torch can use. Creates no device context."""
    return tuple(b for b in map(backend, VENDORS) if b.present())


def with_index(device: "torch.device | str") -> "torch.device":
    """A device with an index, which is the current one if `device` has none. cpu, meta and mps stay without one."""
    import torch

    device = torch.device(device)
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    current = getattr(torch.get_device_module(device), "current_device", None)  # mps has no such function
    return device if current is None else torch.device(device.type, current())


def target_of(device: "torch.device") -> Target:
    """The Target of a torch device, cached. Raises `ValueError` for a device type without a backend."""
    if (target := _targets.get(device)) is not None:
        return target
    for candidate in backends():
        if candidate.device_type == device.type:
            return _targets.setdefault(device, candidate.describe(with_index(device).index or 0))
    served = ", ".join(sorted({b.device_type for b in backends()}))
    raise ValueError(f"liger_hw has no backend for device {str(device)!r}; this build of torch serves {served}")


def known_target(name: str) -> Target:
    """The Target of a device by name (`h200`, `mi300x`, `max1550`), or of an architecture's first device (`sm90`,
    `gfx942`, `pvc`). The device need not be in this machine. Raises `ValueError`, which lists the known names."""
    for vendor in VENDORS:
        target = backend(vendor).known_target(name)
        if target is not None:
            return target
    archs = ", ".join(arch for vendor in VENDORS for arch in backend(vendor).known_archs())
    devices = ", ".join(device for vendor in VENDORS for device in backend(vendor).known_devices())
    raise ValueError(f"unknown architecture {name!r}; known: {archs}, and the devices {devices}")
