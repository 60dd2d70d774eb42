"""Mistral, and everything that loads as MistralForCausalLM."""

from __future__ import annotations

from ..engine import patch_function
from ..spec import FamilySpec

SPEC = FamilySpec("mistral", prefix="Mistral")

apply_liger_kernel_to_mistral = patch_function(SPEC)
