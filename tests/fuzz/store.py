"""A damaged user cache, table or lock file: the registry gives legal configurations, or refuses the lock file."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch

from liger_hw import env, registry
from liger_hw.autotune import lock, store, tables
from liger_hw.backends import known_target
from tests.fuzz import hostile
from tests.fuzz.command_line import call

SECONDS = 20
OPS = ("rms_norm", "swiglu", "softmax", "dyt")
TARGETS = ("h200", "gfx942", "pvc")
DTYPE = torch.bfloat16


def attempt(chance: random.Random, folder: Path) -> str:
    op, target = registry.get_op(chance.choice(OPS)), known_target(chance.choice(TARGETS))
    shape = chance.choice(list(op.workloads.values()))
    os.environ["LIGER_HW_CACHE_DIR"] = str(folder / "cache")
    os.environ.pop("LIGER_HW_LOCK_FILE", None)
    registry.reset()
    for tunable in op.tunables:
        key = tunable.key(*shape, DTYPE.itemsize)
        name = tunable.op, tunable.variant, key
        space = [c for c in list(tunable.space(target, key))[:50] if not tunable.illegal(target, key, c)]
        config = chance.choice([*space, tunable.safe(target, key)])
        kinds = [kind for names in store.KINDS.values() for kind in names]
        lines = [registry.Entry(config, {"kind": kind, "date": "2026-01-01", "us": 1.0}) for kind in kinds]
        store.add(target, [(name, line) for line in chance.sample(lines, 3)])
        if chance.random() < 0.3:
            path = folder / "liger-hw.lock"
            lock.write(path, {name: lines[0]}, {"device": target.name})
            os.environ["LIGER_HW_LOCK_FILE"] = str(path)
            if chance.random() < 0.7:
                path.write_bytes(hostile.damaged(chance, path.read_text()))
    path = store.file_of(target)
    if chance.random() < 0.3:
        path.write_bytes(hostile.damaged(chance, path.read_text()))
    elif chance.random() < 0.8:
        path.write_text(json.dumps(hostile.damaged_tree(chance, json.loads(path.read_text()))))
    return _use(chance, folder, op, target, shape)


def _use(chance, folder, op, target, shape) -> str:
    registry.reload()
    outcome = "answered"
    try:
        for tunable in op.tunables:
            key = tunable.key(*shape, DTYPE.itemsize)
            chosen = registry.choose(tunable, target, key)
            assert not tunable.illegal(target, key, chosen.config), chosen
            str(registry.explain_tunable(tunable, target, key))
        line = registry.Entry(op.tunables[0].safe(target, key), {"kind": "failed", "reason": "x"})
        assert store.add(target, [((op.name, op.tunables[0].variant, key), line)]), "a damaged file stops no writer"
    except env.SettingError:
        assert "LIGER_HW_LOCK_FILE" in os.environ
        outcome = "lock file refused"
    words = [["list"], ["list", "--json"], ["verify"], ["export", "--device", target.arch], ["clear", "--yes"]]
    code, _, _ = call(["cache", *chance.choice(words)])
    assert code in (0, 1, 2), code
    if chance.random() < 0.3:
        table = folder / "table.json"
        text = tables.render(store.header(target), ())
        table.write_bytes(hostile.damaged(chance, text))
        code, _, _ = call(["cache", "import", str(table), "--device", target.arch, "--yes"])
        assert code in (0, 1, 2), code
    return outcome
