"""Runs a function of a test module in several processes of one process group.

    run(__file__, "check_something", "cpu")     # check_something(rank, device), in two processes over gloo

A rank that fails fails the test with its traceback. Processes on the CPU wait for the next function until one fails or
the tests end, since importing torch takes most of their time. Those on GPUs end. Called as a script, this is one rank.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from threading import Timer
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

from liger_hw.runtime.launch import Observer

ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """The processes of one process group. Each takes lines `file function` and answers each with a line."""

    def __init__(self, kind: str, world: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        address = f"file://{self.folder.name}/store"
        paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, kind, address, str(world)]
        self.said = [tempfile.TemporaryFile("w+") for _ in range(world)]
        self.running = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.said[rank],
                text=True,
            )
            for rank in range(world)
        ]

    def check(self, file: str, function: str, seconds: float) -> str:
        """Run a function on every rank; returns "", or the ranks' errors if one failed or ran out of time."""
        limit = Timer(seconds, self.end)
        limit.start()
        try:
            for process in self.running:
                process.stdin.write(f"{file}\t{function}\n")
                process.stdin.flush()
            answers = [process.stdout.readline() for process in self.running]
        except BrokenPipeError:
            answers = [""]
        finally:
            limit.cancel()
        if answers == ["done\n"] * len(self.running):
            return ""
        return "\n".join([f"a rank failed, or did not answer in {seconds:g} s", *map(self._last_words, self.said)])

    def _last_words(self, said: IO[str]) -> str:
        said.seek(0)
        return said.read()[-3000:]

    def leave(self) -> None:
        for process in self.running:
            process.stdin.close()
        for process in self.running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                self.end()

    def end(self) -> None:
        for process in self.running:
            process.kill()


_waiting: dict[int, Ranks] = {}


def run(file: str, function: str, kind: str = "cpu", world: int | None = None, *, timeout: float = 600) -> None:
    """Run `function` of the module `file` on every rank; kind: the device type, gloo for "cpu", "": the accelerator."""
    kind = kind or accelerator()
    world = world or (2 if kind == "cpu" else accelerators())
    ranks = _waiting.pop(world, None) if kind == "cpu" else None
    if ranks is None:
        ranks = Ranks(kind, world)
        atexit.register(ranks.end)
    if failed := ranks.check(file, function, timeout):
        ranks.end()  # a process group does not outlive one of its ranks
        raise AssertionError(failed)
    if kind == "cpu":
        _waiting[world] = ranks
    else:
        ranks.leave()


everywhere = pytest.mark.parametrize(
    "kind", [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("", marks=pytest.mark.multigpu, id="gpus")]
)
"""Runs a test with the argument `kind` on the CPU and on GPUs."""


class Calls(Observer):
    """The names of the operators that ran."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def operator(self, proceed: Any, call: Any, args: tuple) -> Any:
        self.names.append(call.__name__)
        return proceed(call, args)


def accelerators() -> int:
    """The number of ranks of a test on accelerators: two or four."""
    return 4 if torch.accelerator.device_count() >= 4 else 2


def accelerator() -> str:
    return torch.accelerator.current_accelerator().type


def main(kind: str, address: str, world: str, rank: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, int(rank))
    if kind != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = "gloo" if kind == "cpu" else None
    dist.init_process_group(backend, init_method=address, rank=int(rank), world_size=int(world))
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        file, function = line.rstrip("\n").split("\t")
        spec = importlib.util.spec_from_file_location("checks", file)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            getattr(module, function)(int(rank), device)
            dist.barrier()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # an orderly goodbye would wait for the other ranks
        answers.write("done\n")
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
