"""Tiny programs with the trainers of TRL, for a process of their own: `trained(kind, **options)` trains one."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness import python


def found_by(code: str, trainers: tuple[str, ...], folder: Path, *paths: str) -> dict[str, Any]:
    """What the program leaves in `found`, for each of TRAINERS; skips where TRL is not installed."""
    for name in ("trl", "datasets", "tokenizers", "accelerate"):
        if not importlib.util.find_spec(name):
            pytest.skip(f"{name} not installed (TRL=1.16.0 bash ci/cpu.sh)")
    out = folder / "found.json"
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["HF_DATASETS_CACHE"] = str(folder / "datasets")
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    code = f"STEPS, TRAINERS = {STEPS}, {trainers}\n{PROGRAM}{code}\njson.dump(found, open(sys.argv[1], 'w'))"
    python("-c", code, out, env=environment)
    return json.loads(out.read_text())


STEPS = 3
PROGRAM = """
import itertools, json, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
import trl

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
words = {"<pad>": 0, "<eos>": 1, **{letter: i + 2 for i, letter in enumerate(LETTERS)}}
tokens = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
text = "".join(f"{a}{b} {b}{a}. " for a, b in itertools.permutations(LETTERS[:26], 2))
pieces = [text[60 * i : 60 * i + 60] for i in range(12)]


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=1, pad_token_id=0))


def trainer(kind, folder, **options):
    options |= dict(max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, save_strategy="no", report_to=[],
                    use_cpu=True, bf16=False, disable_tqdm=True, learning_rate=1e-3, gradient_checkpointing=False,
                    seed=0)
    if kind == "sft":
        rows = Dataset.from_list([{"text": piece} for piece in pieces])
        return trl.SFTTrainer(model(), trl.SFTConfig(folder, max_length=64, **options), train_dataset=rows,
                              processing_class=tokenizer)
    if kind == "dpo":
        rows = Dataset.from_list([{"prompt": p[:30], "chosen": p[30:], "rejected": p[30:][::-1]} for p in pieces])
        return trl.DPOTrainer(model(), ref_model=model(), args=trl.DPOConfig(folder, max_length=64, **options),
                              train_dataset=rows, processing_class=tokenizer)
    if kind == "kto":
        rows = [{"prompt": p[:30], "completion": p[30:], "label": i % 2 == 0} for i, p in enumerate(pieces)]
        rows = Dataset.from_list(rows)
        return trl.KTOTrainer(model(), ref_model=model(), args=trl.KTOConfig(folder, max_length=64, **options),
                              train_dataset=rows, processing_class=tokenizer)
    model().save_pretrained(folder + "/model")  # both load their reference model from there
    tokenizer.save_pretrained(folder + "/model")
    rows = Dataset.from_list([{"prompt": piece[:20]} for piece in pieces])
    make, settings = (trl.RLOOTrainer, trl.RLOOConfig) if kind == "rloo" else (trl.GRPOTrainer, trl.GRPOConfig)
    args = settings(folder, max_completion_length=8, num_generations=4, num_iterations=2, beta=0.04, **options)
    reward = lambda completions, **_: [float(len(set(c))) for c in completions]
    return make(folder + "/model", reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer)


def trained(kind, **options):
    with tempfile.TemporaryDirectory() as folder:
        one = trainer(kind, folder, **options)
        one.train()
    ours = {type(m).__name__ for m in one.model.modules() if hasattr(m.forward, "_liger_hw_part")}
    return {
        "logged": [entry for entry in one.state.log_history if "loss" in entry],
        "parameters": {name: p.detach().double() for name, p in one.model.named_parameters()},
        "ours": sorted(ours),
        "loss": type(getattr(one, "liger_loss", None)).__module__,
    }


def compared(plain, ours):
    # Both, and how far the parameters moved and came apart.
    before, after = plain.pop("parameters"), ours.pop("parameters")
    start = dict(model().named_parameters())
    moved = max(float((p - start[name]).abs().max().detach()) for name, p in before.items())
    apart = max(float((p - after[name]).abs().max()) for name, p in before.items())
    return {"plain": plain, "ours": ours, "moved": moved, "apart": apart}
"""
