"""Whether documents packed into one row see each other, tried on a tiny model of the same class and attention.

    liger_hw.transformers.packing_leaks(model)
    {'position_ids': False, 'position_ids of several rows': False, 'cu_seq_lens': False}

Nothing that is trained is run: two batches that differ in the first document alone go through the tiny model, and the
second document's logits must be the same. What a form needs depends on the attention implementation and on the family:
state space layers, for one, carry their state from document to document whatever the positions say.
"""

from __future__ import annotations

from typing import Any

import torch

from .tiny import VOCAB, tiny_model

FIRST, SECOND = 5, 7
"""Tokens of the two documents."""
THRESHOLD = 0.01
"""Largest difference, as a share of the largest logit, that rounding may leave."""
LEAKING = {
    **dict.fromkeys(("gpt_oss", "deepseek_v4"), ("eager",)),
    **dict.fromkeys(("falcon_h1", "qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe"), ("eager", "sdpa")),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), ("eager", "sdpa")),
}
"""Type of a model -> attention implementations with which `position_ids` do not keep its packed documents apart."""
FORMS = ("position_ids", "position_ids of several rows", "cu_seq_lens")
"""How a batch says where documents begin: positions that begin again at 0, in one row or in two, or positions with the
arguments of transformers' DataCollatorWithFlattening."""


def packing_note(model: torch.nn.Module) -> str:
    """One line where `LEAKING` has a live model and its attention, else nothing. Nothing is run."""
    config = getattr(model, "config", None)
    family = str(getattr(config, "model_type", "")).removesuffix("_text")
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in LEAKING.get(family, ()):
        return ""
    return f"packed rows leak: with {implementation} attention, position_ids do not keep {family}'s documents apart"


def packing_leaks(model: torch.nn.Module | type) -> dict[str, bool]:
    """Each of `FORMS` -> whether a document's logits depend on the one packed before it; without forms that it refuses.

    model: a causal LM of transformers, whose attention implementation and device are used, or its class: then sdpa
    where the class has it, else eager, on the CPU. Raises what the class raises where it cannot be built small.
    """
    cls = model if isinstance(model, type) else type(model)
    if isinstance(model, type):
        implementation, device = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager", torch.device("cpu")
    else:
        implementation, device = model.config._attn_implementation, next(model.parameters()).device
    small = tiny_model(cls, attn_implementation=implementation).eval().to(device)
    if implementation not in ("eager", "sdpa", "flex_attention"):
        small = small.bfloat16()  # flash attention has no fp32
    answers = {form: _leaks(small, form) for form in FORMS}
    return {form: leaks for form, leaks in answers.items() if leaks is not None}


def _leaks(model: torch.nn.Module, form: str) -> bool | None:
    device = next(model.parameters()).device
    source = torch.Generator().manual_seed(0)
    rows = 2 if form == "position_ids of several rows" else 1
    second = torch.randint(4, VOCAB, (rows, SECOND), generator=source)
    positions = torch.cat((torch.arange(FIRST), torch.arange(SECOND))).expand(rows, -1)
    options: dict[str, Any] = {"position_ids": positions.to(device), "use_cache": False}
    if form == "cu_seq_lens":
        starts = torch.tensor([0, FIRST, FIRST + SECOND], dtype=torch.int32, device=device)
        longest = max(FIRST, SECOND)
        options |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    logits = []
    for _ in range(2):
        first = torch.randint(4, VOCAB, (rows, FIRST), generator=source)
        try:
            with torch.no_grad():
                output = model(input_ids=torch.cat((first, second), 1).to(device), **options)
        except (TypeError, ValueError):  # as hybrids do with cu_seq_lens where their kernels are not installed
            return None
        logits.append(output.logits[:, FIRST:].float())
    difference = (logits[0] - logits[1]).abs().max()
    return bool(difference > THRESHOLD * logits[0].abs().max())
