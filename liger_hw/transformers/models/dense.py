"""Text models with one MLP a layer."""

from __future__ import annotations

from ..spec import GEGLU, LOSS, MODEL, NO_ROPE, NORM, ROPE, SWIGLU, FamilySpec

_GEMMA = (*ROPE, *LOSS, *NORM, *GEGLU, *MODEL)
_NO_ROPE = (*NO_ROPE, *LOSS, *NORM, *SWIGLU, *MODEL)
_GRANITE = (*ROPE, ("cross_entropy", True), ("fused_linear_cross_entropy", False), *NORM, *SWIGLU, *MODEL)

SPECS = (
    FamilySpec("llama", ("LlamaForCausalLM",)),
    FamilySpec("mistral", ("MistralForCausalLM",)),
    FamilySpec("ministral", ("MinistralForCausalLM",)),
    FamilySpec("smollm3", ("SmolLM3ForCausalLM",)),
    FamilySpec("granite", ("GraniteForCausalLM",), _GRANITE),
    FamilySpec("qwen2", ("Qwen2ForCausalLM",)),
    FamilySpec("qwen3", ("Qwen3ForCausalLM",)),
    FamilySpec("phi3", ("Phi3ForCausalLM",)),
    FamilySpec("olmo2", ("Olmo2ForCausalLM",)),
    FamilySpec("olmo3", ("Olmo3ForCausalLM",)),
    FamilySpec("exaone4", ("Exaone4ForCausalLM",)),
    FamilySpec("falcon_h1", ("FalconH1ForCausalLM",)),
    FamilySpec("hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM",)),
    FamilySpec("glm4", ("Glm4ForCausalLM",), _NO_ROPE),
    FamilySpec("gemma", ("GemmaForCausalLM",), _GEMMA),
    FamilySpec("gemma2", ("Gemma2ForCausalLM",), _GEMMA),
    FamilySpec("gemma3_text", ("Gemma3ForCausalLM",), _GEMMA, module="gemma3"),
    FamilySpec("gemma4_text", ("Gemma4ForCausalLM",), (*NO_ROPE, *_GEMMA[1:]), module="gemma4"),
    FamilySpec("qwen3_5", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _NO_ROPE, types=("qwen3_5_text",)),
    FamilySpec(
        "nemotron",
        ("NemotronForCausalLM",),
        (("relu_squared", True), *LOSS, *MODEL),
        also=("rope", "layer_norm"),
    ),
)
