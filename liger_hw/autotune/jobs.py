"""The tuner's nouns: what is to be tuned, how hard to look, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..registry import Key


@dataclass(frozen=True)
class Job:
    """One tunable at one key, measured at `sizes`. `beside`: (variant, key) of everything launched at these sizes."""

    op: str
    variant: str
    key: Key
    sizes: tuple[int, ...]
    dtype: str
    beside: tuple[tuple[str, Key], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.op}.{self.variant}"


@dataclass
class Result:
    """What became of a job. `config` is the winner (the heuristic when nothing beats it); times in microseconds."""

    job: Job
    heuristic_us: float = 0.0
    winner_us: float = 0.0
    gain: float = 0.0
    noise: float = 0.0
    floor_us: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    stored: bool = False
    tried: int = 0
    failed: int = 0
    seconds: float = 0.0
    note: str = ""
    error: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """What a choice without the device rests on: certificates, and why candidates were dropped."""

    @property
    def floor_share(self) -> float:
        """Time the bytes alone would take over the winner's time; above 1 when they come from cache."""
        return self.floor_us / self.winner_us if self.winner_us else 0.0

    def to_json(self) -> dict[str, Any]:
        data = {k: v for k, v in vars(self).items() if k != "job"}
        job = self.job
        head = {
            "op": job.op,
            "variant": job.variant,
            "key": list(job.key),
            "sizes": list(job.sizes),
            "dtype": job.dtype,
        }
        return {**head, **data, "floor_share": round(self.floor_share, 4)}


@dataclass(frozen=True)
class Effort:
    """How hard to look. Rounds are samples per arm; each sample is one graph replay of many launches."""

    first: int = 96
    """Candidates of a tunable's first key."""
    later: int = 36
    """Candidates of further keys of the tunable, which start from what was best nearby."""
    refine: int = 16
    finalists: int = 6
    coarse_rounds: int = 3
    final_rounds: int = 12
    confirm_rounds: int = 30
    job_seconds: float = 30.0
