"""Level `offload`: a checkpointed layer's input waits for backward in pinned host memory.

    with host_memory(device).hooks():
        y = checkpoint(layer, x)              # x is copied to the host on a side stream while the layer computes

Forward copies layer i's input while layer i computes, and frees it on the device when layer i + 1 begins. Backward
starts the copy of layer i - 1's input when it needs layer i's. So at most two layers' inputs are on the device. Copies
are hidden if a layer computes for longer than its input is copied.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from pathlib import Path
from typing import Any, Iterator

import torch

from .. import env
from . import recipes

CHUNK = 64 << 20
"""Bytes of one pinned allocation. torch rounds these up to a power of two."""
SMALLEST = 1 << 20
"""Tensors of fewer bytes stay on the device."""
SHARE = 0.8
"""Share of the host memory that may be pinned, of what is free at first use."""


class HostMemory:
    """Pinned host memory for one device's tensors, reused by every step, and the stream that copies.

    pinned: bytes that are pinned; limit: bytes that may be. Beyond it tensors stay on the device, with one warning.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device = device
        self.limit = int(SHARE * free_host_memory()) if limit is None else limit
        self.pinned = 0
        self.free: list[torch.Tensor] = []
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._newest: Any = lambda: None  # weak reference to the newest _OnHost, whose copy may not have ended

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd saves tensors of this device on the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    # -- to the host -------------------------------------------------------------------------------------------------

    def _pack(self, t: torch.Tensor) -> "tuple[torch.Tensor, int] | _OnHost":
        if t.device != self.device or t.nbytes < SMALLEST or type(t) is not torch.Tensor:
            return recipes.pack_kept(t)
        self._finish_offload()
        chunks = self._take(t.nbytes)
        if chunks is None:
            return recipes.pack_kept(t)
        source = t.detach().contiguous()
        self._stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._stream):
            for chunk, part in zip(chunks, _parts(source)):
                chunk[: part.numel()].copy_(part, non_blocking=True)
            entry = _OnHost(self, chunks, source, self._stream.record_event(), self._newest)
        self._newest = weakref.ref(entry)
        return entry

    def _finish_offload(self) -> None:
        """Let the computing stream wait for the newest copy to the host, whose source is then freed."""
        if (newest := self._newest()) is not None:
            newest.finish_offload()

    def _take(self, nbytes: int) -> list[torch.Tensor] | None:
        """Chunks of pinned memory for `nbytes`, or None beyond the limit."""
        count = -(-nbytes // CHUNK)
        missing = count - len(self.free)
        if self.pinned + missing * CHUNK > self.limit:
            recipes.log_once(
                f"activations: level offload keeps a layer's input of {nbytes / 2**30:.2f} GiB on the device: "
                f"{self.pinned / 2**30:.1f} GiB of host memory are pinned, of at most {self.limit / 2**30:.1f} "
                f"({SHARE:.0%} of what was free). Give fewer layers the level offload, or the host more memory",
                logging.WARNING,
            )
            return None
        self.reserve(missing * CHUNK)
        return [self.free.pop() for _ in range(count)]

    def reserve(self, nbytes: int) -> None:
        """Pin more memory. 100 GiB take some seconds."""
        for _ in range(nbytes // CHUNK):
            self.free.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self.device.type != "cpu"))
            self.pinned += CHUNK

    # -- to the device -----------------------------------------------------------------------------------------------

    def _unpack(self, packed: "tuple[torch.Tensor, int] | _OnHost") -> torch.Tensor:
        if type(packed) is tuple:
            return recipes.unpack(packed)
        self._finish_offload()
        value = packed.fetch()
        before = packed.before()
        if before is not None:
            before.start_fetch()
        return value

    def copy_back(self, chunks: list[torch.Tensor], like: "_OnHost") -> tuple[torch.Tensor, Any]:
        """(tensor on the device, event at the end of the copy to it). like: has its shape and dtype"""
        value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        self._stream.wait_stream(self._module.current_stream(self.device))  # earlier kernels may use the memory
        with self._module.stream(self._stream):
            for chunk, part in zip(chunks, _parts(value)):
                part.copy_(chunk[: part.numel()], non_blocking=True)
            return value, self._stream.record_event()

    def wait(self, end: Any) -> None:
        """Let the computing stream wait for the end of a copy."""
        self._module.current_stream(self.device).wait_event(end)


class _OnHost:
    """A tensor on the host. before: weak reference to the _OnHost saved before it, which backward needs next"""

    def __init__(
        self, memory: HostMemory, chunks: list[torch.Tensor], source: torch.Tensor, end: Any, before: Any
    ) -> None:
        self.memory, self.chunks, self.before = memory, chunks, before
        self.shape, self.dtype = source.shape, source.dtype
        self._to_host: tuple[torch.Tensor, int, Any] | None = (source, source._version, end)  # the running copy
        self._to_device: tuple[torch.Tensor, Any] | None = None

    def finish_offload(self) -> None:
        """Let the computing stream wait for the end of the copy to the host. Raises if the tensor was changed."""
        if self._to_host is None:
            return
        (source, version, end), self._to_host = self._to_host, None
        self.memory.wait(end)
        if source._version != version:
            raise RuntimeError(
                f"activations: the input of a layer at level offload ({source.dtype} {list(source.shape)}) was changed "
                "in place, so the layer cannot be computed again; give it another level than full, tiled and offload"
            )

    def start_fetch(self) -> None:
        """Begin the copy to the device."""
        if self._to_device is None:
            self._to_device = self.memory.copy_back(self.chunks, self)

    def fetch(self) -> torch.Tensor:
        """The tensor on the device. The computing stream waits for its copy."""
        self.start_fetch()
        (value, end), self._to_device = self._to_device, None
        self.memory.wait(end)
        return value

    def __del__(self) -> None:
        for copy in (self._to_host, self._to_device):  # not None if there was no backward
            if copy is not None:
                self.memory.wait(copy[-1])
        self.memory.free += self.chunks  # may be reused at once: all copies are on one stream, in order


def _parts(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a contiguous tensor in pieces of `CHUNK`."""
    return iter(t.view(-1).view(torch.uint8).split(CHUNK))


@functools.lru_cache(maxsize=None)
def host_memory(device: torch.device) -> HostMemory | None:
    """This process's pinned memory for a device; None for the CPU."""
    return None if device.type == "cpu" else HostMemory(device)


def free_host_memory() -> int:
    """This process's equal share, among torchrun's processes on the host, of the bytes that are free within the
    container's limit; 0 if unknown."""
    free = []  # of the host, of the container
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # without a limit memory.max says `max`
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free.append(limit - used + int(kinds.get("file", 0)))  # cached files can be evicted
    return max(0, min(free, default=0)) // max(1, env.launcher_number("LOCAL_WORLD_SIZE", 1))
