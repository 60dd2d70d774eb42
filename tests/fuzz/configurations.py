"""Random configurations: those that our rules accept give right results in the interpreter."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from harness import few_sizes, make, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target

SECONDS = 120


def attempt(chance: random.Random, folder: Path) -> str:
    op = chance.choice(list(registry.ops().values()))
    tunable, target = chance.choice(op.tunables), known_target(chance.choice(["sm90", "gfx942", "pvc"]))
    sizes = few_sizes(op)
    registry.reset()
    try:
        key = tunable.key(*sizes, 4)
        own = tunable.heuristic(target, key)
    except TypeError:
        return "no key of its sizes"
    blocks = {name: 2 ** chance.randrange(12) for name in own.blocks}
    if chance.random() < 0.2:
        blocks[chance.choice(["BLOCK_SIZE", "NOBODY", *blocks])] = chance.choice([0, -1, 3, 2**40, True, 16])
    options = chance.choice([{}, {}, {}, {"maxnreg": 64}, {"kpack": 2}, {"num_ctas": 2}, {"grf_mode": "256"}])
    numbers = 2 ** chance.randrange(7), chance.randrange(0, 9), chance.randrange(0, 5)
    try:
        config = LaunchConfig(blocks, *numbers, chance.choice(["none", "keep"]), options)
        config = LaunchConfig.from_json(config.to_json())
    except ValueError:
        return "no configuration"
    if tunable.illegal(target, key, config):
        return "refused"
    with registry.pretend(target), registry.override(tunable.name, config):
        verify(op, make(op, sizes, torch.float32, "cpu", 0), 0)
    failed = {mark: why for mark, why in registry.quarantined().items() if mark[1] == tunable.name}
    return "failed at launch, and another answered" if failed else "right"
