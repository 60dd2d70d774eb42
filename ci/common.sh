# shellcheck shell=bash
# Sourced by the lane scripts: the steps they are made of.
#
# PYTHON (python3), VENV (.venv), TORCH, INDEX: which Python, and which torch from which index, `make install` takes;
# unset, the pinned ones. TRITON: another version than the environment's, laid over it.
# OUT (ci-out): where JSON goes, for the runner to upload. DRY_RUN=1 prints the steps instead of doing them.
set -euo pipefail
[ $# -eq 0 ] || { echo "$0: takes no words, only variables: see ci/common.sh" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
OUT=${OUT:-ci-out}
BIN=$VENV/bin

step() {
    echo "+ $*"
    [ -n "${DRY_RUN:-}" ] || "$@"
}

# keep FILE COMMAND...: what the command prints, into OUT/FILE
keep() {
    local file=$OUT/$1
    shift
    echo "+ $* > $file"
    [ -n "${DRY_RUN:-}" ] || { mkdir -p "$OUT" && "$@" > "$file"; }
}

install() {
    step make install PYTHON="${PYTHON:-python3}" VENV="$VENV" \
        ${TORCH:+TORCH="torch==$TORCH"} ${INDEX:+TORCH_INDEX="$INDEX"}
    [ -n "${TRITON:-}" ] || return 0
    local over=$VENV/triton-$TRITON
    step "$BIN/python" -m pip --disable-pip-version-check install --quiet --no-deps --upgrade \
        --target "$over" "triton==$TRITON"
    export PYTHONPATH=$PWD/$over${PYTHONPATH:+:$PYTHONPATH}
}

lanes() {
    step env PYTHON="$BIN/python" bash ci/test.sh "$@"
}

# vendor NAME: everything a machine with that vendor's GPU is asked to show. BUDGET=0 leaves the tuning out; else its
# seconds (900), after which OUT/table.json is the table made there and OUT/bench-tuned.json what it gives.
vendor() {
    local tuned=cuda:0  # torch's name for ROCm's devices too
    [ "$1" != xpu ] || tuned=xpu:0
    install
    step "$BIN/liger-hw" info --require "$1"
    keep info.json "$BIN/liger-hw" info --json
    lanes gpu
    step "$BIN/liger-hw" autotune --device "$1" --dry-run
    keep bench.json "$BIN/liger-hw" bench --against torch,compile,liger --json
    keep host.json "$BIN/python" benchmarks/host_time.py --json -
    [ "${BUDGET:=900}" != 0 ] || return 0
    step "$BIN/liger-hw" autotune --device "$1" --budget "$BUDGET"
    keep table.json "$BIN/liger-hw" cache export --device "$tuned"  # not what else the machine's cache may hold
    keep bench-tuned.json "$BIN/liger-hw" bench --against torch,compile --json
}
