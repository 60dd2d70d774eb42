"""What one model family states about itself: only what differs from the usual names."""

from __future__ import annotations

from dataclasses import dataclass

LLAMA_LIKE = (
    ("rope", True),
    ("cross_entropy", False),
    ("fused_linear_cross_entropy", True),
    ("rms_norm", True),
    ("swiglu", True),
)
"""Keywords of most families' public function, in Liger's order, with their defaults; `model=None` comes last."""


@dataclass(frozen=True)
class FamilySpec:
    """A family of transformers models, for the patch engine.

    name: suffix of `apply_liger_kernel_to_<name>` and, by default, of the modeling module
    prefix: what its class names start with, for example "Mistral" in MistralRMSNorm
    norms, mlps, attentions, causal_lms: class names in the modeling module; () takes them from the prefix
    rotary: name of the function the attention classes call; head: attribute of a causal LM that is its output head
    shared_halves: its cos and sin are two equal halves, so that rope reads one
    casting_mode, offset, eps: how its RMSNorm computes (see kernels/rms_norm.py), and the attribute that holds epsilon
    parts: keyword -> default of the public function, in order
    """

    name: str
    prefix: str
    module: str = ""
    norms: tuple[str, ...] = ()
    mlps: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ()
    causal_lms: tuple[str, ...] = ()
    rotary: str = "apply_rotary_pos_emb"
    shared_halves: bool = True
    head: str = "lm_head"
    casting_mode: str = "llama"
    offset: float = 0.0
    eps: str = "variance_epsilon"
    parts: tuple[tuple[str, bool], ...] = LLAMA_LIKE

    @property
    def function_name(self) -> str:
        return f"apply_liger_kernel_to_{self.name}"

    @property
    def modeling_module(self) -> str:
        return self.module or f"transformers.models.{self.name}.modeling_{self.name}"

    def class_names(self, kind: str) -> tuple[str, ...]:
        """Class names of `norms`, `mlps`, `attentions` or `causal_lms`."""
        usual = {"norms": "RMSNorm", "mlps": "MLP", "attentions": "Attention", "causal_lms": "ForCausalLM"}
        return getattr(self, kind) or (self.prefix + usual[kind],)
