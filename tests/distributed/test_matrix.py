"""Every engine trains with the kernels, with the losses and gradients of plain torch.

On the CPU, a test launches engines.py with two gloo ranks. On two or four GPUs (marker multigpu), one launch runs all
engines over NCCL, in float32 or in bfloat16. ci/distributed.sh installs what the engines need and runs them on the CPU.
Records of cells are left in the folder $MATRIX for docs/distributed-matrix.md (ci/distributed_page.py).
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
"""Each rank's calls of operators that every engine must reach; rope's backward is the same operator."""
RECOMPUTED = {"rms_norm_fwd": STEPS * 2, "swiglu_fwd": STEPS}
"""Each rank's additional calls that compute the last layer's activations again in backward."""
GATES = {"swiglu_fwd": STEPS}
"""The same if the norms' weights are freed after each forward. ZeRO-3 does that in its first step with weights that it
leaves whole later, as those of the norms in `trainer_zero3`."""
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
    "zero3": {"recomputed": GATES},
    "zero3_init": {"recomputed": GATES},
    "tp_torch": {"adapters": "full", "head": SLICED, "recomputed": {}},
    "tp_transformers": {"adapters": "full", "head": SLICED, "recomputed": {}},
    "accelerate_fsdp2": {},
    "trainer_ddp": {},
    "trainer_fsdp2": {"devices": ("cuda",)},  # accelerate, and so Trainer, shards on accelerators alone
    "trainer_zero3": {"recomputed": {**RECOMPUTED, "rms_norm_fwd": (STEPS - 1) * 2}},
    "pipeline": {"adapters": "full", "share": 0.5, "most": 2},  # two ranks, each with a half of the layers
}
OBJECTIVES = ("dpo", "grpo")
WITH_OBJECTIVES = {
    "ddp": "chunked_loss",
    "fsdp2_group": "chunked_loss",
    "zero3": "chunked_loss",
    "tp_torch": "fused_linear_log_probs_fwd|fused_linear_log_probs_keep",
}
"""Engines that also run with the losses of objectives.py -> operators, one of which the loss calls."""
WITH_RECOMPUTING = (
    *("ddp", "fsdp1_flat", "fsdp1_original_patched_after", "fsdp2_group", "accelerate_fsdp2", "zero2", "zero3"),
    *("zero3_init", "tp_torch", "tp_transformers", "trainer_ddp", "trainer_zero3", "pipeline"),
)
"""Engines that also run with activations="full", which computes the first of two layers twice."""
WITH_EXPERTS = ("fsdp1_flat_patched_after", "fsdp2_group", "zero3", "zero3_init")
DAILY = ("fsdp2_group",)
"""The engines that `make test` runs: what Trainer, accelerate and transformers set up."""


def missing(engine: str) -> list[str]:
    """The packages that an engine needs and that are not installed."""
    needed = {package for prefix, packages in NEEDS.items() if engine.startswith(prefix) for package in packages}
    return sorted(package for package in needed if importlib.util.find_spec(package) is None)


def launch(
    cells: list[str], device: str, ranks: int, folder: Path, compute: str = "float32", seconds: int = 800
) -> list[dict]:
    """The records of engines.py. A cell that hangs ends the launch; it and later cells have no record."""
    out = folder / f"{compute}.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(compat.PATH), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "LIGER_HW_CACHE_DIR": str(folder / "cache"),
        "LIGER_HW_SHADOW_LIGER": "1",  # Trainer asks for liger-kernel, and may find both
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "LIGER_HW_CPU_REFERENCE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(WORKER), ",".join(cells), str(out), "--device", device, "--compute", compute]
    with open(out.with_suffix(".log"), "w") as log:
        try:
            subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=seconds)
        except subprocess.TimeoutExpired:
            log.write(f"not done after {seconds} s")
    assert out.exists(), out.with_suffix(".log").read_text()[-3000:]
    records = json.loads(out.read_text())
    for record in records:
        if folder_of_records := os.environ.get("MATRIX"):
            name = f"{device}-{record['engine']}-{record['adapter']}" + (f"-{compute}" if compute != "float32" else "")
            path = Path(folder_of_records) / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"device": device, **record}, indent=1) + "\n")
    return records


def cells_of(engine: str) -> list[str]:
    """engine:adapter of an engine's cells with cross entropy."""
    return [f"{engine}:{adapter}" for adapter in ENGINES[engine].get("adapters", "full,lora").split(",")]


def objectives_of(engine: str) -> list[str]:
    """engine:objective and engine:objective-lora of an engine's cells with other losses."""
    cells = cells_of(engine) if engine in WITH_OBJECTIVES else []
    named = [cell.replace(":", f":{objective}-") for objective in OBJECTIVES for cell in cells]
    return [cell.removesuffix("-full") for cell in named]


def more_cells_of(engine: str) -> list[str]:
    """The engine's other cells."""
    recomputed = [f"{engine}:recomputed"] * (engine in WITH_RECOMPUTING)
    return objectives_of(engine) + recomputed + [f"{engine}:experts"] * (engine in WITH_EXPERTS)


def check(records: list[dict], cells: list[str], folder: Path) -> None:
    """Each of the cells has a record without errors."""
    found = {f"{record['engine']}:{record['adapter']}": record for record in records}
    for cell in cells:
        log = "\n".join(path.read_text()[-3000:] for path in folder.rglob("*.log"))
        assert cell in found, f"{cell} was not reached\n{log}"
        assert "failed" not in found[cell], f"{found[cell]['failed']}\n{log}"
        assert not wrong(found[cell]), found[cell]


