#!/usr/bin/env bash
# What issue 22 asks for on GPUs of one host:  bash benchmarks/distributed.sh OUT [GPUS]
# First tests/distributed over NCCL: the matrix in float32 and bfloat16, the head, DTensors, 200 steps of replicas; then
# the tensor-parallel head's times; then Trainer on Llama-3-8B with Hugging Face, Liger and ours, by FSDP2.
# Needs deepspeed (ci/distributed.txt) for the zero engines and liger-kernel for its arm; without them they are left out.
# WHAT=tests, head or training does a part; ENGINES=fsdp2,zero3 LAYERS BATCH SEQ STEPS change the training.
# Then: python ci/distributed_page.py collect OUT/matrix $(git rev-parse HEAD)
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(realpath "$1") gpus=${2:-2} python=${PYTHON:-python3} what=${WHAT:-tests head training}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=4 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export NCCL_NVLS_ENABLE=0  # multicast is not there on every lent host

if [[ $what == *tests* ]]; then # the matrix's two launches and the other tests at the same time: none of them is timed
    tests() { # NAME [options of pytest]
        MATRIX=$out/matrix "$python" -m pytest -q -p no:cacheprovider -m multigpu "${@:2}" >"$out/$1.log" 2>&1 ||
            echo "$1: ended with status $?, see $out/$1.log"
    }
    tests float32 tests/distributed/test_matrix.py -k float32 &
    tests bfloat16 tests/distributed/test_matrix.py -k bfloat16 &
    tests others tests/distributed --ignore tests/distributed/test_matrix.py &
    wait
    tail -n 3 "$out"/{float32,bfloat16,others}.log
fi
if [[ $what == *head* ]]; then
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" benchmarks/tensor_parallel_head.py \
        --out "$out/tensor-parallel-head.json" --profile "$out/profile"
fi
if [[ $what == *training* ]]; then
    "$python" benchmarks/distributed_training.py --gpus "$gpus" --engine "${ENGINES:-fsdp2}" --layers "${LAYERS:-32}" \
        --batch "${BATCH:-2}" --seq "${SEQ:-4096}" --steps "${STEPS:-6}" --seconds 120 --out "$out/training"
fi
