#!/usr/bin/env bash
# On a machine with an Intel GPU: tests, tuning and a benchmark, into OUT. Nobody has run this here: its first run turns
# "modelled" into "measured":  INDEX=https://download.pytorch.org/whl/xpu bash ci/xpu.sh
source "$(dirname "$0")/common.sh"
vendor xpu
