"""What a tuner measured, line by line, and what of it still holds in a later run (`liger-hw autotune --resume`)."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any, Iterator

from .. import files
from ..backends import LaunchConfig
from . import store


class Journal:
    """Every measurement the tuner takes: append-only lines of JSON, `{op, variant, key, dtype, stage, ...}`.

    A line is handed to the operating system at once, so a killed run loses nothing but the candidate in flight. The
    disk is flushed once a second and at the end of a job: only a power cut can lose more.
    """

    FLUSH_SECONDS = 1.0

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: int | None = None
        self._flushed = 0.0
        if path is not None:
            try:
                store.refuse_links(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | files.NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
                self._file = os.open(path, flags, 0o644)
                if not stat.S_ISREG(os.fstat(self._file).st_mode):
                    self.close()
                    raise OSError("not a regular file")
                size = os.fstat(self._file).st_size
                if size and os.pread(self._file, 1, size - 1) != b"\n":  # a full disk tore the last line
                    os.write(self._file, b"\n")
            except OSError as error:
                store.warn_once("journal", f"cannot write {path}: {error}; this run cannot be resumed")

    def write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, (json.dumps(line, sort_keys=True) + "\n").encode())
            if time.monotonic() - self._flushed > self.FLUSH_SECONDS:
                self.flush()
        except OSError as error:
            store.warn_once("journal", f"cannot write {self.path}: {error}; this run cannot be resumed")
            self.close()

    def flush(self) -> None:
        if self._file is not None:
            self._flushed = time.monotonic()
            try:
                os.fsync(self._file)
            except OSError as error:
                store.warn_once("journal flush", f"cannot flush {self.path}: {error}")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self) -> Iterator[dict[str, Any]]:
        """Every whole line written so far, by any run; a torn last line is skipped."""
        if self.path is None:
            return
        try:
            with files.open_regular(self.path) as file:
                while text := file.readline(store.ENTRY_BYTES):
                    try:
                        line = json.loads(text.decode(errors="replace"))
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(line, dict):
                        yield line
        except OSError:
            return


class Past:
    """What earlier runs measured with this minor version of Triton, by name and version of the kernel."""

    def __init__(self, journal: Journal | None, triton: str) -> None:
        self.finished: dict[tuple, dict[str, Any]] = {}
        self.coarse: dict[tuple, dict[str, float]] = {}
        self.failed: dict[tuple, dict[str, str]] = {}
        for line in journal.read() if journal else ():
            if store.minor(str(line.get("triton", ""))) != store.minor(triton):
                continue
            try:
                name = (line["op"], line["variant"], tuple(line["key"]), line["version"])
                if line["stage"] == "done":
                    if config := line["result"].get("config"):
                        LaunchConfig.from_json(config)
                    self.finished[name] = line
                elif line["stage"] == "failed":
                    self.failed.setdefault(name, {})[json.dumps(line["config"], sort_keys=True)] = str(line["reason"])
                elif line["stage"] == "coarse":
                    self.coarse.setdefault(name, {})[json.dumps(line["config"], sort_keys=True)] = float(line["us"])
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                continue
