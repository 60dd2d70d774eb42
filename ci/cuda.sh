#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: tests, tuning and a benchmark, into OUT:  bash ci/cuda.sh
source "$(dirname "$0")/common.sh"
vendor cuda
