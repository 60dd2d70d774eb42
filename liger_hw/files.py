"""Files that others may have touched, read with care, and files that a command was asked to write."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO

NONBLOCK = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags of `os.open` that keep a FIFO without a writer from blocking."""


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading. Raises `OSError` for a FIFO, a device or a folder, and never waits for one."""
    handle = os.open(path, os.O_RDONLY | NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_text(path: str | os.PathLike, limit: int) -> str:
    """The UTF-8 text of a regular file of at most `limit` bytes. Raises `OSError`, `UnicodeDecodeError`."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB", str(path))
    return data.decode()


def write_text(path: str | os.PathLike, text: str) -> None:
    """`write_bytes` of text in UTF-8."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Write what a command was asked to write. Raises `OSError`.

    A regular file is replaced as a whole and keeps its mode; a symbolic link stays one, its target is written. Anything
    else, such as /dev/stdout or a FIFO, is written to as a stream.
    """
    path = os.fspath(path)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        if not os.path.basename(path):
            raise IsADirectoryError(errno.EISDIR, "this names a folder, not a file", path) from None
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data)
        return
    if (stream := _own_stream(there)) is not None:
        sys.stdout.flush()
        with open(stream, "wb", closefd=False) as file:
            file.write(data)
    elif not stat.S_ISREG(there.st_mode):
        with open(path, "wb") as file:
            file.write(data)
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    else:
        replace_file(Path(os.path.realpath(path)), data, stat.S_IMODE(there.st_mode))


def _own_stream(there: os.stat_result) -> int | None:
    """1 or 2 where a file is this process's standard output or error, which others may write to as well."""
    for number in (1, 2):
        try:
            if os.path.samestat(there, os.fstat(number)):
                return number
        except OSError:  # closed
            pass
    return None


def replace_file(path: Path, data: bytes, mode: int | None = None) -> None:
    """Put a whole file in the place of `path`, so that no reader sees half of it. Raises `OSError`.

    mode: of the new file (default: what the umask leaves of 0666)
    """
    temporary = path.with_name(f".{secrets.token_hex(4)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NONBLOCK, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def write_figure(path: str | os.PathLike, figure: Any, dpi: int) -> None:
    """Write a matplotlib figure as PNG. Raises `OSError`."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    write_bytes(path, picture.getvalue())
