#!/usr/bin/env bash
# What only a GPU shows of docs/safety.md, on one GPU with 16 cores in less than three minutes.
#   bash benchmarks/faults.sh OUT
#   ONLY=soak SOAK=1440 bash benchmarks/faults.sh OUT      the soak alone, for 24 minutes
# All at once: 200 steps of a training loop with configurations that fail and memory that runs out, against the same loop
# without; a tuner whose worker hangs and loses the device in the middle of such a loop; the soak, sizes that change while
# host and device memory are watched; random sizes of every op against fp64, in several processes; every kernel at odd
# sizes, then the same under compute-sanitizer (memcheck), which must also find an error that is planted.
# Leaves OUT/*.json and logs, and joins them into OUT/trust-<device>.json, beside what runs of other parts left there. It
# belongs in benchmarks/results/ and into the table of docs/safety.md. Every part writes what it has so far, so that a run
# that is cut leaves figures. The exit status is 1 where something did not hold or gave no result.
#   LIMIT=seconds of wall time for all (165)  WORKERS=5 processes of random sizes  PARTS=8 processes of the sweep
#   ONLY="faults tuner soak numbers sweep" which of these; sweep is with the memory checker  SOAK=seconds of the soak
#   (LIMIT - 50)  PY=python3  DRY=1 a few steps on a CPU
set -uo pipefail
cd "$(dirname "$0")/.." || exit
OUT=$(realpath -m "${1:?OUT, the folder for results}") ONLY=${ONLY:-faults tuner soak numbers sweep}
LIMIT=${LIMIT:-$([ "$ONLY" = soak ] && echo $((${SOAK:-480} + 60)) || echo 165)} WORKERS=${WORKERS:-5} PARTS=${PARTS:-8}
for what in $ONLY; do
    case $what in faults | tuner | soak | numbers | sweep) ;; *) echo "faults.sh: ONLY has no $what" >&2 && exit 2 ;; esac
done
wants() { [[ " $ONLY " == *" $1 "* ]]; }
wants numbers || WORKERS=0
wants sweep || PARTS=0
mkdir -p "$OUT"
PY=$("${PY:-python3}" -c 'import sys; print(sys.executable)')
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
own=$(mktemp -d)
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$own}
dry=() soak=${SOAK:-$((LIMIT - 50))} numbers=$((LIMIT - 45))
if [ -n "${DRY:-}" ]; then dry=(--dry); else export FUZZ_DEVICE=cuda; fi

left() { echo $((LIMIT - SECONDS)); }
run() { timeout -k 5 "$(($(left) - 2))" "$@"; }
device() { run "$PY" -m tests.fuzz.device "$1" "$OUT/$2.json" "${@:3}" ${dry[@]+"${dry[@]}"} > "$OUT/$2.log" 2>&1; }

# memory errors are what is asked for: that torch asks a driver for a function it has not is no error
sanitizer=$(command -v compute-sanitizer || ls -d /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | head -1)
[ -z "${DRY:-}" ] && wants sweep || sanitizer=""
checker=()
if [ -n "$sanitizer" ]; then
    known=$("$sanitizer" --help 2>&1)
    checker=("$sanitizer" --tool memcheck --error-exitcode 66 --print-limit 100000)
    # a report ends its kernel and not the process, whose other kernels are to be checked too
    for option in "--destroy-on-device-error kernel" "--show-backtrace no" "--report-api-errors no" "--target-processes application-only" "--launch-timeout 120"; do
        if grep -q -e "${option% *}" <<< "$known"; then read -ra words <<< "$option" && checker+=("${words[@]}"); fi
    done
    ports=$(grep -c -e --base-port <<< "$known")
fi
checked() { # number of its ports, name of its files, what tests.fuzz.device does
    local port=()
    [ "$ports" = 0 ] || port=(--base-port $((49200 + 20 * $1)))
    run "${checker[@]}" ${port[@]+"${port[@]}"} \
        "$PY" -m tests.fuzz.device "$3" "$OUT/$2.json" --checked "${@:4}" > "$OUT/$2.log" 2>&1
    echo "$?" > "$OUT/$2.status"
}

for what in faults tuner; do
    ! wants "$what" || device "$what" "$what" &
done
! wants soak || device soak soak --seconds "$soak" &
for w in $(seq "$WORKERS"); do
    run "$PY" -m tests.fuzz --areas numerics --seconds "$numbers" --seed "10$w" \
        --json "$OUT/numbers-$w.json" > "$OUT/numbers-$w.log" 2>&1 &
done
[ -z "$sanitizer" ] || checked 0 planted planted &
for p in $(seq 0 $((PARTS - 1))); do
    (
        device sweep "sweep-$p" --part "$p/$PARTS" --seconds $((LIMIT * 2 / 5)) # also fills Triton's cache
        [ -z "$sanitizer" ] || checked $((p + 1)) "memcheck-$p" sweep --part "$p/$PARTS" --seconds "$(($(left) - 45))"
    ) &
