#!/usr/bin/env bash
# Lane aot, on any machine; TRITON=3.9.0 takes another release of Triton than the pinned one, FULL=1 what is
# marked `full` too:  bash ci/aot.sh
source "$(dirname "$0")/common.sh"
install
step "$BIN/python" -c 'import triton; print("triton", triton.__version__, triton.__file__)'
lanes ${FULL:+full} aot
