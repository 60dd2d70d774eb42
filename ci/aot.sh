#!/usr/bin/env bash
# Lanes aot and oldest, on any machine; TRITON=3.9.0 takes lane aot alone with that release of Triton, FULL=1 what is
# marked `full` too:  bash ci/aot.sh
source "$(dirname "$0")/common.sh"
install
step "$BIN/python" -c 'import triton; print("triton", triton.__version__, triton.__file__)'
if [ -n "${TRITON:-}" ]; then
    lanes ${FULL:+full} aot
else
    lanes ${FULL:+full} aot oldest
fi
