"""Problem sizes of a model's launches, from its Hugging Face config.

A model is named by a name in `KNOWN`, the path of a `config.json`, or a Hugging Face id.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping

from .. import files
from ..text import first_line


@dataclass(frozen=True)
class Model:
    """Facts of a decoder that give the sizes of its kernels and of the tensors that its layers keep for backward.

    qk_norm: q and k are normalised, each head separately; joint_qk_norm: all heads of q, and all of k, as one row
    tied: the output head is the embedding; sandwich: norms also after attention and MLP; softcap: of attention scores
    window: of sliding-window attention, 0 for none; positions: maximum sequence length, 0 if unknown
    experts: per layer, of which a token uses top_k; expert_width: their width (0: `intermediate`)
    fused_qkv: one projection gives q, k and v; heads_first: q is laid out by heads, so attention's output is copied
    parallel: attention and MLP take the output of one norm
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    activation: str = "silu"
    rms_norm: bool = True
    qk_norm: bool = False
    layers: int = 32
    tied: bool = False
    sandwich: bool = False
    softcap: bool = False
    experts: int = 0
    window: int = 0
    positions: int = 0
    joint_qk_norm: bool = False
    top_k: int = 0
    expert_width: int = 0
    fused_qkv: bool = False
    heads_first: bool = False
    parallel: bool = False


