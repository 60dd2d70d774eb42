"""Text models whose layers choose among experts."""

from __future__ import annotations

from ..spec import LOSS, MODEL, NO_ROPE, NORM, ROPE, SWIGLU, FamilySpec

_NO_ROPE = (*NO_ROPE, *LOSS, *NORM, *SWIGLU, *MODEL)

SPECS = (
    FamilySpec("mixtral", ("MixtralForCausalLM",)),
    FamilySpec("qwen3_moe", ("Qwen3MoeForCausalLM",)),
    FamilySpec("hunyuan_v1_moe", ("HunYuanMoEV1ForCausalLM",)),
    FamilySpec("gpt_oss", ("GptOssForCausalLM",), (*ROPE, *LOSS, *NORM, ("swiglu", False), *MODEL)),
    FamilySpec("qwen3_next", ("Qwen3NextForCausalLM",), _NO_ROPE),
    FamilySpec(
        "qwen3_5_moe",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        _NO_ROPE,
        types=("qwen3_5_moe_text",),
    ),
    FamilySpec("deepseek_v2", ("DeepseekV2ForCausalLM",), _NO_ROPE),
    FamilySpec("deepseek_v3", ("DeepseekV3ForCausalLM",), _NO_ROPE),
    FamilySpec("deepseek_v4", ("DeepseekV4ForCausalLM",), (*NO_ROPE, *LOSS, *NORM, ("swiglu", False), *MODEL)),
)
