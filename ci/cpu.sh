#!/usr/bin/env bash
# Lanes cpu and interpret, on any machine:  bash ci/cpu.sh    FULL=1: with what is marked `full`
# TRANSFORMERS=4.57.6 takes the lane of that version instead; TRL=1.16.0 the trainers of that trl, Lightning and examples/;
# FRAMEWORKS=1 with TRL=1.16.0 or 0.24.0 the frameworks of ci/frameworks.txt that go with that trl; FRAMEWORKS=axolotl,
# llamafactory or ms-swift alone that framework's training command, in its own environment.
source "$(dirname "$0")/common.sh"
install
if [ -z "${TRL:-}" ] && [ -n "${FRAMEWORKS:-}" ]; then
    over=$(realpath -m "$VENV")/frameworks/$FRAMEWORKS/site-packages # the commands start in folders of their own
    step "$BIN/python" -m pip --disable-pip-version-check install --quiet --no-deps --upgrade \
        --target "$over" -r "ci/frameworks/$FRAMEWORKS.txt"
    step env PYTHONPATH="$over" "$BIN/python" -m pytest -q -m cpu tests/compat/test_framework_commands.py
    exit
fi
if [ -n "${TRL:-}" ]; then
    step "$BIN/python" -m pip --disable-pip-version-check install --quiet --no-deps --upgrade \
        --target "$VENV/trl-$TRL" -r ci/trl.txt ${FRAMEWORKS:+-r ci/frameworks.txt} "trl==$TRL"
    if [ -n "${FRAMEWORKS:-}" ]; then
        step env PYTHONPATH="$(realpath -m "$VENV")/trl-$TRL" "$BIN/python" -m pytest -q -m cpu tests/compat/test_frameworks.py
        exit
    fi
    lanes trl
    exit
fi
case ${TRANSFORMERS:-} in
    4.*) lanes ${FULL:+full} transformers4 ;;
    *)
        step make lint VENV="$VENV"
        lanes ${FULL:+full} cpu interpret
        ;;
esac