KNOWN = {  # Hugging Face id -> facts, so that these models need no file and no network
    "mistralai/Mistral-7B-v0.3": Model("mistral-7b", 4096, 14336, 32, 8, 128, 32768, positions=32768),
    "meta-llama/Meta-Llama-3-8B": Model("llama-3-8b", 4096, 14336, 32, 8, 128, 128256, positions=8192),
    "Qwen/Qwen3-8B": Model("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, qk_norm=True, layers=36, positions=40960),
    "google/gemma-2-2b": Model(
        *("gemma-2-2b", 2304, 9216, 8, 4, 256, 256000, "gelu_pytorch_tanh"),
        layers=26,
        tied=True,
        sandwich=True,
        softcap=True,
        positions=8192,
    ),
    "mistralai/Mixtral-8x7B-v0.1": Model(
        "mixtral-8x7b", 4096, 14336, 32, 8, 128, 32000, positions=32768, experts=8, top_k=2
    ),
    "Qwen/Qwen3-30B-A3B": Model(
        *("qwen3-30b-a3b", 2048, 6144, 32, 4, 128, 151936),
        qk_norm=True,
        layers=48,
        positions=40960,
        experts=128,
        top_k=8,
        expert_width=768,
    ),
    "meta-llama/Llama-3.2-1B": Model(
        "llama-3.2-1b", 2048, 8192, 32, 8, 64, 128256, layers=16, tied=True, positions=131072
    ),
}
Sizes = tuple[int, ...]
_SILU, _GELU = ("silu", "swish"), ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_tanh")
_ACTIVATIONS = {
    "swiglu": _SILU,
    "fused_gate_up_swiglu": _SILU,
    "geglu": _GELU,
    "relu_squared": ("relu2", "relu_squared"),
}
"""Op of an MLP -> the names of its activation in configs."""
_HEADS_FIRST = ("exaone4", "gemma3", "hunyuan", "stablelm")
_JOINT_QK_NORM = ("olmo2", "olmo3", "olmoe")
"""Prefixes of the model types with `Model.heads_first` and with `Model.joint_qk_norm`."""


def sizes_of(op: str, model: Model, batch: int, seq: int) -> list[Sizes]:
    """Problem sizes at which `model` launches `op`; empty if it does not, or if the op is not known here."""
    rows = batch * seq
    hidden = [(rows, model.hidden)]
    if op in _ACTIVATIONS:
        return [(rows, model.intermediate)] if model.activation in _ACTIVATIONS[op] else []
    if op == "rms_norm":
        joint = model.joint_qk_norm
        heads = (model.heads, model.kv_heads) if model.qk_norm else ()
        inner = [(rows, n * model.head_dim) if joint else (rows * n, model.head_dim) for n in heads]
        return list(dict.fromkeys(hidden + inner)) if model.rms_norm else inner
    known = {
        "fused_add_rms_norm": hidden if model.rms_norm else [],
        "layer_norm": [] if model.rms_norm else hidden,
        "rope": [(batch, seq, model.heads, model.kv_heads, model.head_dim)],
        "cross_entropy": [(rows, model.vocab)],
        "fused_linear_cross_entropy": [(rows, model.hidden, model.vocab)],
    }
    return known.get(op, [])


def find(name: str) -> Model:
    """The model of a name in `KNOWN`, a `config.json` path or a Hugging Face id. Raises `ValueError`."""
    if (public := known_id(name)) is not None:
        return KNOWN[public]
    if (path := local(name)) is not None:
        return from_config(read_config(path), path.parent.name or name)
    known = ", ".join(model.name for model in KNOWN.values())
    try:
        config = published(name).to_dict()
    except ImportError:
        raise ValueError(f"{name!r} is no file and transformers is not installed; known without it: {known}") from None
    except Exception as error:
        reason = str(error).strip().splitlines()
        why = reason[0].rstrip(".") if reason else type(error).__name__
        near = difflib.get_close_matches(name.lower(), [model.name for model in KNOWN.values()], 1, 0.75)
        hint = f"did you mean {near[0]}? Else give" if near else "give"
        otherwise = f"{hint} the path of a config.json, or one of {known}, known without a download"
        raise ValueError(f"{name!r} is no file, and as a Hugging Face id: {why}; {otherwise}") from None
    return from_config(config, name)


def known_id(name: str) -> str | None:
    """The id in `KNOWN` for a model's id or short name, without regard to owner, hyphens and case; or None."""
    plain = name.lower().replace("-", "")
    for public, model in KNOWN.items():
        if plain in (one.lower().replace("-", "") for one in (public, public.split("/")[1], model.name)):
            return public
    return None


def local(name: str) -> Path | None:
    """The config.json at a path, None for a Hugging Face id. Raises `ValueError` if there is no file."""
    if not name.strip():  # as a path it would be this folder
        raise ValueError("the model's name is empty; '.' means the config.json here")
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.exists():
        return path
    if path != Path(name) or name.endswith(".json") or name.startswith((".", "/", "~")):
        raise ValueError(f"{path}: no such file (looked in {Path.cwd()})")
    return None


def on_meta(name: str) -> Any:
    """A causal language model (the text part of a multimodal model) from its config, on the meta device.

    None for a name in `KNOWN`, without transformers, and for a family that transformers does not know. Raises
    `ValueError` if the config is not of a causal language model.
    """
    if known_id(name) is not None:
        return None
    try:
        import torch
        from transformers import AutoModelForCausalLM

        config = published(name).get_text_config()
    except Exception:  # transformers raises many kinds; `find` has reported a wrong name
        return None
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        reason = first_line(error)
        raise ValueError(f"{name}: transformers makes no causal language model of it ({reason})") from None


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as JSON data. Raises `ValueError`."""
    try:
        config = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no config: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no config: it holds a JSON {type(config).__name__}, not an object")
    return config


def published(name: str) -> Any:
    """The transformers config of a path or a Hugging Face id, from the cache or the hub. Raises if neither has it.

    One request tests whether the hub can be reached, since transformers would retry for a long time. No code from a
    repository is run.
    """
    from transformers import AutoConfig

    path = local(name)
    try:
        return AutoConfig.from_pretrained(path or name, local_files_only=True, trust_remote_code=False)
    except OSError:  # not in the cache
        if path is not None:
            raise
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=5.0)
        except Exception as error:  # the kind depends on the session's library
            raise OSError(f"{constants.ENDPOINT} cannot be reached ({first_line(error)})") from None
    return AutoConfig.from_pretrained(name, trust_remote_code=False)


def from_config(config: Mapping[str, Any], name: str) -> Model:
    """The facts in a Hugging Face config (its text part if multimodal). Raises `ValueError` that names a bad field."""
    if "hidden_size" not in config and isinstance(config.get("text_config"), Mapping):
        config, name = config["text_config"], f"{name}'s language model"

    if config.get("is_encoder_decoder"):
        raise ValueError(f"{name} has an encoder and a decoder; only decoders are known here")

    def field(*names: str, default: int | None = None, least: int = 1) -> int:
        for one in names:
            value = config.get(one)
            is_size = type(value) is int and least <= value < 2**31
            if type(value) in (int, float, str) and not is_size:
                shown, sizes = repr(value)[:20], f"a size is a whole number from {least} to 2**31 - 1"
                raise ValueError(f"{name}: the config's {one} is {shown}; {sizes}")
            if is_size:
                return value
        if default is None:
            raise ValueError(f"{name}: the config has no {' or '.join(names)}")
        return default

    hidden = field("hidden_size", "n_embd", "d_model")
    heads = field("num_attention_heads", "n_head")
    kind = str(config.get("model_type", ""))
    return Model(
        name=name,
        hidden=hidden,
        intermediate=field("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        heads=heads,
        kv_heads=field("num_key_value_heads", default=heads),
        head_dim=field("head_dim", default=max(1, hidden // heads)),
        vocab=field("vocab_size"),
        activation=str(config.get("hidden_activation") or config.get("hidden_act") or "silu"),
        rms_norm=not any(key.startswith("layer_norm_eps") for key in config) or "rms_norm_eps" in config,
        qk_norm=bool(config.get("use_qk_norm", kind.startswith(("qwen3", "gemma3", *_JOINT_QK_NORM)))),
        joint_qk_norm=kind.startswith(_JOINT_QK_NORM),
        layers=field("num_hidden_layers", "n_layer", default=32),
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        sandwich=kind.startswith(("gemma2", "gemma3")),
        softcap=bool(config.get("attn_logit_softcapping")),
        window=max(0, field("sliding_window", default=0, least=-1)) if config.get("use_sliding_window", True) else 0,
        experts=field("num_local_experts", "num_experts", "n_routed_experts", default=0, least=0),
        positions=field("max_position_embeddings", "n_positions", default=0, least=0),
        top_k=field("num_experts_per_tok", "moe_topk", default=0, least=0),
        expert_width=field("moe_intermediate_size", default=0, least=0),
        heads_first=kind.startswith(_HEADS_FIRST),
    )


def with_layers_of(model: Model, source: Any) -> Model:
    """`model` with the norms and the QKV projection that `source` (a live model or one of its layers) has.

    Raises `ValueError` for norms that the planner does not know.
    """
    is_model, norms, fused = hasattr(source, "get_input_embeddings"), Counter(), False
    for name, module in source.named_modules():
        *path, last = name.split(".")
        fused |= last == "qkv_proj"
        if "Norm" in type(module).__name__ and (not is_model or any(part.isdigit() for part in path)):
            weight = getattr(module, "weight", None)
            norms[last, model.hidden if weight is None else getattr(weight, "ds_numel", weight.numel())] += 1
    of_heads = sorted(size for name, size in norms if name[0] in "qk")
    others = [size for name, size in norms if name[0] not in "qk"]
    joint = of_heads == sorted((model.kv_heads * model.head_dim, model.heads * model.head_dim))
    known = joint or of_heads in ([], [model.head_dim] * 2)
    regular = set(norms.values()) == {model.layers if is_model else 1}
    if not known or not regular or others not in ([model.hidden] * n for n in (1, 2, 4)):
        shown = ", ".join(f"{name} ({size}) x{count}" for (name, size), count in norms.items()) or "none"
        raise ValueError(
            f"{model.name}: the planner knows layers with one, two or four norms of the hidden size, and of q and k; "
            f"this model has {shown}; name a level (cheap, mlp, full), or one for each layer, instead"
        )
    facts = {"qk_norm": bool(of_heads), "joint_qk_norm": joint, "fused_qkv": fused}
    return replace(model, **facts, sandwich=len(others) == 4, parallel=len(others) == 1)
