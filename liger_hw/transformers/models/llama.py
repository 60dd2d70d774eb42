"""Llama 1 to 3 and everything that loads as LlamaForCausalLM."""

from __future__ import annotations

from ..engine import patch_function
from ..spec import FamilySpec

SPEC = FamilySpec("llama", prefix="Llama")

apply_liger_kernel_to_llama = patch_function(SPEC)
