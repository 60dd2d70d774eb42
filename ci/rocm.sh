#!/usr/bin/env bash
# On a machine with an AMD GPU: tests, what would be tuned, and a benchmark, into OUT:  bash ci/rocm.sh
source "$(dirname "$0")/common.sh"
vendor rocm
