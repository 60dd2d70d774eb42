"""A made-up device, whose times are formulas, for the tuner's tests."""

from __future__ import annotations

import random
from pathlib import Path

from liger_hw import registry
from liger_hw.autotune import store, tables
from liger_hw.autotune.workers import WorkerDied, WorkerError
from liger_hw.backends import LaunchConfig, Target, known_target
from liger_hw.registry import Entry

H200 = known_target("h200")
FACTS = {"device": "NVIDIA H200", "driver": "1.2", "torch": "2.11", "triton": "3.6.0", "copy_gbs": 4000.0}


def tunable(name: str = "rms_norm.fwd") -> registry.Tunable:
    return registry.get_tunable(name)


def entry(config: LaunchConfig, made_for: registry.Tunable, **provenance) -> Entry:
    full = {"kind": "measured", "triton": store.triton_version(), "date": "2026-11-20T00:00:00Z", **provenance}
    return Entry(config, full, made_for.version)


def other_config(of: registry.Tunable, target: Target, key: tuple) -> LaunchConfig:
    """A legal configuration that is not the heuristic."""
    heuristic = of.heuristic(target, key)
    return next(c for c in of.space(target, key) if c != heuristic and of.illegal(target, key, c) is None)


def ship(monkeypatch, tmp_path: Path, stem: str, table, target: Target = H200) -> Path:
    """Write a shipped table of this stem."""
    folder = tmp_path / "shipped" / target.vendor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(tables.render(store.header(target), table.items()))
    monkeypatch.setattr(store, "shipped_folder", lambda vendor: tmp_path / "shipped" / vendor)
    registry.reload()
    return folder / f"{stem}.json"


class FakeMeasurer:
    """Times candidates by `cost(config)` in us; text rejects the candidate, an exception is raised."""

    def __init__(self, baseline: LaunchConfig, cost, noise: float = 0.0, verify=lambda config: "") -> None:
        self.baseline, self.cost, self.noise, self.wrong = baseline, cost, noise, verify
        self.chances = random.Random(0)
        self.opened = self.prepared = self.timed = 0
        self.alive = True
        self.arms: set[LaunchConfig] = set()

    def open(self, job, sizes):
        self.opened += 1
        self.alive = True
        self.arms.clear()
        self.sizes = sizes
        return self.baseline, 4_000_000

    def prepare(self, config):
        assert self.alive, "a dead worker was asked"
        if config in self.arms:
            return
        self.prepared += 1
        cost = self.cost(config)
        if isinstance(cost, str):
            raise WorkerError(cost)
        if isinstance(cost, BaseException):
            if isinstance(cost, WorkerDied):
                self.alive = False
            raise cost
        self.arms.add(config)

    def time(self, configs, rounds):
        self.timed += 1
        found = []
        for config in configs:
            assert config in self.arms, "timed before it was prepared"
            cost = self.cost(config)
            if callable(cost):
                self.alive = False
                raise cost()
            found.append([cost * (1 + self.noise * self.chances.uniform(-1, 1)) for _ in range(rounds)])
        return found

    def verify(self, config):
        return self.wrong(config)

    def facts(self):
        return dict(FACTS, target=H200)

    def close(self):
        pass
