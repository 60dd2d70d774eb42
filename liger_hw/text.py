"""Plain text for a terminal: a table, and a line that says how far long work is."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any, Sequence


def table(rows: Sequence[Sequence[str]], header: bool = True, indent: str = "") -> str:
    """Columns as wide as their widest cell; a rule under the first row when it is a header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    if header:
        lines.insert(1, indent + "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def json_text(data: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: a number that is not finite becomes null, what JSON has no form for its text."""

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


class StatusLine:
    """To standard error: on a terminal one line that changes, elsewhere a plain line now and then."""

    EVERY = 10.0

    def __init__(self) -> None:
        self.live, self.drawn, self.last = sys.stderr.isatty(), False, time.monotonic()

    def update(self, text: str) -> None:
        now = time.monotonic()
        if now - self.last < (0.1 if self.live else self.EVERY):
            return
        self.last, self.drawn = now, self.live
        print(f"\r\x1b[K{text}" if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
