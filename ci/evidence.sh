#!/usr/bin/env bash
# What docs/support.md rests on, made again on this machine, then the page. Needs no GPU; run it when kernels have changed.
#
#     PYTHON=.venv/bin/python bash ci/evidence.sh        or: make evidence
#     TRITONS="3.6.0 3.9.0" bash ci/evidence.sh          compiled by these releases too (each laid over the environment)
#     STEPS="tables compile" bash ci/evidence.sh         some of: tables compile interpret
#
# Only what changed takes time: stale entries of the static tables are held against the heuristic again, and of the ops only
# those whose source changed are compiled and interpreted.
# DEPTH (quick; full: every workload and option set, hours on two cores) and TARGETS (all): what is compiled.
# CASES: further words of pytest's -k for what is interpreted, such as "default": the default options of each op alone.
# TRITON_AT (.venv): the folder of the other releases' folders triton-VERSION. WORKERS: processes (default: cores).
# shellcheck disable=SC2329  # the steps are called by name
set -euo pipefail
[ $# -eq 0 ] || { echo "$0: takes no words, only variables: see its head" >&2; exit 2; }
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
workers=${WORKERS:-$(nproc 2> /dev/null || echo 2)}
at=${TRITON_AT:-.venv}
kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT
LIGER_HW_CACHE_DIR=$kept/cache
export LIGER_HW_CACHE_DIR OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

tables() {
    "$python" benchmarks/static_tables.py --recheck --workers "$workers" || failed=1
}

# compiled [VERSION]: a kernel that fails is in the evidence, so the run goes on
compiled() {
    local version=${1:-} path=$PYTHONPATH depth=${DEPTH:-quick} ops
    if [ -n "$version" ]; then
        [ -d "$at/triton-$version" ] || "$python" -m pip install --quiet --no-deps --target "$at/triton-$version" "triton==$version"
        path=$(cd "$at" && pwd)/triton-$version:$path
    else
        version=$("$python" -c 'import triton; print(triton.__version__)')
    fi
    ops=$(PYTHONPATH=$path "$python" ci/support.py --stale "$version" "$depth" "${TARGETS:-all}")
    [ -n "$ops" ] || { echo "Triton $version has compiled every op as it is"; return 0; }
    PYTHONPATH=$path "$python" ci/certificates.py "$kept/$version" --depth "$depth" --targets "${TARGETS:-all}" --ops "$ops" \
        --workers "$workers" || failed=1
    "$python" ci/support.py compiled "$kept/$version"/compiled-*.json
}

interpreted() {
    local ops
    ops=$("$python" ci/support.py --stale)
    [ -n "$ops" ] || { echo "every op was interpreted as it is"; return 0; }
    echo "interpreting: $ops"
    TRITON_INTERPRET=1 "$python" -m pytest -m interpret -q -n "$workers" tests/kernels/test_conformance.py -k "($ops)${CASES:+ and ($CASES)}" \
        -o junit_family=xunit1 --junitxml "$kept/interpreted.xml" || failed=1
    "$python" ci/support.py interpreted "$kept/interpreted.xml"
}

timed() {
    echo "== $*"
    local started=$SECONDS
    "$@"
    echo "== $* took $((SECONDS - started)) s"
}

steps=${STEPS:-tables compile interpret}
for step in $steps; do
    case $step in
        tables | compile | interpret) ;;
        *) echo "ci/evidence.sh: unknown step '$step'; known: tables compile interpret" >&2; exit 2 ;;
    esac
done
for step in $steps; do
    case $step in
        tables) timed tables ;;
        compile)
            timed compiled
            for version in ${TRITONS:-}; do timed compiled "$version"; done
            ;;
        interpret) timed interpreted ;;
    esac
done
"$python" ci/support.py
[ "$failed" -eq 0 ] || echo "something failed; docs/support.md says what" >&2
exit "$failed"
