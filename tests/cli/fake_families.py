"""A process that stands for the one of `liger-hw models`: one family hangs it, another crashes it."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from liger_hw.autotune.workers import serve


def main() -> None:
    serve(lambda: _answer)


def _answer(call: str, arguments: list[Any]) -> Any:
    if call == "list":
        return dict.fromkeys(("one", "hangs", "two", "dies", "three"), "X")
    if arguments[0] == "hangs":
        time.sleep(1000)
    if arguments[0] == "dies":
        print("its last words", file=sys.stderr, flush=True)
        os._exit(3)
    return {"outcome": "verified"}
