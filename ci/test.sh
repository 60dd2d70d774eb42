#!/usr/bin/env bash
# Run test lanes, each in a pytest process of its own:  bash ci/test.sh [LANE ...]
#     cpu interpret aot gpu multigpu   the tests of that marker
#     trl                              other people's trainers, with the trl of $TRL; ci/cpu.sh installs it
#     transformers4                    the Hugging Face tests of lane cpu, with the transformers of ci/transformers4.txt
# Without names: those that need no GPU. Fails if any lane fails or runs no test; every lane is run all the same.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

python=${PYTHON:-python3}
workers=${PYTEST_WORKERS:-$(nproc 2> /dev/null || echo 2)}
lanes=("$@")
[ ${#lanes[@]} -gt 0 ] || lanes=(cpu transformers4 interpret aot)
failed=()

# One thread a test process: the tests are small and the workers already fill the cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

for lane in "${lanes[@]}"; do
    command=("$python" -m pytest -m "$lane" -q)
    case $lane in
        transformers4)
            overlay=$(dirname "$(dirname "$python")")/transformers4
            [ -d "$overlay" ] || { echo "ci/test.sh: lane transformers4 needs $overlay; run make install" >&2; exit 2; }
            command=(env PYTHONPATH="$overlay" "$python" -m pytest -m cpu -q -n "$workers" tests/transformers tests/cli)
            ;;
        trl)
            overlay=$(dirname "$(dirname "$python")")/trl-${TRL:-}
            [ -d "$overlay" ] || { echo "ci/test.sh: lane trl needs $overlay; run TRL=1.16.0 bash ci/cpu.sh" >&2; exit 2; }
            command=(env PYTHONPATH="$overlay" "$python" -m pytest -m cpu -q -n "$workers" tests/compat tests/examples tests/chunked_loss/test_trl.py)
            ;;
        cpu | aot) command+=(-n "$workers") ;;
        interpret) command=(env TRITON_INTERPRET=1 "${command[@]}" -n "$workers") ;;
        gpu | multigpu) ;; # one process: tests share the device, not memory
        *) echo "ci/test.sh: unknown lane '$lane'; known: cpu transformers4 trl interpret aot gpu multigpu" >&2; exit 2 ;;
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
