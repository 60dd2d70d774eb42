#!/usr/bin/env bash
# Mixtures of experts end to end: 4 layers, 2 x 4096 tokens: Hugging Face (grouped_mm), liger_hw, and Liger if installed.
#
#     bash benchmarks/experts.sh OUT          about 3 minutes on one H200; OUT gets one JSON and one log a model
#
# First the tests that need a device: experts in bf16 against fp64, families in fp32, and with two or more GPUs expert
# parallelism. Liger tunes its own kernels in its first step, for minutes; it comes last, and LIGER=0 leaves it out.
# LAYERS, SEQ, STEPS and MORE (further arguments of `end_to_end.py`) make it small enough for a try on a CPU.
set -u
out=$(realpath -m "${1:?usage: experts.sh OUT}"); mkdir -p "$out"
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
python=${PYTHON:-python3}

tests() { "$python" -W ignore -m pytest -q -p no:cacheprovider "$@" 2>&1 | tail -15; }
train() { # name, arguments
    "$python" -W ignore benchmarks/end_to_end.py --layers "${LAYERS:-4}" --batch 2 --seq "${SEQ:-4096}" --steps "${STEPS:-10}" \
        --json "$out/$1.json" "${@:2}" ${MORE:-} > "$out/$1.log" 2>&1
    echo "-- $1: status $?"; tail -n 8 "$out/$1.log"
}

tests -m gpu tests/transformers/test_experts.py
tests -m gpu tests/transformers/test_families.py -k "device and (mixtral or deepseek_v3 or gpt_oss)"
tests -m multigpu tests/distributed/test_expert_parallel.py
for model in qwen3_moe mixtral gpt_oss; do train "$model" --model "$model" --arms hf,liger_hw; done
if [ "${LIGER:-1}" = 1 ]; then train qwen3_moe-liger --model qwen3_moe --arms liger --steps 6; fi
