"""Tests whether documents packed into one row affect each other, on a tiny model of the same class and attention.

Two batches that differ only in the first document are run, and the second document's logits must be the same. They
differ, for example, in state space layers, which ignore positions and keep their state between documents.
"""

from __future__ import annotations

from typing import Any

import torch

from .tiny import VOCAB, tiny_model

FIRST, SECOND = 5, 7
"""Number of tokens of the first and the second document."""
ROUNDING = 0.01
"""Largest difference that counts as rounding, as a share of the largest logit."""
_EAGER = "gpt_oss deepseek_v4 mamba mamba2 falcon_mamba rwkv xlstm bloom inkling2 mpt xglm"
_ALL = "afmoe biogpt glm4v_moe granitemoehybrid inkling lfm2 lfm2_moe lfm3 minimax nemotron_h opt recurrent_gemma zaya"
_SDPA = "bailing_hybrid bamba falcon falcon_h1 glm46v glm4v jamba kimi_linear olmo_hybrid qwen2_vl qwen2_5_vl"
_SDPA += " qwen3_next qwen3_5 qwen3_5_moe qwen4_exp"
LEAKING = {
    **dict.fromkeys(_EAGER.split(), ("eager",)),
    **dict.fromkeys(_SDPA.split(), ("eager", "sdpa")),
    **dict.fromkeys(_ALL.split(), ("eager", "sdpa", "flex_attention")),
}
"""`config.model_type` -> attention implementations with which `position_ids` do not separate packed documents."""
FORMS = ("position_ids", "position_ids of several rows", "cu_seq_lens")
"""position_ids that restart at 0, in one row or in two, or with the arguments of DataCollatorWithFlattening."""


def packing_note(model: torch.nn.Module, of_class: bool = False) -> str:
    """A line if `LEAKING` has the model and its attention, or if only a GPU can test it; else "". Nothing is run.

    of_class: whether the line is about all models of the class, which may use any attention
    """
    config = getattr(model, "config", None)
    family = str(getattr(config, "model_type", "")).removesuffix("_text")
    attention = str(getattr(config, "_attn_implementation", None))
    if leaking := [one for one in LEAKING.get(family, ()) if of_class or one == attention]:
        kinds = ", ".join(leaking)
        return f"packed rows leak: with {kinds} attention, position_ids do not keep {family}'s documents apart"
    if not of_class and ("flash" in attention or (family, attention) == ("gpt_oss", "flex_attention")):
        return f"packed rows: {attention} needs a GPU; call liger_hw.transformers.packing_leaks(model) there to test it"
    return ""


def packing_leaks(model: torch.nn.Module | type) -> dict[str, bool]:
    """Each of `FORMS` that the model takes -> whether a document's logits depend on the one packed before it.

    model: a transformers causal LM, whose attention implementation and device are used; or its class, which is tested
    on the CPU with sdpa, or eager if it has no sdpa. Raises the class's error if no tiny model can be made.
    """
    cls = model if isinstance(model, type) else type(model)
    if isinstance(model, type):
        implementation, device = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager", torch.device("cpu")
    else:
        implementation, device = model.config._attn_implementation, next(model.parameters()).device
    small = tiny_model(cls, attn_implementation=implementation).eval().to(device)
    if implementation not in ("eager", "sdpa", "flex_attention"):
        small = small.bfloat16()  # flash attention has no fp32
    return {form: leaks for form in FORMS if (leaks := _leaks(small, form)) is not None}


def _leaks(model: torch.nn.Module, form: str) -> bool | None:
    device = next(model.parameters()).device
    source = torch.Generator().manual_seed(0)
    rows = 2 if form == "position_ids of several rows" else 1
    second = torch.randint(4, VOCAB, (rows, SECOND), generator=source)
    positions = torch.cat((torch.arange(FIRST), torch.arange(SECOND))).expand(rows, -1)
    options: dict[str, Any] = {"position_ids": positions.to(device), "use_cache": False}
    if form == "cu_seq_lens":
        starts = torch.tensor([0, FIRST, FIRST + SECOND], dtype=torch.int32, device=device)
        options |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": SECOND, "max_length_k": SECOND}
    logits = []
    for _ in range(2):
        first = torch.randint(4, VOCAB, (rows, FIRST), generator=source)
        try:
            with torch.no_grad():
                output = model(input_ids=torch.cat((first, second), 1).to(device), **options)
        except (TypeError, ValueError):  # e.g. cu_seq_lens in hybrids without installed kernels
            return None
        logits.append(output.logits[:, FIRST:].float())
    difference = (logits[0] - logits[1]).abs().max()
    return bool(difference > ROUNDING * logits[0].abs().max())
