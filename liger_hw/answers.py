"""What the registry is asked and what its layers answer: keys, stored entries, candidates, the explanation of a choice.

Values only; `registry` makes and chooses them, and has the same names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from .backends import LaunchConfig, Target

Key = tuple[int, ...]
"""What a launch is looked up by: problem sizes, rounded as the tunable says, and bytes an element."""

LAYERS = ("explicit", "lock", "user", "shipped-device", "shipped-arch", "shipped-family", "heuristic", "safe")


@dataclass(frozen=True)
class Entry:
    """One stored configuration: where it came from is kept with it and shown by `explain`.

    provenance: at least `{"kind": "measured" | "static" | "modelled"}`; source: file it was read from
    version: of the kernel (`Tunable.version`) it was stored for; for another version the entry is stale
    """

    config: LaunchConfig
    provenance: Mapping[str, Any] = field(default_factory=dict)
    version: int = 1
    source: str = ""


@dataclass(frozen=True)
class Candidate:
    """One answer the layers offered. `rejected` is empty for the one that was taken."""

    layer: str
    config: LaunchConfig
    provenance: Mapping[str, Any]
    source: str
    rejected: str = ""

    def to_json(self) -> dict[str, Any]:
        config, provenance = self.config.to_json(), dict(self.provenance)
        return {**vars(self), "config": config, "provenance": provenance}


@dataclass(frozen=True)
class Explanation:
    """Why a tunable launches as it does: the chosen candidate and every other one with its reason."""

    tunable: str
    target: Target
    key: Key
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        return next(c for c in self.candidates if not c.rejected)

    def to_json(self) -> dict[str, Any]:
        chosen = self.chosen.to_json()
        return {
            "tunable": self.tunable,
            "target": self.target.to_json(),
            "key": list(self.key),
            **{name: chosen[name] for name in ("layer", "config", "provenance")},
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }

    def __str__(self) -> str:
        lines = [f"{self.tunable} on {self.target.name} ({self.target.vendor} {self.target.arch}), key {self.key}"]
        taken = self.chosen
        for c in self.candidates:
            state = "taken" if c is taken else c.rejected or "a better layer answered"
            where = f" from {c.source}" if c.source else ""
            lines.append(f"  {c.layer:<15} {c.provenance.get('kind', '?'):<10} {c.config.in_words()}{where}: {state}")
        return "\n".join(lines)
