#!/usr/bin/env bash
# The examples on GPUs, two at a time, then FSDP2 on both (about 110 s on H200s):  bash benchmarks/examples.sh 0,1 OUT [COMMIT]
# OUT/example-NAME.json is written by each that ends, OUT/examples-h200.json joins them; one that fails leaves its log. Where
# trl or lightning are missing (ci/trl.txt), theirs are left out. LIMIT (120): seconds for all.
set -u
cd "$(dirname "$0")/.." || exit 1
IFS=, read -ra GPUS <<< "$1"
OUT=$2 COMMIT=${3:-unknown} LIMIT=${LIMIT:-120} STARTED=$SECONDS PYTHON=${PYTHON:-python3}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore OMP_NUM_THREADS=4
read -ra SIZES <<< "${SIZES:---hidden 2048 --layers 8 --seq 2048 --batch 8 --vocab 32768 --lr 3e-5 --steps 16 --rounds 2}"

# one GPUS NAME OPTION...
one() {
    local gpus=$1 name=$2 began=$SECONDS start=() rc
    shift 2
    [ "$name" = fsdp2 ] && start=(-m torch.distributed.run --standalone --nproc-per-node "${#GPUS[@]}")
    CUDA_VISIBLE_DEVICES=$gpus timeout $((LIMIT - SECONDS + STARTED)) "$PYTHON" "${start[@]}" "examples/$name.py" "${SIZES[@]}" "$@" \
        --json "$OUT/example-$name.json" > "$OUT/example-$name.log" 2>&1
    rc=$?
    echo "$name: rc $rc in $((SECONDS - began)) s"
    tail -n 4 "$OUT/example-$name.log" | cut -c1-160
}
has() { "$PYTHON" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))" "$@"; }

(
    one "${GPUS[0]}" trainer_sft
    if has lightning; then one "${GPUS[0]}" lightning_sft; else echo "lightning_sft: lightning is missing"; fi
) &
(
    one "${GPUS[-1]}" medusa
    if has trl datasets; then one "${GPUS[-1]}" trl_dpo --batch 4 --seq 1024; else echo "trl_dpo: trl or datasets is missing"; fi
) &
wait
if [ ${#GPUS[@]} -gt 1 ]; then one "$1" fsdp2; else echo "fsdp2: needs two GPUs"; fi
"$PYTHON" - "$OUT" "$COMMIT" << 'EOF'
import json, sys
from pathlib import Path
out, commit = Path(sys.argv[1]), sys.argv[2]
found = [json.loads(path.read_text()) for path in sorted(out.glob("example-*.json"))]
(out / "examples-h200.json").write_text(json.dumps({"commit": commit, "examples": found}, indent=1) + "\n")
print(len(found), "of 5 examples, in", out / "examples-h200.json")
EOF
