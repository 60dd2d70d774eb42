#!/usr/bin/env bash
# What only a GPU shows of docs/safety.md, on one GPU in about three minutes. NOT RUN ON A GPU YET: only `DRY=1` on a CPU was.
#   bash benchmarks/faults.sh OUT [SECONDS]        SECONDS: of the soak (110; 1440 for the 24 minutes of issue 23)
# All at once: 200 steps of a training loop with configurations that fail, against the same loop without them; the soak,
# sizes that change while host and device memory are watched; random sizes of every op against fp64, in seven processes;
# every kernel at odd sizes, then the same under compute-sanitizer (memcheck) where there is one.
# Leaves OUT/*.json and logs, and joins them into OUT/trust-<device>.json, which belongs in benchmarks/results/ and into
# the table of docs/safety.md. The exit status is 1 where something did not hold or gave no result.
#   PY=python3  LIMIT=seconds of wall time for all (SECONDS + 40)  WORKERS=7 processes of random sizes  DRY=1 a few steps on a CPU
set -uo pipefail
cd "$(dirname "$0")/.." || exit
OUT=$(realpath -m "${1:?OUT, the folder for results}") SOAK=${2:-110} PY=${PY:-python3} WORKERS=${WORKERS:-7}
LIMIT=${LIMIT:-$((SOAK + 40))}
mkdir -p "$OUT"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if [ -n "${DRY:-}" ]; then dry=(--dry); else dry=(); export FUZZ_DEVICE=cuda; fi
sanitizer=$(command -v compute-sanitizer || ls -d /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | head -1)

device() { timeout -k 5 "$LIMIT" "$PY" -m tests.fuzz.device "$1" "$OUT/$2.json" "${@:3}" ${dry[@]+"${dry[@]}"} > "$OUT/$2.log" 2>&1; }

device soak soak --seconds "$SOAK" &
device faults faults &
for w in $(seq "$WORKERS"); do
    timeout -k 5 "$LIMIT" "$PY" -m tests.fuzz --areas numerics --seconds $((LIMIT - 40)) --seed "10$w" \
        --json "$OUT/numbers-$w.json" > "$OUT/numbers-$w.log" 2>&1 &
done
for p in 0 1 2 3; do
    (
        device sweep "sweep-$p" --part "$p/4"
        [ -z "$sanitizer" ] || PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 $((LIMIT - SECONDS)) \
            "$sanitizer" --tool memcheck --error-exitcode 66 --print-limit 20 \
            "$PY" -m tests.fuzz.device sweep "$OUT/memcheck-$p.json" --part "$p/4" > "$OUT/memcheck-$p.log" 2>&1
        echo "$?" > "$OUT/memcheck-$p.status"
    ) &
done
wait

"$PY" - "$OUT" "$WORKERS" "${sanitizer:-}" << 'P'
import json, re, sys
from pathlib import Path

from tests.fuzz.__main__ import versions

out, workers, sanitizer = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
bad = []


def read(name):
    try:
        return json.loads((out / f"{name}.json").read_text())
    except (OSError, ValueError) as error:
        bad.append(name)
        print(name, "gave no result:", error)
        log = out / f"{name}.log"
        print(log.read_text()[-600:] if log.exists() else "")
        return None


joined = {**versions(), "sanitizer": sanitizer or "none on this machine"}
for name in ("faults", "soak"):
    joined[name] = found = read(name)
    if found:
        print(name, {key: value for key, value in found.items() if not isinstance(value, (list, dict))})
        bad += [] if found["held"] else [name]
areas = [found["areas"]["numerics"] for w in range(1, workers + 1) if (found := read(f"numbers-{w}"))]
findings = [finding for area in areas for finding in area["findings"]]
joined["numbers"] = {"attempts": sum(area["attempts"] for area in areas), "findings": findings}
print("numbers", joined["numbers"]["attempts"], "attempts,", len(findings), "findings")
bad += ["numbers"] * bool(findings)
for kind in ("sweep", "memcheck") if sanitizer else ("sweep",):
    parts = [found for p in range(4) if (found := read(f"{kind}-{p}"))]
    joined[kind] = {"cases": sum(part["cases"] for part in parts), "failed": [f for part in parts for f in part["failed"]]}
    if kind == "memcheck":
        logs = [(out / f"memcheck-{p}.log").read_text() for p in range(4)]
        joined[kind]["summaries"] = [line for log in logs for line in re.findall(r"ERROR SUMMARY: .*", log)]
        joined[kind]["status"] = [int((out / f"memcheck-{p}.status").read_text()) for p in range(4)]
    print(kind, {**joined[kind], "failed": joined[kind]["failed"][:3]})
    bad += [kind] * bool(joined[kind]["failed"] or any(joined[kind].get("status", ())))
target = out / f"trust-{re.sub(r'[^a-z0-9]+', '-', joined['device'].lower()).strip('-')}.json"
target.write_text(json.dumps(joined, indent=1) + "\n")
print(target, "did not hold: " + ", ".join(bad) if bad else "all held")
sys.exit(bool(bad))
P
