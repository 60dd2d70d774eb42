#!/usr/bin/env bash
# Lane models, on any machine: every causal LM of transformers, patched against unpatched; OUT/models.jsonl has the figures:
#     bash ci/models.sh
source "$(dirname "$0")/common.sh"
install
export OUT
lanes models
