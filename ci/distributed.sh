#!/usr/bin/env bash
# Every engine of tests/distributed with two gloo ranks on the CPU:  bash ci/distributed.sh
# Lays deepspeed over the environment. Records of the matrix go to $OUT/matrix.
source "$(dirname "$0")/common.sh"
install
over=$VENV/distributed
step "$BIN/python" -m pip --disable-pip-version-check install --quiet --no-deps --upgrade \
    --target "$over" -r ci/distributed.txt
# deepspeed builds a library at its first use; a folder of its own has no lock that a killed process left behind
export MATRIX=$PWD/$OUT/matrix TORCH_EXTENSIONS_DIR=$PWD/$over/extensions PATH=$PWD/$over/bin:$PATH
lanes distributed
