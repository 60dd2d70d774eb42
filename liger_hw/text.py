"""Plain text for a terminal: tables, folded lines, and a status line for long work."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import textwrap
import time
from typing import Any, Sequence


def columns() -> int | None:
    """Characters a line may have: what COLUMNS says, else the terminal's width; None where output goes to a file."""
    setting = os.environ.get("COLUMNS", "")
    if setting.isdigit() and int(setting):
        return max(40, int(setting))
    try:
        return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError, AttributeError):
        return None


def table(rows: Sequence[Sequence[str]], header: bool = True, indent: str = "") -> str:
    """Columns as wide as their widest cell, folded if the table is wider than `columns()`; a rule under the header.

    Columns with several words are narrowed first, so that words are cut only if nothing else can be folded. A row of
    one cell is a heading of any width over the rows below it. Control characters are escaped.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    full = [row for row in rows if len(row) == len(rows[0])]
    places = range(len(rows[0]))
    widths = [max(len(row[i]) for row in full) for i in places]
    if (most := columns()) is not None:
        room = most - 2 * (len(widths) - 1) - len(indent)
        words = [max(len(word) for row in full for word in (row[i].split() or [""])) for i in places]
        for least in (words, [4] * len(words)):
            while sum(widths) > room and (wide := [i for i in places if widths[i] > least[i]]):
                widths[max(wide, key=widths.__getitem__)] -= 1
    lines = []
    for row in rows:
        lines += _lines(row, widths, indent) if len(row) == len(rows[0]) else fold(indent + row[0]).splitlines()
    if header:
        lines.insert(len(_lines(rows[0], widths, indent)), indent + "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _lines(row: Sequence[str], widths: Sequence[int], indent: str) -> list[str]:
    """A row as lines; a cell that is wider than its column continues below, cut at spaces where possible."""
    cells = [textwrap.wrap(cell, max(1, width)) if len(cell) > width else [cell] for cell, width in zip(row, widths)]
    return [
        (indent + "  ".join(part.ljust(width) for part, width in zip(parts, widths))).rstrip()
        for parts in itertools.zip_longest(*cells, fillvalue="")
    ]


def with_notes(rows: Sequence[Sequence[str]]) -> tuple[list[tuple[str, ...]], list[str]]:
    """(rows of a table with short third and fourth cells, notes below the table).

    A long cell is cut at its first colon, semicolon or bracket and gets the number of a note: `left alone (1)`. The
    note has the whole cell, so that one long cell does not widen every row.
    """
    numbers: dict[str, int] = {}

    def short(cell: str) -> str:
        if len(cell) <= LONGEST_CELL:
            return cell
        start = re.split(r":|;| \(", cell, maxsplit=1)[0]
        if start == cell:
            return cell
        return f"{start} ({numbers.setdefault(cell, len(numbers) + 1)})"

    short_rows = [tuple(short(cell) if i in (2, 3) else cell for i, cell in enumerate(row)) for row in rows]
    return short_rows, [f"({number}) {cell}" for cell, number in numbers.items()]


LONGEST_CELL = 40
"""Longest cell that `with_notes` leaves in a table."""


def fold(text: str, hang: str = "") -> str:
    """Each line of `text`, folded where it is wider than `columns()`; continuation lines begin with `hang`.

    What a terminal might obey is escaped.
    """
    most = columns()
    lines = [printable(line) for line in text.split("\n")]
    if most is None:
        return "\n".join(lines)
    options = {"subsequent_indent": hang, "break_on_hyphens": False}
    return "\n".join(
        line if len(line) <= most else "\n".join(textwrap.wrap(line, most, replace_whitespace=False, **options))
        for line in lines
    )


def labelled(name: str, text: str) -> str:
    """A folded line, with the name in a column of its own."""
    return fold(f"{name:<13} {text}", " " * 14)


def json_text(data: Any, indent: int | None = None) -> str:
    """Standard JSON: numbers that are not finite become null, other values without a JSON form their text."""

    def valid(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {name: valid(one) for name, one in value.items()}
        return [valid(one) for one in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(valid(data), indent=indent, default=str, allow_nan=False)


def printable(text: str) -> str:
    """`text` with everything that a terminal might obey (control characters, text direction, surrogates) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """`Type: message`, one line of it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200].rstrip(": ")


def time_left(elapsed: float, done: int, total: int, most: float = math.inf) -> str:
    """`, 40 s left`, at most `most`, when `done` of `total` took `elapsed` seconds; "" if that cannot be known."""
    left = min(most, elapsed / done * (total - done)) if done else 0.0
    return f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left" if left >= 1 else ""


class StatusLine:
    """To standard error: on a terminal one line that changes, elsewhere a plain line now and then."""

    EVERY = 10.0

    def __init__(self) -> None:
        self.live, self.drawn, self.began = sys.stderr.isatty(), False, time.monotonic()
        self.last = self.began - (self.EVERY if self.live else 0.0)  # on a terminal the first line comes at once

    def update(self, text: str) -> None:
        now = time.monotonic()
        if now - self.last < (0.1 if self.live else self.EVERY):
            return
        self.last, self.drawn = now, self.live
        if self.live:
            text = text[: (columns() or 80) - 1]  # the next status would overwrite only the last line of a longer one
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(fold(text, " " * 4), file=sys.stderr, flush=True)

    def progress(self, done: int, total: int, text: str) -> None:
        """`[3/20] text, 40 s left`, where `done` of `total` are finished."""
        self.update(f"[{done + 1}/{total}] {text}{time_left(time.monotonic() - self.began, done, total)}")

    def end(self) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.drawn = False
