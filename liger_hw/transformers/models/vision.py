"""Models that see: a text model and what feeds it. A class patch changes the family's own classes; the parts that it
takes from other families (a CLIP or SigLIP tower, a Llama) are patched with a live model, or by their own functions."""

from __future__ import annotations

from ..spec import GEGLU, LAYER_NORM, LOSS, MODEL, NO_ROPE, NORM, ROPE, SWIGLU, FamilySpec

_GEMMA = (*ROPE, *LOSS, *LAYER_NORM, *NORM, *GEGLU, *MODEL)
_LLAMA = (*ROPE, *LOSS, *LAYER_NORM, *NORM, *SWIGLU, *MODEL)
_PARTS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
_NO_ROPE = (*NO_ROPE, *LOSS, *NORM, *SWIGLU, *MODEL)

SPECS = (
    FamilySpec("llava", ("LlavaForConditionalGeneration",), (*LOSS, *MODEL), also=_PARTS),
    FamilySpec(
        "llama4",
        ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        (*ROPE, *LOSS, *NORM, *SWIGLU, *MODEL, *LAYER_NORM),
        types=("llama4_text",),
    ),
    FamilySpec("mllama", ("MllamaForConditionalGeneration", "MllamaForCausalLM"), _LLAMA, types=("mllama_text_model",)),
    FamilySpec("muse_glimmer", ("MuseGlimmerForConditionalGeneration",), _LLAMA, types=("muse_glimmer_text",)),
    FamilySpec("pixtral", ("PixtralVisionModel",), (*ROPE, *NORM, *SWIGLU, *MODEL)),
    FamilySpec("paligemma", ("PaliGemmaForConditionalGeneration",), _GEMMA),
    FamilySpec("gemma3", ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"), _GEMMA),
    FamilySpec(
        "gemma4",
        ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
        (*NO_ROPE, *LOSS, ("layer_norm", False), *NORM, *GEGLU, *MODEL),
    ),
    FamilySpec(
        "qwen2_vl",
        ("Qwen2VLForConditionalGeneration",),
        (*ROPE, *LOSS, *NORM, *LAYER_NORM, *SWIGLU, *MODEL),
        types=("qwen2_vl_text",),
    ),
    FamilySpec("qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",), types=("qwen2_5_vl_text",)),
    FamilySpec(
        "qwen3_vl",
        ("Qwen3VLForConditionalGeneration",),
        (*ROPE, *LOSS, *NORM, ("swiglu", False), *MODEL),
        types=("qwen3_vl_text",),
    ),
    FamilySpec("qwen3_vl_moe", ("Qwen3VLMoeForConditionalGeneration",), types=("qwen3_vl_moe_text",)),
    FamilySpec("glm4v", ("Glm4vForConditionalGeneration",), _NO_ROPE, types=("glm4v_text",)),
    FamilySpec("glm4v_moe", ("Glm4vMoeForConditionalGeneration",), _NO_ROPE, types=("glm4v_moe_text",)),
    FamilySpec(
        "internvl",
        ("InternVLForConditionalGeneration",),
        (*LOSS, *NORM, *LAYER_NORM, *MODEL),
        also=("rope", "swiglu", "geglu"),
    ),
    FamilySpec(
        "smolvlm",
        ("SmolVLMForConditionalGeneration",),
        (*LOSS, *NORM, *LAYER_NORM, *MODEL),
        also=("rope", "swiglu", "geglu"),
    ),
)
