"""Tiny models of any family, made from its configuration class: random weights, few and narrow layers, fp32.

`tiny_config` sets small sizes, under each family's names for them, and keeps the family's defaults for other values
(activations, norms, multipliers, layer patterns). `_EXTRA` has further values that some families need.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, LAYERS, VOCAB, POSITIONS, EXPERTS = 64, 4, 2, 16, 96, 4, 128, 128, 4

_SIZES = (
    (VOCAB, "vocab_size text_vocab_size vocab_size_per_layer_input audio_vocab_size n_words"),
    (
        HIDDEN,
        "hidden_size d_model n_embd dim embed_dim hidden_dim word_embed_proj_dim embedding_size dim_model lru_width",
    ),
    (HIDDEN, "attention_hidden_size cross_attention_hidden_size emb_dim"),
    (WIDE, "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size dim_ff ff_dim encoder_ffn_dim decoder_ffn_dim"),
    (WIDE, "mlp_hidden_size shared_intermediate_size intermediate_size_mlp dense_intermediate_size"),
    (WIDE, "ffn_intermediate_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers depth decoder_layers encoder_layers num_decoder_layers"),
    (LAYERS, "num_encoder_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads n_head_kv kv_n_heads swa_num_key_value_heads"),
    (HEAD_DIM, "head_dim kv_channels attention_head_dim d_kv global_head_dim attn_head_dim swa_head_dim rotary_dim"),
    (HEAD_DIM, "qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim image_size"),
    (HEAD_DIM, "mamba_d_head mamba_head_dim mamba_d_state ssm_state_size"),
    (POSITIONS, "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx seq_length context_length"),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"),
    (2, "num_experts_per_tok moe_k moe_topk num_selected_experts top_k_experts moe_top_k num_experts_per_token"),
    (2, "linear_num_key_heads eos_token_id"),
    (4, "linear_num_value_heads patch_size"),
    (8, "sliding_window mamba_n_heads mamba_num_heads mamba_chunk_size chunk_size"),
    (32, "moe_intermediate_size expert_intermediate_size moe_ffn_hidden_size shared_expert_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank expert_ffn_hidden_size index_head_dim"),
    (32, "qk_head_dim"),
    (1, "n_group topk_group n_groups mamba_n_groups first_k_dense_replace n_shared_experts num_shared_experts"),
    (1, "bos_token_id"),
    (128, "mamba_d_ssm"),
    (0, "pad_token_id"),
    (True, "is_decoder"),
    (False, "use_cache"),
)
"""(value, names of configuration fields that get it)"""
_VALUES = {name: value for value, names in _SIZES for name in names.split()}
IS_TRANSFORMERS_5 = int(version("transformers").split(".")[0]) >= 5

_DROPOUTS = ("dropout", "drop", "pdrop", "dropout_rate", "dropout_prob", "layerdrop")


def tiny_config(config_class: type, **chosen: Any) -> Any:
    """A small configuration of the class. chosen: values that precede this module's, nested for sub-configurations

    Raises the class's error if it does not accept the sizes.
    """
    chosen_here = {**_EXTRA.get(config_class.__name__, {}), **chosen}
    try:
        default = config_class()
    except Exception:  # its defaults are not valid without the sizes
        default = None
    known = _field_names(config_class, default)
    values = {name: value for name, value in _VALUES.items() if name in known}
    values |= {n: 0.0 for n in known if n.endswith(_DROPOUTS) and isinstance(getattr(default, n, 0.0), float)}
    if "kv_lora_rank" in known:  # multi-head latent attention has as many keys as heads
        values["num_key_value_heads"] = HEADS
    for name, sub_class in (getattr(config_class, "sub_configs", None) or {}).items():
        inner = chosen_here.pop(name, {})
        current = getattr(default, name, None)
        kind = type(current) if hasattr(type(current), "sub_configs") else sub_class
        if isinstance(inner, dict) and hasattr(kind, "to_dict") and (current is not None or inner):
            small = tiny_config(kind, **inner)
            values[name] = small if IS_TRANSFORMERS_5 else small.to_dict()  # in 4 some classes take only dicts
    config = config_class(**{**values, **chosen_here})
    config.use_cache = False
    return config


def _field_names(config_class: type, default: Any) -> set[str]:
    names = set(vars(default)) if default is not None else set()
    for cls in config_class.__mro__:
        if "__init__" in vars(cls):
            names |= set(inspect.signature(cls.__init__).parameters)
        names |= set(getattr(cls, "__annotations__", ()))
        names |= set(getattr(cls, "attribute_map", None) or ())
    mapped = set((getattr(config_class, "attribute_map", None) or {}).keys())
    return names - {"self", "kwargs"} - mapped


_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_MROPE = {"rope_parameters" if IS_TRANSFORMERS_5 else "rope_scaling": _SECTIONS}
_MROPE_WHOLE = {name: {**value, "partial_rotary_factor": 1.0} for name, value in _MROPE.items()}
_INDEXER = {"indexer_budget": 8, "indexer_compress_ratio": 2, "output_gate_type": "silu"}
_EXTRA: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": {"n_group": 1, "num_experts": EXPERTS, "layer_group_size": 2},
    "BigBirdConfig": {"attention_type": "original_full"},
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _SECTIONS),
    },
    "DbrxConfig": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": KV_HEADS, "clip_qkv": 8.0}},
    "Dots3NoteConfig": {"index_n_heads": 2},
    "Dots3NoteTextConfig": {"index_n_heads": 2},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Gemma4AssistantConfig": {"text_config": {"hidden_size_per_layer_input": 0}},
    "Gemma4UnifiedAssistantConfig": {"text_config": {"num_kv_shared_layers": 0}},
    "Glm4vTextConfig": _MROPE_WHOLE,
    "Glm4vMoeTextConfig": {**_MROPE_WHOLE, **({} if IS_TRANSFORMERS_5 else {"partial_rotary_factor": 1.0})},
    "GitConfig": {"vision_config": {"image_size": 4}},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "KimiLinearConfig": {"linear_head_dim": 16, "linear_num_heads": 4},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2Config": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "MllamaTextConfig": {"rope_scaling": {"rope_type": "default"}},
    "Qwen2VLTextConfig": _MROPE,
    "Qwen2_5_VLTextConfig": _MROPE,
    "Qwen3VLTextConfig": {} if IS_TRANSFORMERS_5 else _MROPE,
    "Qwen3VLMoeTextConfig": {} if IS_TRANSFORMERS_5 else _MROPE,
    "Qwen4ExpTextConfig": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, **_INDEXER},
    "ReformerConfig": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    "XmodConfig": {"default_language": "en_XX", "languages": ["en_XX"]},
    "Zamba2Config": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_headdim": 16, "n_mamba_heads": 8},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
"""Configuration class -> values that it needs in addition to, or in place of, the values of `_SIZES`."""


def tiny_model(cls: type, seed: int = 0, **chosen: Any) -> Any:
    """A model of `cls` in training mode. Weights are random, by `seed`, and so large that logits differ clearly."""
    import torch

    config = tiny_config(cls.config_class, **chosen)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = cls(config).float().train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
