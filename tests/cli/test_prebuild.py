"""`liger-hw prebuild`: the lock file, the compiled kernels and the lines for a Dockerfile, without a GPU."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from liger_hw.autotune import store
from liger_hw.autotune.lock import read
from liger_hw.backends import known_target
from liger_hw.cli import lock, main

OP = ["--batch", "1", "--seq", "512", "--ops", "rms_norm", "--workers", "2"]


def binaries(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.cubin")}


def test_the_folder_has_the_lock_file_and_the_kernels_that_another_process_finds(tmp_path, capsys, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        if main(["prebuild", "llama-3.2-1b", "--device", "h100", "-o", str(folder), "--json", *OP]):
            pytest.fail(capsys.readouterr().out)
    answer = json.loads(capsys.readouterr().out.split("\n}\n")[-2] + "\n}")
    assert answer["kernels"] >= 2 and answer["failed"] == [] and answer["device"] == known_target("h100").name
    assert len(binaries(first / "triton")) == answer["kernels"]
    assert binaries(first / "triton") == binaries(
        second / "triton"
    )  # the names are Triton's keys: a later process hits
    header, table = read(first / "liger-hw.lock")
    assert table and header["device"] == known_target("h100").name
    assert answer["dockerfile"] == [
        "COPY second /opt/liger-hw",
        "ENV LIGER_HW_LOCK_FILE=/opt/liger-hw/liger-hw.lock",
        "ENV TRITON_CACHE_DIR=/opt/liger-hw/triton",
    ]
    assert "TRITON_CACHE_DIR" not in os.environ


def test_tuned_entries_are_copied(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    tuned = tmp_path / "tuned.jsonl"
    tuned.write_text("")
    monkeypatch.setattr(store, "file_of", lambda target: tuned)
    monkeypatch.setattr(lock, "_compile", lambda *_: (1, []))
    monkeypatch.setattr(lock, "pin", lambda *_: None)
    folder = tmp_path / "image"
    assert main(["prebuild", "llama-3.2-1b", "--device", "h100", "-o", str(folder), *OP]) == 0
    assert (folder / "cache" / "tuned.jsonl").exists()
    assert "ENV LIGER_HW_CACHE_DIR=/opt/liger-hw/cache" in capsys.readouterr().out
    shutil.rmtree(folder)


@pytest.mark.parametrize("device, words", [("max1550", "has no compiler"), ("cpu", "has no compiler"), ("x9", "known")])
def test_a_device_that_nothing_compiles_for_is_refused(tmp_path, capsys, device, words):
    pytest.importorskip("triton")
    assert main(["prebuild", "llama-3.2-1b", "--device", device, "-o", str(tmp_path / "a"), *OP]) == 2
    assert words in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "a").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    pytest.importorskip("triton")
    (tmp_path / "file").write_text("mine")
    assert main(["prebuild", "llama-3.2-1b", "--device", "h100", "-o", str(tmp_path), *OP]) == 2
    assert "not an empty folder" in " ".join(capsys.readouterr().err.split())