done
wait
rm -rf "$own"
for log in "$OUT"/*.log; do # what the compiler says of a configuration that fails is long
    tail -c 2000000 "$log" > "$log.end" && mv "$log.end" "$log"
done

"$PY" - "$OUT" "$WORKERS" "$PARTS" "${sanitizer:-}" "$ONLY" << 'P'
import collections, json, os, re, subprocess, sys, time
from pathlib import Path

from tests.fuzz.__main__ import versions

out, workers, parts, sanitizer = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
only = sys.argv[5].split()
bad = []


def read(name):
    try:
        return json.loads((out / f"{name}.json").read_text())
    except (OSError, ValueError) as error:
        bad.append(name)
        print(name, "gave no result:", error)
        log = out / f"{name}.log"
        print(log.read_text(errors="replace")[-600:] if log.exists() else "")
        return None


def said(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


REPORT = r"Invalid (__\w+__ \w+ of size \d+) bytes\n=+\s+at (\S+)\+0x\w+(?:.*\n){2,3}?=+\s+and is (inside|\S+ bytes \w+)"
"""Access, kernel, and whether its first byte is inside an allocation: a vector whose end alone is behind a tensor's."""
joined = {**versions(), "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
joined["driver"] = next(iter(said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")), "")
if parts:
    joined["sanitizer"] = (said(sanitizer, "--version") or [sanitizer])[-1] if sanitizer else "none on this machine"
    bad += [] if sanitizer or os.environ.get("DRY") else ["memcheck"]
for name in [name for name in ("faults", "tuner", "soak") if name in only]:
    joined[name] = found = read(name)
    if found:
        print(name, {key: value for key, value in found.items() if not isinstance(value, (list, dict))})
        bad += [] if found["held"] and found["finished"] else [name]
areas = [found["areas"]["numerics"] for w in range(1, workers + 1) if (found := read(f"numbers-{w}"))]
findings = [finding for area in areas for finding in area["findings"]]
shapes = collections.Counter()
for area in areas:
    for outcome, times in area["outcomes"].items():
        for part in outcome.split(", "):
            count, _, what = part.partition(" ")
            if count.isdigit():
                shapes[what] += times * int(count)
            else:
                shapes[part] += times
if workers:
    joined["numbers"] = {"attempts": sum(area["attempts"] for area in areas), "shapes": shapes, "findings": findings}
    print("numbers", joined["numbers"]["attempts"], "attempts, shapes", dict(shapes), len(findings), "findings")
bad += ["numbers"] * bool(findings)
for kind in [] if not parts else ["sweep", "memcheck"] if sanitizer else ["sweep"]:
    found = [each for p in range(parts) if (each := read(f"{kind}-{p}"))]
    joined[kind] = joining = {
        "planned": sum(part["planned"] for part in found),
        "cases": sum(len(part["done"]) for part in found),
        "failed": [failed for part in found for failed in part["failed"]],
        "kernels": len({name for part in found for name in part.get("kernels", ())}),
        "not_launched": [name for part in found for name in part.get("not_launched", ())],
        "quarantined": {name: why for part in found for name, why in part.get("quarantined", {}).items()},
        "ops": len({case.split()[0] for part in found for case in part["done"]}),
        "cut": [p for p, part in enumerate(found) if not part["finished"]],
    }
    if kind == "memcheck":
        logs = [path.read_text(errors="replace") for p in range(parts) if (path := out / f"memcheck-{p}.log").exists()]
        joining["summaries"] = [line for log in logs for line in re.findall(r"ERROR SUMMARY: .*", log)]
        joining["status"] = [path.read_text().strip() for path in sorted(out.glob("memcheck-*.status"))]
        found = [report for log in logs for report in re.findall(REPORT, log)]
        joining["reports"] = dict(collections.Counter(f"{access}, {where}, {how}" for access, where, how in found))
        planted = (out / "planted.log").read_text(errors="replace")
        behind = json.loads((out / "planted.json").read_text())["held"] if (out / "planted.json").exists() else False
        joining["poison_is_read_behind_a_tensor"] = behind and "Invalid __global__ read" not in planted
        joining["finds_a_planted_error"] = "Invalid __global__ write" in planted
        seen = joining["ops"] == joined["sweep"]["ops"]
        clean = seen and len(joining["summaries"]) == parts and all(" 0 errors" in line for line in joining["summaries"])
        sound = joining["poison_is_read_behind_a_tensor"] and joining["finds_a_planted_error"]
        bad += [] if clean and sound and set(joining["status"]) == {"0"} else [kind]
    print(kind, {**joining, "failed": joining["failed"][:3]})
    if joining["not_launched"]:
        print(kind, "launched never:", ", ".join(joining["not_launched"]))
    whole = joining["cases"] == joining["planned"] and not joining["cut"]
    bad += [] if whole and not joining["failed"] and not joining["not_launched"] else [kind]
target = out / f"trust-{re.sub(r'[^a-z0-9]+', '-', joined['device'].lower()).strip('-')}.json"
if target.exists():  # of a run before, with other parts
    before = json.loads(target.read_text())
    bad += [name for name in before["did_not_hold"] if name not in joined]
    joined = {**before, **joined}
joined["did_not_hold"] = sorted(set(bad))
target.write_text(json.dumps(joined, indent=1) + "\n")
print(target, "did not hold: " + ", ".join(joined["did_not_hold"]) if bad else "all held")
sys.exit(bool(bad))
P
