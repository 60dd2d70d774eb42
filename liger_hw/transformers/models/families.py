"""The families that have a function `apply_liger_kernel_to_<family>`. A new family is one line here.

A spec has only the differences from Llama: keywords, module name, more model types. A class patch changes the family's
classes; modules of other families (a CLIP or SigLIP tower, a Llama) are patched in models that are made afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

LOSS = (("cross_entropy", False), ("fused_linear_cross_entropy", True))
ROPE, NO_ROPE = (("rope", True),), (("rope", False),)
NORM, LAYER_NORM = (("rms_norm", True),), (("layer_norm", True),)
SWIGLU, GEGLU = (("swiglu", True),), (("geglu", True),)
MODEL = (("model", None),)

LLAMA_LIKE = (*ROPE, *LOSS, *NORM, *SWIGLU, *MODEL)
"""Keywords of most families' public function, in Liger's order, with their defaults."""


@dataclass(frozen=True)
class FamilySpec:
    """A family of transformers models.

    name: suffix of `apply_liger_kernel_to_<name>` and, by default, of the modeling module
    models: names of its model classes in the modeling module; a class patch examines a sample of each
    parameters: keyword and default of each argument of the public function, in order, with `model`;
    fused_linear_cross_entropy=None means the fused loss unless cross_entropy is true
    module: name of the package in transformers.models; "": `name`
    also: further options, taken as `**kwargs`, whose default is True
    types: values of `config.model_type` for this family besides `name`
    """

    name: str
    models: tuple[str, ...]
    parameters: tuple[tuple[str, bool | None], ...] = LLAMA_LIKE
    module: str = ""
    also: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    @property
    def model_types(self) -> tuple[str, ...]:
        return (self.name, *self.types)

    @property
    def function_name(self) -> str:
        return f"apply_liger_kernel_to_{self.name}"

    @property
    def modeling_module(self) -> str:
        package = self.module or self.name
        return f"transformers.models.{package}.modeling_{package}"


# -- the families ---------------------------------------------------------------------------------------------------

_NO_ROPE = (*NO_ROPE, *LOSS, *NORM, *SWIGLU, *MODEL)
_NO_SWIGLU = (*LOSS, *NORM, ("swiglu", False), *MODEL)
_EITHER_LOSS = (("cross_entropy", False), ("fused_linear_cross_entropy", None))
_GEMMA = (*LOSS, *NORM, *GEGLU, *MODEL)
_GEMMA_VISION = (*ROPE, *LOSS, *LAYER_NORM, *NORM, *GEGLU, *MODEL)
_LLAMA_VISION = (*ROPE, *LOSS, *LAYER_NORM, *NORM, *SWIGLU, *MODEL)
_NORMS_ONLY = (*LOSS, *NORM, *LAYER_NORM, *MODEL)

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
    # Models with vision towers
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
    FamilySpec("internvl", ("InternVLForConditionalGeneration",), _NORMS_ONLY, also=("rope", "swiglu", "geglu")),
    FamilySpec("smolvlm", ("SmolVLMForConditionalGeneration",), _NORMS_ONLY, also=("rope", "swiglu", "geglu")),
)
