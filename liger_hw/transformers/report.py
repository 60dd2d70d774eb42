"""What a patch did, and how to take it back."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("liger_hw")
_MISSING = object()

PATCHED = "patched"
ALREADY = "already patched"


@dataclass(frozen=True)
class PatchRow:
    """One place: `part` is the keyword of the public function, `kernel` the op, `state` what happened there."""

    part: str
    where: str
    kernel: str
    state: str


@dataclass
class Patch:
    """One attribute of a class, module or instance, replaced."""

    owner: Any
    name: str
    replacement: Any
    original: Any = _MISSING

    def apply(self) -> None:
        self.original = vars(self.owner).get(self.name, _MISSING)
        setattr(self.owner, self.name, self.replacement)

    def revert(self) -> None:
        """Restore the very object that was there, unless somebody has replaced ours since."""
        if vars(self.owner).get(self.name, _MISSING) is not self.replacement:
            log.warning("liger_hw: %s of %s was changed after patching; left as it is", self.name, _named(self.owner))
        elif self.original is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


@dataclass
class PatchReport:
    """What `apply_liger_kernel_to_<family>` did: rows for reading, `revert()` for undoing; `str(report)` is a table.

    As a context manager it reverts at the end: `with apply_liger_kernel_to_mistral(): ...`. A report takes back only
    what its own call changed: after a second, idempotent call the first report still undoes everything.
    """

    family: str
    target: str
    rows: list[PatchRow] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list, repr=False)

    @property
    def patched(self) -> list[PatchRow]:
        """The rows that this call changed."""
        return [row for row in self.rows if row.state == PATCHED]

    def change(self, row: PatchRow, patch: Patch) -> None:
        """Apply one patch and note it."""
        patch.apply()
        self.patches.append(patch)
        self.rows.append(row)

    def revert(self) -> None:
        """Put back every original, newest first. Doing it twice does nothing more."""
        while self.patches:
            self.patches.pop().revert()

    def __enter__(self) -> "PatchReport":
        return self

    def __exit__(self, *_: Any) -> None:
        self.revert()

    def summary(self) -> str:
        """One line: family, target, kernels with counts, and what was left alone."""
        done = Counter(row.kernel for row in self.patched)
        kept = [row for row in self.rows if row.state != PATCHED]
        text = ", ".join(f"{kernel} x{n}" if n > 1 else kernel for kernel, n in done.items()) or "nothing new"
        left = "; ".join(sorted({f"{row.part}: {row.state}" for row in kept}))
        return f"{self.family} ({self.target}): {text}" + (f" [{left}]" if left else "")

    def __str__(self) -> str:
        sources = {kernel: config_source(kernel) for kernel in {row.kernel for row in self.rows}}
        groups = Counter((r.part, r.where, r.kernel, r.state) for r in self.rows)
        table = [("part", "where", "kernel", "state", "configuration")]
        for (part, where, kernel, state), n in groups.items():
            source = sources[kernel] if state in (PATCHED, ALREADY) else "-"
            table.append((part, f"{where} x{n}" if n > 1 else where, kernel, state, source))
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([f"{self.family}: {self.target}", *lines])


def config_source(kernel: str) -> str:
    """Where the launch configurations of an op have come from so far in this process, per variant."""
    import torch

    from .. import registry

    found: dict[str, set[str]] = {}
    for plan in registry.plans():
        if plan.tunable.op == kernel:
            found.setdefault(plan.tunable.variant, set()).add(plan.layer)
    if found:
        return ", ".join(f"{variant}: {'/'.join(sorted(layers))}" for variant, layers in found.items())
    if not torch.accelerator.is_available() and not registry.interpreting():
        return "torch reference (no accelerator)"
    return "resolved at the first launch"


def _named(owner: Any) -> str:
    return getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__name__
