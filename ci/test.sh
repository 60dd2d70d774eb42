#!/usr/bin/env bash
# Run test lanes, each in a pytest process of its own:  bash ci/test.sh [full] [LANE ...]
#     cpu interpret aot gpu multigpu   the tests of that marker
#     trl                              other people's trainers, with the trl of $TRL; ci/cpu.sh installs it
#     distributed                      tests/distributed with two gloo ranks; ci/distributed.sh installs the engines
#     transformers4                    the Hugging Face tests of lane cpu, with the transformers of ci/transformers4.txt; without
#                                      `full` those in which that release has code of its own
#     oldest                           every option of every op compiled for sm90 by the Triton of ci/oldest.txt
#     models                           every causal LM patched against unpatched; lines of figures in $OUT
#     fuzz                             tests/fuzz for FUZZ_SECONDS (1200) with FUZZ_SEED (drawn and printed)
#     check kernels                    `make check`: a quick set of lane cpu, and the default options of every op interpreted
# Without names: cpu transformers4 interpret aot oldest, which need no GPU. `full` before the names, or alone, runs those lanes
# with what is marked `full` (tests/conftest.py), which they leave out otherwise; lanes gpu, multigpu, trl and distributed run everything.
# Fails if any lane fails or runs no test; every lane is run all the same.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

python=${PYTHON:-python3}
workers=${PYTEST_WORKERS:-$(env -u OMP_NUM_THREADS nproc 2> /dev/null || echo 2)} # nproc answers OMP_NUM_THREADS if set
chosen=" and not full"
[ "${1:-}" != full ] || { chosen="" && shift; }
lanes=("$@")
[ ${#lanes[@]} -gt 0 ] || lanes=(cpu transformers4 interpret aot oldest)
failed=()
# Lane check: the structure of the package, the engine, the references, what recognises a model, the tuner's store.
check=(
    tests/test_structure.py tests/test_registry.py tests/test_imports.py tests/test_settings.py tests/runtime tests/backends
    tests/kernels/test_references.py tests/kernels/test_numerics.py tests/chunked_loss/test_numbers.py
    tests/autotune/test_store.py tests/autotune/test_layers.py tests/transformers/test_probing.py tests/ci
)
# What does the same under every transformers: logits and losses, switches of ours, layers of torch's.
alike=(
    caller_thread.py default_activations.py deferred_logits.py float8.py logits_sweep.py mixers.py output_logits.py
    patch_compile.py shift_labels.py switches.py
)
kernels=(tests/kernels/test_numerics.py -k "test_options and default")

# One thread a test process: the tests are small and the workers already fill the cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile the package again

# Lane gpu: one process, since processes share the device's memory. With PYTEST_WORKERS that many, and after them one
# for the tests that take much memory (mark `memory`).
on_gpu() {
    [ "${PYTEST_WORKERS:-1}" != 1 ] || { "$python" -m pytest -q -m gpu; return; }
    "$python" -m pytest -q -n "$PYTEST_WORKERS" -m "gpu and not memory"
    local outcome=$?
    "$python" -m pytest -q -m "gpu and memory" && return "$outcome"
}

for lane in "${lanes[@]}"; do
    command=("$python" -m pytest -q -n "$workers" --dist worksteal) # a file's tests in one process, but for the last ones
    case $lane in
        transformers4)
            overlay=$(realpath -m "$(dirname "$(dirname "$python")")")/transformers4
            [ -d "$overlay" ] || { echo "ci/test.sh: lane transformers4 needs $overlay; run make install" >&2; exit 2; }
            command=(env PYTHONPATH="$overlay${PYTHONPATH:+:$PYTHONPATH}" "${command[@]}" -m "cpu$chosen" tests/transformers tests/bench/test_demo.py)
            [ -z "$chosen" ] || command+=("${alike[@]/#/--ignore=tests/transformers/test_}")
            ;;
        trl)
            overlay=$(realpath -m "$(dirname "$(dirname "$python")")")/trl-${TRL:-}
            [ -d "$overlay" ] || { echo "ci/test.sh: lane trl needs $overlay; run TRL=1.16.0 bash ci/cpu.sh" >&2; exit 2; }
            command=(env PYTHONPATH="$overlay${PYTHONPATH:+:$PYTHONPATH}" "${command[@]}" -m cpu tests/compat tests/hub tests/examples tests/chunked_loss/test_trl.py)
            ;;
        distributed)
            overlay=$(realpath -m "$(dirname "$(dirname "$python")")")/distributed
            [ -d "$overlay" ] || { echo "ci/test.sh: lane distributed needs $overlay; run bash ci/distributed.sh" >&2; exit 2; }
            command=(env PYTHONPATH="$overlay${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pytest -q -m cpu tests/distributed) # a test is two processes
            ;;
        oldest)
            overlay=$(realpath -m "$(dirname "$(dirname "$python")")")/oldest
            [ -d "$overlay" ] || { echo "ci/test.sh: lane oldest needs $overlay; run make install" >&2; exit 2; }
            command=(env PYTHONPATH="$overlay${PYTHONPATH:+:$PYTHONPATH}" "${command[@]}" -m aot tests/aot/test_aot.py -k "test_every_option_compiles and sm90")
            ;;
        cpu | aot) command+=(-m "$lane$chosen") ;;
        interpret) command=(env TRITON_INTERPRET=1 "${command[@]}" -m "$lane$chosen") ;;
        kernels) command=(env TRITON_INTERPRET=1 "${command[@]}" -m "interpret and not full" "${kernels[@]}") ;;
        check) command+=(-m "cpu and not full" "${check[@]}") ;;
        models) command+=(-m cpu tests/transformers/test_every_model_sweep.py) ;;
        fuzz)
            command=("$python" -m tests.fuzz --seconds "${FUZZ_SECONDS:-1200}" ${FUZZ_SEED:+--seed "$FUZZ_SEED"})
            [ -z "${OUT:-}" ] || { mkdir -p "$OUT" && command+=(--json "$OUT/fuzz.json"); }
            ;;
        gpu) command=(on_gpu) ;;
        multigpu) command=("$python" -m pytest -q -m multigpu) ;;
        *) echo "ci/test.sh: unknown lane '$lane'; known: check kernels cpu transformers4 distributed trl interpret aot oldest models fuzz gpu multigpu" >&2; exit 2 ;;
    esac
    echo "== lane $lane"
    started=$SECONDS
    "${command[@]}" || failed+=("$lane")
    echo "== lane $lane took $((SECONDS - started)) s"
done

if [ ${#failed[@]} -gt 0 ]; then
    echo "FAILED lanes: ${failed[*]}"
    exit 1
fi
echo "all lanes passed: ${lanes[*]}"
