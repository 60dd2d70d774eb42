"""What the examples start from: a model by its name and a text; without a connection a tiny one and Python's manual."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def load(name: str):
    """(model, tokenizer) of the hub or of a folder."""
    if not hub_answers():
        constants.HF_HUB_OFFLINE = True  # else every file is tried for half a minute
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto"), AutoTokenizer.from_pretrained(name)
    except OSError:
        print(f"{name} cannot be reached: a tiny Llama with random weights takes its place")
    letters = sorted({*read(None)})
    words = Tokenizer(models.WordLevel({"<eos>": 0, **{c: i + 1 for i, c in enumerate(letters)}}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters) + 1,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config), tokenizer


def lora():
    """Adapters on every linear layer but the output head."""
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")


def sharded(model) -> dict:
    """Arguments of a trainer of transformers or TRL that shard the model's layers over the processes by FSDP2."""
    layer = type(model.model.layers[0]).__name__
    return {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": [layer]},
    }


def hub_answers() -> bool:
    """Whether there is a connection, by one request."""
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True


def read(path: Path | None) -> str:
    return path.read_text() if path else "\n\n".join(topics[name] for name in sorted(topics))


def rows(tokenizer, path: Path | None, length: int, count: int) -> torch.Tensor:
    """[count, length] token ids of the text, from its start again where it ends."""
    ids = torch.tensor(tokenizer(read(path)[: 8 * length * count]).input_ids)
    return ids.repeat(-(-count * length // len(ids)))[: count * length].view(count, length)
