"""A mixture of experts over two processes has the losses and gradients of one; two_ranks.py is what each runs."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
known = inspect.signature(pytest.importorskip("transformers.distributed").DistributedConfig).parameters
if "base_model_ep_plan" not in vars(transformers.PretrainedConfig) or not {"ep_size", "tp_size"} & known.keys():
    pytest.skip(
        f"transformers {transformers.__version__} spreads no experts by DistributedConfig", allow_module_level=True
    )
HERE = Path(__file__).parent


def run_two_ranks(folder: Path, kind: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), *sys.path]))}
    environment |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    running = []
    for rank in range(2):
        command = [sys.executable, "-W", "ignore", str(HERE / "two_ranks.py"), str(rank), port, str(folder), kind]
        running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    said = []
    try:
        for process in running:
            out, errors = process.communicate()
            assert process.returncode == 0, errors[-3000:]
            said.append(out)
    finally:
        for process in running:
            process.kill()
    return said


@pytest.mark.cpu
@pytest.mark.full  # test_experts.py has slots of other ranks' experts, in one process
def test_two_processes(tmp_path):
    for said in run_two_ranks(tmp_path, "cpu"):
        names = [line.rpartition(" rows ")[0] for line in said.splitlines()]
        more = ["own batches", "an empty rank"] if "ep_size" in known else []
        assert names == ["shared", "shared, classes", "columns", *more, "fsdp2"]


@pytest.mark.multigpu
def test_two_devices(tmp_path):
    for said in run_two_ranks(tmp_path, torch.accelerator.current_accelerator().type):
        assert len(said.splitlines()) >= 4, said
