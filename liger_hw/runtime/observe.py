"""Watching launches: one stack of observers, which see a launch before it is made and may take its place.

    class Count(Observer):
        launches = 0

        def launch(self, proceed, plan, kernel, grid, args, flags):
            self.launches += 1
            return proceed(plan, kernel, grid, args, flags)

    with observing(Count()) as count:
        liger_rms_norm(x, w)

The replay cache records a call with an observer, the tuner learns what an operator launches, ahead-of-time compilation
notes what would be launched on a device that is not there. While there is an observer, every call goes to its launcher
and no call is replayed. Without one, a launch pays for one look at `observers`.
"""

from __future__ import annotations

import contextlib
from functools import partial
from threading import get_ident
from typing import Any, Callable, Iterator, TypeVar

observers: list[tuple[int | None, "Observer"]] = []
"""(thread, or None for every thread; observer), the innermost last. Empty most of the time: test that first."""


class Observer:
    """What an observer may do. Each method goes on with `proceed`, which asks the next observer outwards and in the end
    does what was asked for; an observer that does not call it takes its place. By default nothing is changed.
    """

    def launch(
        self, proceed: Callable[..., Any], plan: Any, kernel: Any, grid: tuple, args: tuple, flags: tuple
    ) -> tuple | None:
        """A launch, as `runtime.launch.launch` was asked for it; returns what that returns."""
        return proceed(plan, kernel, grid, args, flags)

    def routine(self, proceed: Callable[..., Any], plan: Any, routine: Any, args: tuple) -> Any:
        """A library's routine in a kernel's place, as `runtime.launch.call_routine` was asked for it; returns its
        result."""
        return proceed(plan, routine, args)

    def operator(self, proceed: Callable[..., Any], call: Any, args: tuple) -> Any:
        """An operator that is called in eager mode; `call` is what `define` returned. Returns its results."""
        return proceed(call, args)


class Foreseen(Observer):
    """Calls `note(plan, kernel, grid, args, flags)` in place of each launch."""

    def __init__(self, note: Callable[[Any, Any, tuple, tuple, tuple], None]) -> None:
        self.note = note

    def launch(self, proceed: Any, plan: Any, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        self.note(plan, kernel, grid, args, flags)


Watcher = TypeVar("Watcher", bound=Observer)


@contextlib.contextmanager
def observing(observer: Watcher, every_thread: bool = False) -> Iterator[Watcher]:
    """Let `observer` see the launches of this thread, or of every thread (a backward on a GPU runs in its own)."""
    entry = (None if every_thread else get_ident(), observer)
    observers.append(entry)
    try:
        yield observer
    finally:
        observers.remove(entry)


def observed(method: str, do: Callable[..., Any], *args: Any) -> Any:
    """`do(*args)` as this thread's observers have it: the innermost is asked first."""
    thread = get_ident()
    for owner, observer in tuple(observers):
        if owner is None or owner == thread:
            do = partial(getattr(observer, method), do)
    return do(*args)
