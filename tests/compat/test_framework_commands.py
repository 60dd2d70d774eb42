"""Frameworks' training commands on a CPU, with the shim and without.

Each needs another transformers, so it has its own environment: FRAMEWORKS=axolotl bash ci/cpu.sh, or llamafactory, or
ms-swift. Skipped elsewhere. verl needs NCCL and NeMo AutoModel CUDA: test_frameworks.py calls parts of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from liger_hw import compat

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "ci" / "frameworks"

MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer.train_from_iterator(["the quick brown fox"], trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", "<pad>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
tokenizer.save_pretrained(sys.argv[1])
LlamaForCausalLM(LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1024)).save_pretrained(sys.argv[1])
"""
PARTS = ("LlamaForCausalLM", "LlamaMLP", "LlamaRMSNorm")
AT_EXIT = f"""
import atexit, gc, sys


@atexit.register
def print_ours():
    llama = sys.modules.get("transformers.models.llama.modeling_llama")
    if llama is not None:
        forwards = [(name, getattr(llama, name).forward) for name in {PARTS}]
        objects = gc.get_objects()
        forwards += [(type(o).__name__, o.forward) for o in objects if type(o).__name__ in {PARTS}]
        print("OURS", *sorted({{name for name, forward in forwards if hasattr(forward, "_liger_hw_part")}}), flush=True)
"""
"""Prints, when the command ends, the classes whose forward, or that of an instance, is ours."""

AXOLOTL = """
base_model: model
datasets: [{path: data.json, ds_type: json, type: alpaca}]
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 3
learning_rate: 1e-3
optimizer: adamw_torch
lr_scheduler: cosine
bf16: false
fp16: false
tf32: false
attn_implementation: sdpa
special_tokens: {pad_token: "<pad>"}
logging_steps: 1
output_dir: out
"""
PLUGIN = """
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
"""
LLAMAFACTORY = """
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset: tiny
dataset_dir: .
template: default
cutoff_len: 64
per_device_train_batch_size: 2
max_steps: 3
learning_rate: 1.0e-3
logging_steps: 1
report_to: none
output_dir: out
use_cpu: true
"""
SWIFT = (
    "--model model --model_type llama --template default --dataset data.jsonl --tuner_type full --max_steps 3 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 1 --learning_rate 1e-3 --logging_steps 1 "
    "--max_length 512 --torch_dtype float32 --output_dir out --report_to none --use_cpu true --save_strategy no "
    "--split_dataset_ratio 0 --dataset_num_proc 1"
)
COMMANDS = {
    "axolotl": (["axolotl.cli.train", "config.yaml"], AXOLOTL, PLUGIN),
    "llamafactory": (["llamafactory.cli", "train", "config.yaml"], LLAMAFACTORY, "enable_liger_kernel: true\n"),
    "ms-swift": (["swift.cli.sft", *SWIFT.split()], "", ["--use_liger_kernel", "true"]),
}
"""Distribution -> (module and arguments, configuration, addition to either for Liger)."""


def _train(name: str, folder: Path, *, liger: bool) -> str:
    words, config, more = COMMANDS[name]
    shutil.rmtree(folder / "out", ignore_errors=True)  # whose checkpoint would be taken up
    (folder / "config.yaml").write_text(config + (more if liger and config else ""))
    paths = [str(compat.PATH)] * liger + [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {"HF_HUB_OFFLINE": "1", "USE_HF": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"LIGER_HW_CPU_REFERENCE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", *words, *(more if liger and not config else [])]
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_it_trains_as_without(name, tmp_path):
    pins = dict(line.strip().split("==") for line in (PINS / f"{name}.txt").read_text().splitlines() if "==" in line)
    for needed in (name, "transformers"):
        try:
            version = importlib.metadata.version(needed)
        except importlib.metadata.PackageNotFoundError:
            version = "none"
        if version != pins[needed]:
            pytest.skip(f"needs {needed} {pins[needed]}, here is {version} (FRAMEWORKS={name} bash ci/cpu.sh)")
    subprocess.run([sys.executable, "-c", MODEL, str(tmp_path / "model")], check=True, timeout=120)
    rows = [("what is two plus two?", "four. " + "the quick brown fox " * i) for i in range(1, 9)]
    alpaca = [{"instruction": question, "input": "", "output": answer} for question, answer in rows]
    (tmp_path / "data.json").write_text(json.dumps(alpaca))
    (tmp_path / "dataset_info.json").write_text('{"tiny": {"file_name": "data.json"}}')
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    if name == "llamafactory":  # it imports torchaudio without use, whose wheel does not load beside torch's for CPUs
        (tmp_path / "torchaudio.py").write_text("__version__ = '0'\n")
    losses = []
    for liger in (False, True):
        printed = _train(name, tmp_path, liger=liger)
        losses.append([float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)])
        assert set(re.findall(r"^OURS (.*)$", printed, re.MULTILINE)) - {""} == ({" ".join(PARTS)} if liger else set())
    assert len(losses[0]) == 3 and losses[0][2] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
