#!/usr/bin/env bash
# What issue 22 asks for on GPUs of one host:  bash benchmarks/distributed.sh OUT [GPUS]
# First the matrix of tests/distributed over NCCL (float32, then bfloat16 against the engine's own error), one start for
# all engines; then Trainer on Llama-3-8B with Hugging Face, Liger and ours, by FSDP2. About six minutes on two H200s.
# NOT RUN YET: no GPU was lent. Needs deepspeed (ci/distributed.txt) for the zero engines and liger-kernel for its arm.
# WHAT=matrix or training does one half; ENGINES=fsdp2,zero3 LAYERS BATCH SEQ STEPS change the training.
# Then: python ci/distributed_page.py collect OUT/matrix $(git rev-parse HEAD)
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(realpath "$1") gpus=${2:-2} python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=4 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export NCCL_NVLS_ENABLE=0  # multicast is not there on every lent host

engines=ddp,fsdp1_flat,fsdp1_original_patched_after,fsdp2_head_alone,fsdp2_group,hsdp,accelerate_fsdp2,trainer_fsdp2
engines+=,pipeline,tp_torch,tp_transformers,zero2,zero3,zero3_init,trainer_zero3

matrix() { # NAME SECONDS ENGINES [options of engines.py]; a run that is cut keeps the cells that it has
    PYTHONPATH=$PWD:$PWD/liger_hw/compat/path:$PYTHONPATH timeout "$2" "$python" -m torch.distributed.run --standalone \
        --nproc-per-node "$gpus" tests/distributed/engines.py "$3" "$out/$1.json" --device cuda "${@:4}" \
        >"$out/$1.log" 2>&1 || echo "$1: ended with status $?, see $out/$1.log"
}

if [[ ${WHAT:-matrix training} == *matrix* ]]; then
    matrix float32 200 "$engines" --adapters full
    matrix bfloat16 100 fsdp2_group,trainer_fsdp2,zero3 --adapters full,lora --compute bfloat16
    "$python" - "$out" <<'PYTHON'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
(out / "matrix").mkdir(exist_ok=True)
for compute in ("float32", "bfloat16"):
    path = out / f"{compute}.json"
    for record in json.loads(path.read_text()) if path.exists() else ():
        kept = {"device": "cuda", **record}
        if compute == "float32":  # the page's limits are float32's
            name = f"cuda-{record['engine']}-{record['adapter']}.json"
            (out / "matrix" / name).write_text(json.dumps(kept, indent=1) + "\n")
        print(compute, json.dumps({k: v for k, v in kept.items() if k not in ("device", "compute", "gradient")}))
PYTHON
fi
if [[ ${WHAT:-matrix training} == *training* ]]; then
    "$python" benchmarks/distributed_training.py --gpus "$gpus" --engine "${ENGINES:-fsdp2}" --layers "${LAYERS:-32}" \
        --batch "${BATCH:-2}" --seq "${SEQ:-4096}" --steps "${STEPS:-6}" --seconds 120 --out "$out/training"
fi