def need(engine: str) -> None:
    if packages := missing(engine):
        pytest.skip(f"needs {', '.join(packages)}: bash ci/distributed.sh installs it")


def _on_cpu():
    for engine in (name for name, said in ENGINES.items() if "cpu" in said.get("devices", ("cpu",))):
        yield pytest.param(engine, marks=[] if engine in DAILY else [pytest.mark.full], id=engine)


@pytest.mark.cpu
@pytest.mark.parametrize("engine", list(_on_cpu()))
def test_same_losses_and_gradients_by_our_kernels(engine, tmp_path):
    need(engine)
    cells = cells_of(engine)
    check(launch(cells, "cpu", ENGINES[engine].get("ranks", 2), tmp_path), cells, tmp_path)


@pytest.mark.cpu
@pytest.mark.full
@pytest.mark.parametrize(
    "engine, cell",
    [(engine, "experts") for engine in WITH_EXPERTS] + [(engine, "recomputed") for engine in WITH_RECOMPUTING],
)
def test_sharded_experts_and_layers_that_are_recomputed(engine, cell, tmp_path):
    need(engine)
    cells = [f"{engine}:{cell}"]
    check(launch(cells, "cpu", 2, tmp_path), cells, tmp_path)


@pytest.mark.cpu
@pytest.mark.full
@pytest.mark.parametrize("engine", WITH_OBJECTIVES)
def test_preference_and_policy_losses(engine, tmp_path):
    need(engine)
    cells = objectives_of(engine)
    check(launch(cells, "cpu", 2, tmp_path), cells, tmp_path)


def on_gpus(engine: str, compute: str) -> list[str]:
    """The engine's cells on GPUs: in bfloat16 only the whole model."""
    if compute == "bfloat16":
        return [f"{engine}:full"]
    return cells_of(engine) + more_cells_of(engine)


@pytest.fixture(scope="module", params=("float32", "bfloat16"))
def matrix(request, tmp_path_factory):
    """(the records of all engines that this machine can run, the dtype, the folder with logs)"""
    from ranks import accelerators  # ci/distributed_page.py imports this file, and knows no `ranks`

    folder = tmp_path_factory.mktemp("matrix")
    cells = [cell for engine in ENGINES if not missing(engine) for cell in on_gpus(engine, request.param)]
    by_ranks: dict[int, list[str]] = {}
    for cell in cells:
        ranks = min(accelerators(), ENGINES[cell.partition(":")[0]].get("most", 4))
        by_ranks.setdefault(ranks, []).append(cell)
    records = []
    for ranks, some in by_ranks.items():
        (folder / str(ranks)).mkdir()
        records += launch(some, "cuda", ranks, folder / str(ranks), request.param, seconds=240)
    return records, request.param, folder


@pytest.mark.multigpu
@pytest.mark.parametrize("engine", ENGINES)
def test_on_gpus(matrix, engine):
    need(engine)
    records, compute, folder = matrix
    check(records, on_gpus(engine, compute), folder)


def wrong(record: dict) -> dict[str, str]:
    """loss, gradient or kernels -> what is wrong with it in a cell's record.

    In bfloat16, gradients may be 1.5 times as far from float32's as the unpatched engine's, whose error must be one of
    bfloat16, and the loss one rounding.
    """
    limits = {"loss": 1e-5, "gradient": 1e-3}
    if record["compute"] == "bfloat16":
        own = record["unpatched"]["gradient_error"]
        if not 1e-4 < own < 0.1:
            return {"gradient": f"the unpatched engine's is {own}, which is not bfloat16's"}
        limits = {"loss": 2**-8, "gradient": 1.5 * own}
    found = {
        name: str(record[f"{name}_error"]) for name, limit in limits.items() if not record[f"{name}_error"] < limit
    }
    engine, said, kernels = record["engine"], ENGINES[record["engine"]], record["kernels"]
    if record["adapter"] == "experts":
        wanted = {name: record["ranks"] * STEPS * LAYERS for name in ("fused_moe_fwd", "fused_moe_bwd")}
    else:
        head = {} if engine == "pipeline" else said.get("head", FUSED)
        if record["adapter"].startswith(OBJECTIVES):
            head = {WITH_OBJECTIVES[engine]: STEPS}
        share = record["ranks"] * said.get("share", 1)
        wanted = {name: share * count for name, count in {**CALLS, **head}.items()}
    again = record["adapter"] == "recomputed"
    if again:
        wanted["rms_norm_fwd"] += record["ranks"] * STEPS * 2
    # Records of before a patch had a level by default do not say what was computed again.
    if record["adapter"] == "full" and "recomputed" in record:
        saves = said.get("recomputed", RECOMPUTED)
        for name in RECOMPUTED:
            ran, count = record["recomputed"].get(name, 0), share * saves.get(name, 0)
            if not (ran == count or engine == "pipeline" and ran > count):
                found["kernels"] = f"{name} ran {ran} times again, not {count}"
    for name, count in wanted.items():
        # A pipeline runs each stage once more, to learn the shapes, and the norm and the head are its last rank's.
        ran = sum(kernels.get(one, 0) for one in name.split("|"))
        if not (ran == count or (engine == "pipeline" or again) and ran > count):
            found["kernels"] = f"{name} ran {ran} times, not {count}"
    return found
