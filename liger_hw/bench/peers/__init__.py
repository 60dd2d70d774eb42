"""Peers: other implementations of the ops. A peer's functions take the arguments of the op's sample.

    torch    eager, as models write it
    compile  torch.compile of the same
    liger    liger-kernel's functional API, with its defaults

A new op needs a function in `eager.py` if models write it differently from its reference, and one in `liger.py` if
Liger's has other parameters. `benchmarks/more_peers.py` and `moe.py` add further peers.
"""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Callable, ContextManager

import torch

from ...registry import Op
from . import eager, liger
from .common import Absent, Unsupported  # noqa: F401  callers take both from here

OURS = "liger_hw"


@dataclass(frozen=True)
class Peer:
    """module: its import; distribution: has its version; build(op): returns the op's function or raises `Absent`
    chosen: a context manager that yields the set of implementations that the peer chooses in the block
    """

    name: str
    module: str
    distribution: str
    build: Callable[[Op], Callable[..., Any]]
    chosen: Callable[[], ContextManager[set[str]]] = lambda: contextlib.nullcontext(set())

    def version(self) -> str | None:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


def arm(name: str, op: Op) -> Callable[..., Any]:
    """An arm's function for an op. Raises `Absent`."""
    if name == OURS:
        return op.function
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    peer = PEERS[name]
    if importlib.util.find_spec(peer.module) is None:
        raise Absent(f"{peer.distribution} is not installed")
    return peer.build(op)


def _torch(op: Op) -> Callable[..., Any]:
    return getattr(eager, op.name, op.reference)


def _liger(op: Op) -> Callable[..., Any]:
    return getattr(liger, op.name, None) or liger.functional(op.name)


def _compile(op: Op) -> Callable[..., Any]:
    torch.compiler.reset()  # otherwise torch stops compiling after too many recompilations
    return torch.compile(_torch(op), dynamic=False)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch", "torch", "torch", _torch),
        Peer("compile", "torch", "torch", _compile),
        Peer("liger", "liger_kernel", "liger-kernel", _liger, liger.chosen),
    )
}
DEFAULT = ("torch", "compile", "liger")
