#!/usr/bin/env bash
# On a machine with an AMD GPU: tests, tuning and a benchmark, into OUT. Nobody has run this here: its first run turns
# "compile-proven" into "measured":  INDEX=https://download.pytorch.org/whl/rocm7.2 bash ci/rocm.sh
source "$(dirname "$0")/common.sh"
vendor rocm
