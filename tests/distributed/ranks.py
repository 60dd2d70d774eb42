"""Runs a function of a test module in several processes of one process group.

    run(__file__, "check_something", "cpu")     # check_something(rank, device), in two processes over gloo

The function asserts; a rank that fails fails the test with its traceback. Called as a script, this is one rank.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def run(file: str, function: str, kind: str = "cpu", world: int = 2, *, timeout: float = 200) -> None:
    """Run `function` of the module `file` on every rank; kind: the device type, gloo for "cpu"."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    paths = os.pathsep.join((str(ROOT), str(Path(file).parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, file, function, kind, address, str(world)]
    running = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0].decode()[-3000:] for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), "\n".join(outputs)


def accelerator() -> str:
    """The device type of the machine's accelerator."""
    return torch.accelerator.current_accelerator().type


def main(file: str, function: str, kind: str, address: str, world: str, rank: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, int(rank))
    if kind != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = "gloo" if kind == "cpu" else None
    dist.init_process_group(backend, init_method=address, rank=int(rank), world_size=int(world))
    spec = importlib.util.spec_from_file_location("checks", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, function)(int(rank), device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
