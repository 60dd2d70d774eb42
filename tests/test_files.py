"""Files that commands write, and locks after a fork."""

from __future__ import annotations

import os
import threading

import pytest

from liger_hw import files, registry
from liger_hw.bench import report
from liger_hw.recompute import recipes
from liger_hw.transformers import report as patching


def test_an_error_names_the_file_that_was_to_be_written(tmp_path):
    path = tmp_path / "absent" / "liger-hw.lock"
    with pytest.raises(FileNotFoundError) as error:
        files.replace_file(path, b"data")
    assert error.value.filename == str(path)


def test_a_link_stays_a_link_and_its_target_keeps_its_mode(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    report.save(link, {"a": float("nan")})
    assert link.is_symlink() and '"a": null' in target.read_text() and target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "target.json"]


def test_a_dangling_link_is_written_through(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "new")
    files.write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "new").read_text() == "x"


def test_a_folder_that_does_not_exist_becomes_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="names a folder"):
        files.write_text(f"{tmp_path}/results/", "x")
    assert not list(tmp_path.iterdir())


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_a_fifo_is_written_as_a_stream(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    heard = []
    reader = threading.Thread(target=lambda: heard.append(path.read_text()))
    reader.start()
    files.write_text(path, "x")
    reader.join()
    assert heard == ["x"] and path.is_fifo()


@pytest.mark.parametrize("lock", [registry._lock, patching.PATCH_LOCK, recipes._counting])
def test_a_lock_that_another_thread_holds_is_free_in_a_forked_child(lock):
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=60) else 1)
    done.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_that_the_forking_thread_holds_can_be_released_in_the_child():
    with registry._lock:
        child = os.fork()
        if child == 0:
            try:
                registry._lock.release()
            except RuntimeError:
                os._exit(1)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_that_another_process_keeps_is_an_error(tmp_path, monkeypatch):
    """A process that was stopped while it wrote the user cache does not stop others: they go on without writing."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    with open(tmp_path / ".lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process holds the lock"), files.locked(tmp_path / ".lock"):
            pass
