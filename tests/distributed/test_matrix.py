"""Every engine people train with: the same losses and gradients as plain torch, and the kernels still on.

One test is one launch of engines.py: two gloo ranks on the CPU, or (marker multigpu) NCCL on the GPUs of this machine.
Lane `distributed` (ci/distributed.sh) installs what the engines need and runs all of them; where $MATRIX names a
folder, each cell's record is left there for docs/distributed.md (ci/distributed_page.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from liger_hw import compat

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("engines.py")
STEPS, LAYERS = 2, 2
CALLS = {"rms_norm_fwd": STEPS * (2 * LAYERS + 1), "swiglu_fwd": STEPS * LAYERS, "rope": STEPS * 2 * LAYERS}
"""Calls by each rank of the operators that every engine must reach; rope's backward is the same operator."""
FUSED = {"fused_linear_cross_entropy_fwd": STEPS}
SLICED = {"fused_linear_cross_entropy_tp_fwd": STEPS}
NEEDS = {"zero": ("deepspeed",), "trainer_zero3": ("deepspeed",), "accelerate": ("accelerate",)}
NEEDS |= {"tp_transformers": ("accelerate",), "trainer": ("accelerate",)}

ENGINES = {
    "ddp": {},
    "fsdp1_flat": {"adapters": "full"},  # FSDP1 itself refuses frozen and trained parameters in one flat one
    "fsdp1_flat_patched_after": {"adapters": "full"},
    "fsdp1_original_patched_after": {},
    "fsdp2_head_alone": {},
    "fsdp2_group": {},
    "fsdp2_group_patched_after": {},
    "hsdp": {"ranks": 4},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "zero3_init": {},
    "tp_torch": {"adapters": "full", "head": SLICED},
    "tp_transformers": {"adapters": "full", "head": SLICED},
    "accelerate_fsdp2": {},
    "trainer_ddp": {},
    "trainer_fsdp2": {"devices": ("cuda",)},  # accelerate, and so Trainer, shards on accelerators alone
    "trainer_zero3": {},
    "pipeline": {"adapters": "full", "share": 0.5},  # each rank has a half of the layers
}
WITH_EXPERTS = ("fsdp1_flat_patched_after", "fsdp2_group", "zero3", "zero3_init")
DAILY = ("fsdp2_group",)
"""What `make test` runs of it: the arrangement that Trainer, accelerate and transformers make."""


def launch(engine: str, device: str, ranks: int, adapters: str, folder: Path) -> list[dict]:
    """One record of engines.py for each adapter."""
    for prefix, packages in NEEDS.items():
        for package in packages if engine.startswith(prefix) else ():
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"needs {package}: bash ci/distributed.sh installs it")
    out = folder / "out.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(compat.PATH), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "LIGER_HW_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "LIGER_HW_CPU_REFERENCE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(WORKER), engine, str(out), "--device", device, "--adapters", adapters]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert out.exists(), done.stderr[-3000:]
    records = json.loads(out.read_text())
    for record in records:
        if folder_of_records := os.environ.get("MATRIX"):
            path = Path(folder_of_records) / f"{device}-{engine}-{record['adapter']}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"device": device, **record}, indent=1) + "\n")
        assert "failed" not in record, f"{record['failed']}\n{done.stderr[-3000:]}"
    return records


def _parameters():
    for engine in (name for name, said in ENGINES.items() if "cpu" in said.get("devices", ("cpu",))):
        marks = [pytest.mark.cpu] if engine in DAILY else [pytest.mark.cpu, pytest.mark.full]
        yield pytest.param(engine, "cpu", marks=marks, id=engine)
    for engine in ENGINES:
        yield pytest.param(engine, "cuda", marks=pytest.mark.multigpu, id=f"{engine}-cuda")


@pytest.mark.parametrize("engine, device", list(_parameters()))
def test_same_losses_and_gradients_by_our_kernels(engine, device, tmp_path):
    said = ENGINES[engine]
    ranks = said.get("ranks", 2) if device == "cpu" else 2
    for record in launch(engine, device, ranks, said.get("adapters", "full,lora"), tmp_path):
        assert not wrong(record), record


def wrong(record: dict) -> dict[str, str]:
    """What of one cell's record is not as it must be: of loss, gradient and kernels, each with what was found."""
    limits = {"loss": 1e-5, "gradient": 1e-3}
    found = {
        name: str(record[f"{name}_error"]) for name, limit in limits.items() if not record[f"{name}_error"] < limit
    }
    engine, said, kernels = record["engine"], ENGINES[record["engine"]], record["kernels"]
    if record["adapter"] == "experts":
        wanted = {name: 2 * STEPS * LAYERS for name in ("fused_moe_fwd", "fused_moe_bwd")}
    else:
        head = {} if engine == "pipeline" else said.get("head", FUSED)
        share = record["ranks"] * said.get("share", 1)
        wanted = {name: share * count for name, count in {**CALLS, **head}.items()}
    for name, count in wanted.items():
        # A pipeline runs each stage once more, to learn the shapes, and the norm and the head are its last rank's.
        if not (kernels.get(name, 0) == count or engine == "pipeline" and kernels.get(name, 0) > count):
            found["kernels"] = f"{name} ran {kernels.get(name, 0)} times, not {count}"
    return found


@pytest.mark.cpu
@pytest.mark.full
@pytest.mark.parametrize("engine", WITH_EXPERTS)
def test_experts_whose_weights_are_sharded(engine, tmp_path):
    (record,) = launch(engine, "cpu", 2, "experts", tmp_path)
    assert not wrong(record), record
