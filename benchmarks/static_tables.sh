#!/usr/bin/env bash
# Shipped tables of GPUs that are not here: choose for each architecture without the device and export what was chosen.
#
#     bash benchmarks/static_tables.sh [ARCH ...]        a few minutes an architecture on two cores, less the second time
#     OPS=rms_norm,softmax CANDIDATES=24 bash benchmarks/static_tables.sh gfx942
#
# Measured entries stay; earlier choices for the same ops are replaced, so run it again when a heuristic has changed. What
# was compiled before comes from Triton's cache.
set -euo pipefail
cd "$(dirname "$0")/.."

archs=("$@")
[ ${#archs[@]} -gt 0 ] || archs=(gfx942 gfx90a gfx950 gfx1100 gfx1151 gfx1201 sm80 sm89 sm100 sm120 pvc acm bmg lnl)
LIGER_HW_CACHE_DIR=$(mktemp -d)
export LIGER_HW_CACHE_DIR PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
trap 'rm -rf "$LIGER_HW_CACHE_DIR"' EXIT
python=${PYTHON:-python3}

for arch in "${archs[@]}"; do
    case $arch in
        gfx*) vendor=rocm ;;
        sm*) vendor=cuda ;;
        *) vendor=xpu ;;
    esac
    options=(--device "$arch" --first --candidates "${CANDIDATES:-7}" --workers "${WORKERS:-2}")
    [ -z "${OPS:-}" ] || options+=(--ops "$OPS")
    "$python" -m liger_hw autotune "${options[@]}" || echo "static_tables: some of $arch could not be judged" >&2
    table=liger_hw/backends/$vendor/configs/$arch.json
    mkdir -p "$(dirname "$table")"
    # Earlier choices for what was judged now go: where the heuristic stays this time, no entry must speak.
    "$python" - "$table" "${OPS:-}" << 'EOF'
import sys
from pathlib import Path

from liger_hw.autotune import tables

path, ops = Path(sys.argv[1]), [op for op in sys.argv[2].split(",") if op]
if path.exists():
    header, entries, _ = tables.parse(path.read_text(), str(path))
    kept = {n: e for n, e in entries.items() if e.provenance["kind"] == "measured" or (ops and n[0] not in ops)}
    header.pop("schema")
    path.write_text(tables.render(header, kept)) if kept else path.unlink()
EOF
    "$python" -m liger_hw cache export --device "$arch" -o "$table" --merge || echo "static_tables: nothing to keep for $arch" >&2
done
