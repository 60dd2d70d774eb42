"""The families with a function of their own. A new family is one line here.

State only what differs from a Llama: other keywords, another module name, more model types. In a family of several
towers a class patch changes the family's own classes; what it takes from other families (a CLIP or SigLIP tower, a
Llama) is patched in its models made from then on.
"""

from __future__ import annotations

from .spec import GEGLU, LAYER_NORM, LOSS, MODEL, NO_ROPE, NORM, ROPE, SWIGLU, FamilySpec

_NO_ROPE = (*NO_ROPE, *LOSS, *NORM, *SWIGLU, *MODEL)
_NO_SWIGLU = (*LOSS, *NORM, ("swiglu", False), *MODEL)
_EITHER_LOSS = (("cross_entropy", False), ("fused_linear_cross_entropy", None))
_GEMMA = (*LOSS, *NORM, *GEGLU, *MODEL)
_GEMMA_VISION = (*ROPE, *LOSS, *LAYER_NORM, *NORM, *GEGLU, *MODEL)
_LLAMA_VISION = (*ROPE, *LOSS, *LAYER_NORM, *NORM, *SWIGLU, *MODEL)
_BORROWED = (*LOSS, *NORM, *LAYER_NORM, *MODEL)

SPECS = (
    # Text models with one MLP a layer
    FamilySpec("llama", ("LlamaForCausalLM",)),
    FamilySpec("mistral", ("MistralForCausalLM",)),
    FamilySpec("ministral", ("MinistralForCausalLM",)),
    FamilySpec("smollm3", ("SmolLM3ForCausalLM",)),
    FamilySpec("granite", ("GraniteForCausalLM",), (*ROPE, *_EITHER_LOSS, *NORM, *SWIGLU, *MODEL)),
    FamilySpec("qwen2", ("Qwen2ForCausalLM",)),
    FamilySpec("qwen3", ("Qwen3ForCausalLM",)),
    FamilySpec("phi3", ("Phi3ForCausalLM",)),
    FamilySpec("olmo2", ("Olmo2ForCausalLM",)),
    FamilySpec("olmo3", ("Olmo3ForCausalLM",)),
    FamilySpec("exaone4", ("Exaone4ForCausalLM",)),
    FamilySpec("falcon_h1", ("FalconH1ForCausalLM",)),
    FamilySpec("hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM",)),
    FamilySpec("glm4", ("Glm4ForCausalLM",), _NO_ROPE),
    FamilySpec("gemma", ("GemmaForCausalLM",), (*ROPE, *_GEMMA)),
    FamilySpec("gemma2", ("Gemma2ForCausalLM",), (*ROPE, *_GEMMA)),
    FamilySpec("gemma3_text", ("Gemma3ForCausalLM",), (*ROPE, *_GEMMA), module="gemma3"),
    FamilySpec("gemma4_text", ("Gemma4ForCausalLM",), (*NO_ROPE, *_GEMMA), module="gemma4"),
    FamilySpec("qwen3_5", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _NO_ROPE, types=("qwen3_5_text",)),
    FamilySpec(
        "nemotron", ("NemotronForCausalLM",), (("relu_squared", True), *LOSS, *MODEL), also=("rope", "layer_norm")
    ),
    # Text models whose layers choose among experts
    FamilySpec("mixtral", ("MixtralForCausalLM",)),
    FamilySpec("qwen3_moe", ("Qwen3MoeForCausalLM",)),
    FamilySpec("hunyuan_v1_moe", ("HunYuanMoEV1ForCausalLM",)),
    FamilySpec("gpt_oss", ("GptOssForCausalLM",), (*ROPE, *_NO_SWIGLU)),
    FamilySpec("qwen3_next", ("Qwen3NextForCausalLM",), _NO_ROPE),
    FamilySpec(
        "qwen3_5_moe",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        _NO_ROPE,
        types=("qwen3_5_moe_text",),
    ),
    FamilySpec("deepseek_v2", ("DeepseekV2ForCausalLM",), _NO_ROPE),
    FamilySpec("deepseek_v3", ("DeepseekV3ForCausalLM",), _NO_ROPE),
    FamilySpec("deepseek_v4", ("DeepseekV4ForCausalLM",), (*NO_ROPE, *_NO_SWIGLU)),
    # Models that see: a text model and the towers that feed it
    FamilySpec(
        "llava",
        ("LlavaForConditionalGeneration",),
        (*LOSS, *MODEL),
        also=("rope", "rms_norm", "layer_norm", "swiglu", "geglu"),
    ),
    FamilySpec(
        "llama4",
        ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        (*ROPE, *LOSS, *NORM, *SWIGLU, *MODEL, *LAYER_NORM),
        types=("llama4_text",),
    ),
    FamilySpec(
        "mllama", ("MllamaForConditionalGeneration", "MllamaForCausalLM"), _LLAMA_VISION, types=("mllama_text_model",)
    ),
    FamilySpec("muse_glimmer", ("MuseGlimmerForConditionalGeneration",), _LLAMA_VISION, types=("muse_glimmer_text",)),
    FamilySpec("pixtral", ("PixtralVisionModel",), (*ROPE, *NORM, *SWIGLU, *MODEL)),
    FamilySpec("paligemma", ("PaliGemmaForConditionalGeneration",), _GEMMA_VISION),
    FamilySpec("gemma3", ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"), _GEMMA_VISION),
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
    FamilySpec("qwen3_vl", ("Qwen3VLForConditionalGeneration",), (*ROPE, *_NO_SWIGLU), types=("qwen3_vl_text",)),
    FamilySpec("qwen3_vl_moe", ("Qwen3VLMoeForConditionalGeneration",), types=("qwen3_vl_moe_text",)),
    FamilySpec("glm4v", ("Glm4vForConditionalGeneration",), _NO_ROPE, types=("glm4v_text",)),
    FamilySpec("glm4v_moe", ("Glm4vMoeForConditionalGeneration",), _NO_ROPE, types=("glm4v_moe_text",)),
    FamilySpec("internvl", ("InternVLForConditionalGeneration",), _BORROWED, also=("rope", "swiglu", "geglu")),
    FamilySpec("smolvlm", ("SmolVLMForConditionalGeneration",), _BORROWED, also=("rope", "swiglu", "geglu")),
)
