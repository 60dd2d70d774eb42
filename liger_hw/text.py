"""Text for a terminal: tables, wrapped lines, a status line."""

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
    """Maximum length of a line: COLUMNS, else the terminal's width; None if output goes to a file."""
    setting = os.environ.get("COLUMNS", "")
    if setting.isdigit() and int(setting):
        return max(40, int(setting))
    try:
        return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError, AttributeError):
        return None


def table(rows: Sequence[Sequence[str]], header: bool = True, indent: str = "") -> str:
    """A table at limit `columns()` wide, with a rule under the header and control characters escaped.

    Cells are wrapped at spaces; words are cut only if the table is still too wide. A row of one cell is a heading
    across the columns.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    full = [row for row in rows if len(row) == len(rows[0])]
    places = range(len(rows[0]))
    widths = [max(len(row[i]) for row in full) for i in places]
    if (limit := columns()) is not None:
        room = limit - 2 * (len(widths) - 1) - len(indent)
        longest_words = [max(len(word) for row in full for word in (row[i].split() or [""])) for i in places]
        for minimum in (longest_words, [4] * len(places)):
            while sum(widths) > room and (wide := [i for i in places if widths[i] > minimum[i]]):
                widths[max(wide, key=widths.__getitem__)] -= 1
    lines = []
    for row in rows:
        lines += _lines(row, widths, indent) if len(row) == len(rows[0]) else fold(indent + row[0]).splitlines()
    if header:
        lines.insert(len(_lines(rows[0], widths, indent)), indent + "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _lines(row: Sequence[str], widths: Sequence[int], indent: str) -> list[str]:
    """The lines of a row; a cell that is wider than its column continues in the next line."""
    cells = [textwrap.wrap(cell, max(1, width)) if len(cell) > width else [cell] for cell, width in zip(row, widths)]
    return [
        (indent + "  ".join(part.ljust(width) for part, width in zip(parts, widths))).rstrip()
        for parts in itertools.zip_longest(*cells, fillvalue="")
    ]


def with_notes(rows: Sequence[Sequence[str]]) -> tuple[list[tuple[str, ...]], list[str]]:
    """(rows of a table with shortened third and fourth cells, notes below the table).

    A cell longer than `MAX_CELL` is cut at its first colon, semicolon or bracket and gets the number of a note,
    `left alone (1)`. The note has the whole cell.
    """
    numbers: dict[str, int] = {}

    def short(cell: str) -> str:
        start = re.split(r":|;| \(", cell, maxsplit=1)[0]
        if len(cell) <= MAX_CELL or start == cell:
            return cell
        return f"{start} ({numbers.setdefault(cell, len(numbers) + 1)})"

    short_rows = [tuple(short(cell) if i in (2, 3) else cell for i, cell in enumerate(row)) for row in rows]
    return short_rows, [f"({number}) {cell}" for cell, number in numbers.items()]


MAX_CELL = 40


def fold(text: str, hang: str = "") -> str:
    """`text` with lines at limit `columns()` wide, control characters escaped. hang: begins continuation lines"""
    limit = columns()
    lines = [printable(line) for line in text.split("\n")]
    if limit is None:
        return "\n".join(lines)
    options = {"subsequent_indent": hang, "break_on_hyphens": False}
    return "\n".join(
        line if len(line) <= limit else "\n".join(textwrap.wrap(line, limit, replace_whitespace=False, **options))
        for line in lines
    )


def labelled(name: str, text: str) -> str:
    """A folded line with the name in the first column."""
    return fold(f"{name:<13} {text}", " " * 14)


def json_text(data: Any, indent: int | None = None, digits: int = 17) -> str:
    """Standard JSON. Floats are rounded to `digits` digits, or null if not finite; other objects become their text."""

    def valid(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.{digits}g}") if math.isfinite(value) else None
        if isinstance(value, dict):
            return {name: valid(one) for name, one in value.items()}
        return [valid(one) for one in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(valid(data), indent=indent, default=str, allow_nan=False)


def printable(text: str) -> str:
    """`text` with characters escaped that could control a terminal, change the text direction or are surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """The first line of `Type: message`, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200].rstrip(": ")


def time_left(elapsed: float, done: int, total: int, limit: float = math.inf) -> str:
    """`, 40 s left`, at most `limit` seconds, if `done` of `total` took `elapsed` seconds; "" while unknown."""
    left = min(limit, elapsed / done * (total - done)) if done else 0.0
    return f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left" if left >= 1 else ""


class StatusLine:
    """Progress on standard error: one changing line on a terminal, or a line every ten seconds in a file."""

    EVERY = 10.0

    def __init__(self) -> None:
        self.live, self.drawn, self.began = sys.stderr.isatty(), False, time.monotonic()
        self.last = self.began - (self.EVERY if self.live else 0.0)  # shown at once on a terminal

    def update(self, text: str) -> None:
        now = time.monotonic()
        if now - self.last < (0.1 if self.live else self.EVERY):
            return
        self.last, self.drawn = now, self.live
        if self.live:
            text = text[: (columns() or 80) - 1]  # a wrapped line could not be overwritten
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(fold(text, " " * 4), file=sys.stderr, flush=True)

    def progress(self, done: int, total: int, text: str) -> None:
        """Show `[3/20] text, 40 s left`; `done` of `total` are finished."""
        self.update(f"[{done + 1}/{total}] {text}{time_left(time.monotonic() - self.began, done, total)}")

    def end(self) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.drawn = False
