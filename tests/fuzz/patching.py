"""Random sequences of patches, reverts, copies and hooks: outputs stay the same, and reverting leaves nothing."""

from __future__ import annotations

import copy
import importlib
import random
from pathlib import Path
from typing import Any

import torch
import transformers

from liger_hw.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_mistral, patch, revert

SECONDS = 120
FAMILIES = {"Mistral": apply_liger_kernel_to_mistral, "Llama": apply_liger_kernel_to_llama}
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def attempt(chance: random.Random, folder: Path) -> str:
    name = chance.choice(sorted(FAMILIES))
    modeling = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    before = _held(modeling)
    torch.manual_seed(chance.randrange(1000))
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES)).train()
    ids = torch.randint(50, (2, 9))
    expected, reports, done = _step(model, ids), [], []
    for _ in range(chance.randrange(1, 8)):
        what = chance.choice(["class", "live", "any", "revert", "revert all", "copy", "hook", "step"])
        done.append(what)
        if what == "class":
            reports.append(FAMILIES[name](rope=chance.random() < 0.5, rms_norm=chance.random() < 0.5))
        elif what == "live":
            reports.append(FAMILIES[name](model=model, swiglu=chance.random() < 0.5))
        elif what == "any":
            reports.append(patch(model))
        elif what == "revert" and reports:
            reports.pop(chance.randrange(len(reports))).revert()
        elif what == "revert all":
            revert(model)
        elif what == "copy":
            model = copy.deepcopy(model)
        elif what == "hook":
            model.model.norm.register_forward_hook(lambda *_: None)
        _compare(_step(model, ids), expected, done)
    for report in chance.sample(reports, len(reports)):
        report.revert()
    revert(model)
    for report in reports:  # again, since a later patch can prevent a revert
        report.revert()
    after = _held(modeling)
    left = [place for place in after if after[place] is not before.get(place)]
    assert not left, f"{done}: {left[:5]} are not what they were"
    _compare(_step(model, ids), expected, done)
    return f"{len(done)} steps"


def _step(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def _compare(found: list, expected: list, done: list[str]) -> None:
    for a, b in zip(found, expected):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5), f"{done}: off by {float((a - b).abs().max()):.2g}"


def _held(modeling: Any) -> dict:
    """Every function of a modeling module, and every attribute of its classes."""
    places = {}
    for name, value in vars(modeling).items():
        if isinstance(value, type) and value.__module__ == modeling.__name__:
            places |= {(name, own): held for own, held in vars(value).items() if callable(held)}
        elif callable(value) and not name.startswith("_liger_hw_"):
            places[name] = value
    return places
