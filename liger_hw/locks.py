"""Locks of a module that survive a fork, and imports that a fork waits for."""

from __future__ import annotations

import importlib
import os
import threading
from collections import Counter
from types import ModuleType
from typing import Any


def fork_safe(lock: Any) -> Any:
    """A lock that is free in a forked child: a thread that held it in the parent does not exist there.

    A reentrant lock that the forking thread holds itself stays locked, so that it can be released.
    """

    def renew() -> None:
        held_here = getattr(lock, "_is_owned", None)
        if held_here is None or not held_here():
            lock._at_fork_reinit()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    return lock


FORK_SECONDS = 10.0
"""How long a fork waits for the imports of other threads."""
_importers: Counter[int] = Counter()
"""Thread -> how many of its `import_module` have not returned."""
_idle = threading.Condition()


def import_module(name: str) -> ModuleType:
    """`importlib.import_module`, for what is imported at first use: another thread's fork waits until it is done.

    Python's lock of a module that a thread imports stays locked in a forked child, where no thread releases it: it
    would wait for ever as soon as it imports the same. Imports by other packages are not seen here.
    """
    thread = threading.get_ident()
    with _idle:
        _importers[thread] += 1
    try:
        return importlib.import_module(name)
    finally:
        with _idle:
            _importers[thread] -= 1
            if not _importers[thread]:
                del _importers[thread]
            _idle.notify_all()


def _before_fork() -> None:
    _idle.acquire()
    this_thread = threading.get_ident()
    _idle.wait_for(lambda: not set(_importers) - {this_thread}, FORK_SECONDS)


def _after_fork_in_child() -> None:
    this_thread = threading.get_ident()
    for thread in set(_importers) - {this_thread}:
        del _importers[thread]
    _idle.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_idle.release, after_in_child=_after_fork_in_child)
