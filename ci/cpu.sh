#!/usr/bin/env bash
# Lanes cpu and interpret, on any machine; TRANSFORMERS=4.57.6 takes the lane of that version:  bash ci/cpu.sh
source "$(dirname "$0")/common.sh"
install
case ${TRANSFORMERS:-} in
    4.*) lanes transformers4 ;;
    *)
        step make lint VENV="$VENV"
        lanes cpu interpret
        ;;
esac
