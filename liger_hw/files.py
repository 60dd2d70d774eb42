"""Reading text with a size limit, locking and replacing files that several processes write, writing output files."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Iterator

try:
    import fcntl
except ImportError:  # Windows has none: writers do not wait for each other there
    fcntl = None

LOCK_SECONDS = 60.0  # a limit, since the process that holds the lock may be stopped
_LIMIT = 32 << 20


def read_text(path: str | os.PathLike) -> str:
    """The UTF-8 text of a file of at most 32 MiB. Raises `OSError`, `UnicodeDecodeError`."""
    with open(path, "rb") as file:
        data = file.read(_LIMIT + 1)
    if len(data) > _LIMIT:
        raise OSError(errno.EFBIG, "larger than 32 MiB", str(path))
    return data.decode()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, for which other writers wait. The system releases it when the process ends.

    On a file system without locks nothing is locked. Raises `OSError` after waiting LOCK_SECONDS for another process.
    """
    with open(path, "ab") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, "another process holds the lock", str(path)) from None
                time.sleep(0.01)
            except OSError:
                break
        yield


def write_text(path: str | os.PathLike, text: str) -> None:
    """`write_bytes` for text, in UTF-8."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Write a command's output file. Raises `OSError`.

    A regular file is replaced as a whole and keeps its mode. For a symbolic link, its target is replaced. A special
    file, such as /dev/stdout or a FIFO, is written to.
    """
    path = os.fspath(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if not os.path.basename(path):
            raise IsADirectoryError(errno.EISDIR, "this names a folder, not a file", path) from None
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data)
        return
    if not stat.S_ISREG(status.st_mode):
        with open(path, "wb") as file:
            file.write(data)
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    else:
        replace_file(Path(os.path.realpath(path)), data, stat.S_IMODE(status.st_mode))


def replace_file(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace `path` atomically by a new file, so that no reader sees a part of it. Raises `OSError`.

    mode: of the new file (default: 0666 without the umask's bits)
    """
    temporary = path.with_name(f".{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # instead of the temporary file's
        raise
