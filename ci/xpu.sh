#!/usr/bin/env bash
# On a machine with an Intel GPU: tests, tuning and a benchmark, into OUT. Nobody has run this here: its first run, and
# the table it exports (OUT/xpu-table.json), turn "modelled" into "measured":  bash ci/xpu.sh
source "$(dirname "$0")/common.sh"
vendor xpu
step "$BIN/liger-hw" autotune --device xpu --budget "${BUDGET:-900}"
keep xpu-table.json "$BIN/liger-hw" cache export
keep bench-tuned.json "$BIN/liger-hw" bench --against torch,compile --json
