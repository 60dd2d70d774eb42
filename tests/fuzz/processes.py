"""Threads that resolve, override, reload and compute while others fork: nothing deadlocks, no result is wrong."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import torch
from harness import few_sizes, make, verify

from liger_hw import registry
from liger_hw.backends import known_target

SECONDS = 60
OPS = ("rms_norm", "swiglu", "softmax", "cross_entropy")
PATIENCE = 120
TARGETS = [known_target(name) for name in ("h200", "gfx942")]  # imported now: no fork waits for an import
IMPORTED = [registry.get_op(name) for name in OPS]


def attempt(chance: random.Random, folder: Path) -> str:
    os.environ["LIGER_HW_CACHE_DIR"] = str(folder / "cache")
    registry.reset()
    errors: list[BaseException] = []
    jobs = [chance.choice([_compute, _resolve, _override, _reload]) for _ in range(chance.randrange(2, 6))]
    threads = [
        threading.Thread(target=_guarded, args=(job, random.Random(chance.random()), errors), daemon=True)
        for job in jobs
    ]
    for thread in threads:
        thread.start()
    children = [_fork(chance) for _ in range(chance.randrange(3))]
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for child in children:
        _wait(child)
    assert not errors, repr(errors[0])
    return f"{len(children)} forks"


def _guarded(job, chance: random.Random, errors: list) -> None:
    try:
        for _ in range(5):
            job(chance)
    except BaseException as error:
        errors.append(error)


def _compute(chance: random.Random) -> None:
    op = chance.choice(IMPORTED)
    verify(op, make(op, few_sizes(op), torch.float32, "cpu", 0), 0)


def _resolve(chance: random.Random) -> None:
    op = chance.choice(IMPORTED)
    for tunable in op.tunables:
        registry.choose(tunable, chance.choice(TARGETS), tunable.key(*few_sizes(op), 2))


def _override(chance: random.Random) -> None:
    target, tunable = TARGETS[0], registry.get_tunable("rms_norm.fwd")
    with registry.override("rms_norm.fwd", tunable.safe(target, tunable.key(7, 69, 2))), registry.pretend(target):
        _resolve(chance)


def _reload(chance: random.Random) -> None:
    registry.reload()
    registry.plans()


def _fork(chance: random.Random) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _resolve(chance)
            _reload(chance)
            code = 0
        finally:
            os._exit(code)
    return child


def _wait(child: int) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"a child ended with {status}"
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("a forked child hangs")
