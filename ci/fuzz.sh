#!/usr/bin/env bash
# Lane fuzz, on any machine: random attempts to crash, hang, delete or mislead, for 20 minutes with a seed that is printed:
#     bash ci/fuzz.sh    FUZZ_SECONDS=60 FUZZ_SEED=7 bash ci/fuzz.sh
source "$(dirname "$0")/common.sh"
install
export OUT
lanes fuzz
