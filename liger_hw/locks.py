"""Locks of a module that survive a fork."""

from __future__ import annotations

import os
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
