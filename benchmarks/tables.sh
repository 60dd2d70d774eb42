#!/bin/bash
# The tables and plots of README and docs/shapes.md from one run: every op at three sizes or more against all peers, and the
# memory-bound ops at 40 shapes each, one list for all GPUs of this machine.
#   bash benchmarks/tables.sh OUT SECONDS [table|many|both]      SECONDS: of wall time for the whole call
# Leaves OUT/ops-table-h200.json, OUT/ops-many-h200.json.gz (complete or not) and OUT/tables-*.tgz (rows by case, logs). First
# many processes a GPU fill the compilers' caches, then one a GPU times, with nothing else running. Run again with the same
# folder of work, W, it goes on with the cases that are left: remove it after a change. liger_hw and the peers must be
# importable.
#   PY=python3  GPUS=count  EACH=13 compiling processes a GPU  WARM=most seconds of that (75 table, 120 many)  W=/tmp/tables
#   TABLES_TRITON=/tmp/tables-triton, Triton's cache  LIGER_COMMIT=hash to record
OUT=${1:?OUT, the folder for results} TOTAL=${2:-300} WHAT=${3:-both} PY=${PY:-python3}
GPUS=${GPUS:-$($PY -c "import torch; print(torch.accelerator.device_count())")} EACH=${EACH:-13}
W=${W:-/tmp/tables}; mkdir -p $OUT $W
export TRITON_CACHE_DIR=${TABLES_TRITON:-/tmp/tables-triton} TORCHINDUCTOR_CACHE_DIR=/tmp/tables-inductor QUACK_CACHE_DIR=/tmp/tables-quack PYTHONUNBUFFERED=1
t0=$SECONDS; say() { echo "$((SECONDS-t0)) s  $*"; }
join() { # NAME DIR: the rows so far as one file
  $PY - "$1" "$2" <<'P'
import sys
from pathlib import Path
import torch
sys.path.insert(0, "benchmarks")
import published
import share
from liger_hw.bench import report
folder = Path(sys.argv[2])
taken, n = (len(list(folder.glob(f"[0-9]*.{what}"))) for what in ("timed", "json"))
rows = [r for r in share.rows_in(folder) if not (r["status"] == "absent" and " has no " in r["note"])]
if rows:
    said = ("driver", "torch", "triton", "liger_hw", "date")  # once, under machine
    slim = [{k: v for k, v in r.items() if k not in said} for r in rows]
    facts = report.machine(torch.device(torch.accelerator.current_accelerator() or "cpu"), rows[0]["commit"])
    report.save(sys.argv[1], {"machine": facts | {"date": rows[0]["date"]}, "cases": {"taken": taken, "measured": n}, "rows": slim})
print("joined", n, "of", taken, "cases taken,", len(rows), "rows")
best = published.against_best(rows)
lost = sorted((b for b in best if b["speed"] < 0.99), key=lambda b: b["speed"])
print(len(lost), "of", len(best), "shapes slower than a peer by more than 1%")
for b in lost[:25]: print(f'  {b["op"]} {"x".join(map(str, b["sizes"]))} {b["speed"]:.2f} of {b["peer"]} ({1e3*b["ours"]:.1f} us, {1e3*b["best"]:.1f})')
bad = [r for r in rows if r["arm"] == "liger_hw" and r["status"] != "ok"]
for r in bad[:8]: print("  OURS FAILED", r["op"], r["sizes"], r["note"][:120])
for a in ("quack", "compile", "liger", "cce"): print(a, "errors:", sorted({f'{r["op"]}: {r["note"][:70]}' for r in rows if r["arm"] == a and r["status"] in ("error", "skipped")})[:6])
P
}
phase() { # NAME WARM UNTIL FILE PEERS SIZES: warm for WARM seconds, then time until UNTIL (seconds of this call)
  local name=$1 warm=$2 until=$3 file=$4 against=$5 sizes=$6 dir=$W/$1
  local args="$sizes --against $against --repeats 3 --share $dir ${LIGER_COMMIT:+--commit $LIGER_COMMIT}"
  if [ $warm -gt 0 ]; then
    for g in $(seq 0 $((GPUS-1))); do for k in $(seq $EACH); do
      CUDA_VISIBLE_DEVICES=$g OMP_NUM_THREADS=1 timeout -k 5 $((warm+12)) $PY benchmarks/sweep.py $args --warm --budget $warm > $W/$name-warm$g-$k.log 2>&1 &
    done; done; wait
    say "$name warm: $(ls $dir | grep -c warm) cases"
  fi
  one() {
    local g=$1 before=-1 now
    for try in 1 2 3 4 5; do
      local left=$((until-(SECONDS-t0))); [ $left -lt 12 ] && break
      now=$(ls $dir | grep -c timed); [ $now -eq $before ] && break; before=$now
      CUDA_VISIBLE_DEVICES=$g OMP_NUM_THREADS=8 timeout -s INT -k 8 $((left+6)) $PY benchmarks/sweep.py $args --budget $((left-4)) --json $W/$name-$g.json >> $W/$name-$g.out 2>> $W/$name-$g.log && break
    done
  }
  for g in $(seq 0 $((GPUS-1))); do one $g & done; wait
  join $file $dir
  tar czf $OUT/tables-$name.tgz -C $W $name $(cd $W; ls $name-*.log | grep -v warm; ls $name-*-1.log)
  say "$name done"
}
table() { phase table $1 $2 $OUT/ops-table-h200.json torch,compile,liger,quack,cce,apart table; }
many() { phase many $1 $2 $OUT/ops-many-h200.json.gz compile,liger many; }
case $WHAT in
  table) table ${WARM:-75} $TOTAL ;;
  many) many ${WARM:-120} $TOTAL ;;
  both) table ${WARM:-75} $((TOTAL*2/5)); many ${WARM:-120} $TOTAL ;;
esac
