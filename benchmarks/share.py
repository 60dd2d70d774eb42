"""One list of cases, measured by several processes: each takes the next that nobody has, and leaves its rows in a
folder.

    for i in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$i python benchmarks/sweep.py many --share out --json many.json & done;
    wait

A process that dies leaves its case taken and without rows; starting it again goes on with the rest. Works on any file
system that creates a file only once.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Iterator, Sequence

from liger_hw.bench.cases import Case
from liger_hw.bench.report import save
from liger_hw.bench.timing import Budget


def untaken(folder: Path, count: int, what: str = "timed") -> Iterator[int]:
    """Numbers below `count` that no process with this folder has taken, each marked as taken when it is asked for."""
    for number in range(count):
        taken = folder / f"{number:04d}.{what}"
        if taken.exists():
            continue
        try:
            os.close(os.open(taken, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        yield number


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Everybody's rows so far, in the order of the list."""
    found = sorted(folder.glob("[0-9]*.json"))
    return [row for path in found for row in json.loads(path.read_text())["rows"]]


class Share:
    """The folder. `what` names a pass over the list: `timed` leaves rows, another (`warm`) only marks what was done.

    Raises `ValueError` when the folder belongs to another list of cases.
    """

    def __init__(self, folder: str | os.PathLike, todo: Sequence[Case], budget: Budget, what: str = "timed") -> None:
        self.folder, self.todo, self.budget, self.what = Path(folder), list(todo), budget, what
        self.number = -1
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"{case.label} {case} {case.quick}" for case in self.todo)
        digest, path = hashlib.sha256(text.encode()).hexdigest(), self.folder / "cases"
        try:
            with open(path, "x") as file:
                file.write(digest)
        except FileExistsError:
            if path.read_text() not in ("", digest):
                raise ValueError(
                    f"{self.folder} holds rows of another list of cases; give --share a new folder"
                ) from None

    def __len__(self) -> int:
        return len(self.todo)

    def __iter__(self) -> Iterator[Case]:
        """The cases nobody else has taken. Raises `OutOfBudget` before it takes one that cannot be begun."""
        self.budget.check()
        for number in untaken(self.folder, len(self.todo), self.what):
            self.number = number
            yield self.todo[number]
            self.budget.check()

    def keep(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rows of the case taken last."""
        save(self.folder / f"{self.number:04d}.json", {"rows": list(rows)})

    def rows(self) -> list[dict[str, Any]]:
        return rows_in(self.folder)

    def done(self) -> bool:
        """Whether every case has rows."""
        return len(list(self.folder.glob("[0-9]*.json"))) == len(self.todo)
