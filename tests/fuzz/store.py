"""The user cache, tables and lock files hold anything: the registry answers legally, or refuses a lock file."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch

from liger_hw import env, registry
from liger_hw.autotune import lock, notes, store, tables
from liger_hw.backends import known_target
from tests.fuzz import hostile
from tests.fuzz.command_line import call

SECONDS = 20
OPS = ("rms_norm", "swiglu", "softmax", "dyt")
TARGETS = ("h200", "gfx942", "pvc")
DTYPE = torch.bfloat16


def attempt(chance: random.Random, folder: Path) -> str:
    cache, outside = folder / "cache", folder / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    op, target = registry.get_op(chance.choice(OPS)), known_target(chance.choice(TARGETS))
    shape = chance.choice(list(op.workloads.values()))
    os.environ["LIGER_HW_CACHE_DIR"] = str(cache)
    os.environ.pop("LIGER_HW_LOCK_FILE", None)
    registry.reset()
    for tunable in op.tunables:
        key = tunable.key(*shape, DTYPE.itemsize)
        name = tunable.op, tunable.variant, key
        space = [c for c in list(tunable.space(target, key))[:50] if not tunable.illegal(target, key, c)]
        config = chance.choice([*space, tunable.safe(target, key)])
        made = registry.Entry(config, {"kind": "measured", "date": "2026-01-01"}, tunable.version)
        store.save(target, name, made)
        notes.save_misses(target, [name])
        notes.save_quarantined(target, tunable.name, key, config, "failed", tunable.version)
        if chance.random() < 0.3:
            path = folder / "liger-hw.lock"
            lock.write(path, {name: made}, {"device": target.name})
            os.environ["LIGER_HW_LOCK_FILE"] = str(path)
            if chance.random() < 0.7:
                path.write_bytes(hostile.damaged(chance, path.read_text()))
    for path in sorted(path for path in cache.rglob("*.json") if path.is_file()):
        if chance.random() < 0.6 and path.is_file():  # its folder may have been moved by now
            _spoil(chance, path, outside)
    if chance.random() < 0.3:
        home = store.home(target)
        (home / chance.choice(["_journal.jsonl", "rms_norm", "_misses", "zz"]) / "x").mkdir(parents=True, exist_ok=True)
    return _use(chance, folder, op, target, shape, outside)


def _spoil(chance: random.Random, path: Path, outside: Path) -> None:
    kind, text = chance.randrange(8), path.read_text()
    if kind < 3:
        path.write_text(json.dumps(hostile.damaged_tree(chance, json.loads(text))))
    elif kind == 3:
        path.write_bytes(hostile.damaged(chance, text))
    elif kind == 4:
        path.unlink()
        path.symlink_to(chance.choice(["/dev/zero", str(outside / "precious"), str(path), "/dev/stdin"]))
    elif kind == 5:
        path.unlink()
        os.mkfifo(path)
    elif kind == 6:
        path.unlink()
        path.mkdir()
    else:
        folder = path.parent
        if not folder.is_symlink():
            folder.rename(outside / f"{folder.name}{chance.randrange(10**6)}")
            folder.symlink_to(outside)


def _use(chance, folder, op, target, shape, outside) -> str:
    registry.reload()
    outcome = "answered"
    try:
        for tunable in op.tunables:
            key = tunable.key(*shape, DTYPE.itemsize)
            chosen = registry.choose(tunable, target, key)
            assert not tunable.illegal(target, key, chosen.config), chosen
            str(registry.explain_tunable(tunable, target, key))
    except env.SettingError:
        assert "LIGER_HW_LOCK_FILE" in os.environ
        outcome = "lock file refused"
    words = [["list"], ["list", "--json"], ["verify"], ["export", "--device", target.arch], ["clear", "--yes"]]
    code, _, _ = call(["cache", *chance.choice(words)])
    assert code in (0, 1, 2), code
    if chance.random() < 0.3:
        table = folder / "table.json"
        text = tables.render({**store.header(target), "digest": ""}, {})
        table.write_bytes(hostile.damaged(chance, text))
        code, _, _ = call(["cache", "import", str(table), "--device", target.arch, "--yes"])
        assert code in (0, 1, 2), code
    assert (outside / "precious").read_text() == "precious"
    return outcome
