"""TRL's own trainers with `use_liger_kernel=True` through the shim, against the same trainers without it.

Up to 1.12 the switch of DPO, KTO and GRPO means losses of `liger_kernel.chunked_loss` on hidden states, and SFT's the
fused linear cross entropy; 1.13 has copies of these losses, and from 1.14 on it means the layers alone, under TRL's own
fused head. Each must train as without it.

One process trains all of them, tiny, on the CPU. Skipped where trl and datasets are not installed (TRL=1.16.0 bash
ci/cpu.sh installs them beside the environment and runs this).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from liger_hw import compat

pytestmark = pytest.mark.cpu
TRAINERS = ("sft", "dpo", "kto", "grpo")
STEPS = 3

CODE = """
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
    model().save_pretrained(folder + "/model")  # GRPO loads its reference model from there
    tokenizer.save_pretrained(folder + "/model")
    rows = Dataset.from_list([{"prompt": piece[:20]} for piece in pieces])
    args = trl.GRPOConfig(folder, max_completion_length=8, num_generations=4, num_iterations=2, beta=0.04, **options)
    reward = lambda completions, **_: [float(len(set(c))) for c in completions]
    return trl.GRPOTrainer(folder + "/model", reward_funcs=reward, args=args, train_dataset=rows,
                           processing_class=tokenizer)


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


found = {}
for kind in TRAINERS:
    plain, patched = trained(kind), trained(kind, use_liger_kernel=True)
    before, after = plain.pop("parameters"), patched.pop("parameters")
    start = dict(model().named_parameters())
    moved = max(float((p - start[name]).abs().max()) for name, p in before.items())
    apart = max(float((p - after[name]).abs().max()) for name, p in before.items())
    found[kind] = {"plain": plain, "patched": patched, "moved": moved, "apart": apart}
json.dump(found, open(sys.argv[1], "w"))
"""


def _missing() -> str:
    return ", ".join(
        name for name in ("trl", "datasets", "tokenizers", "accelerate") if not importlib.util.find_spec(name)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each trainer's log without and with the switch, and how far its parameters moved and came apart."""
    if missing := _missing():
        pytest.skip(f"{missing} not installed (TRL=1.16.0 bash ci/cpu.sh)")
    out = tmp_path_factory.mktemp("trl") / "found.json"
    paths = [str(compat.PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_DATASETS_CACHE": str(out.parent / "datasets"), "TRANSFORMERS_VERBOSITY": "error"}
    code = CODE.replace("STEPS", str(STEPS)).replace("TRAINERS", repr(TRAINERS))
    done = subprocess.run([sys.executable, "-c", code, str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def _layers_only() -> bool:
    """Whether this TRL's switch means the layers alone: it has no use for liger's losses any more."""
    return tuple(int(part) for part in importlib.metadata.version("trl").split(".")[:2]) >= (1, 14)


@pytest.mark.parametrize("kind", TRAINERS)
def test_it_runs_on_liger_hw(trained, kind):
    plain, patched = trained[kind]["plain"], trained[kind]["patched"]
    assert {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"} <= set(patched["ours"])
    fused = not _layers_only()
    if kind == "sft":
        assert ("LlamaForCausalLM" in patched["ours"]) == fused
    else:
        assert patched["loss"].startswith("liger_hw.chunked_loss") == fused
    assert not plain["ours"] and plain["loss"] == "builtins"


@pytest.mark.parametrize("kind", TRAINERS)
def test_it_trains_as_without(trained, kind):
    """Every step's loss, gradient norm and whatever else both arms log, and the parameters after the last step.

    Not the mean logits: Liger's losses, and so ours, count prompt and padding too (KTO: their sum), TRL does not.
    """
    found = trained[kind]
    plain, patched = found["plain"]["logged"], found["patched"]["logged"]
    assert len(plain) == len(patched) == STEPS
    for a, b in zip(plain, patched):
        assert a["grad_norm"] > 0
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5, abs=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        same = [name for name in a if name in b and not name.startswith(("logits/", "step_time", "profiling"))]
        assert {name: b[name] for name in same} == pytest.approx({name: a[name] for name in same}, rel=1e-3, abs=1e-4)
    assert found["moved"] > 1e-3 and found["apart"] < 1e-2 * found["moved"]
