"""Preference tuning (DPO) with TRL: the policy is patched, the trainer is TRL's own.

    pip install trl; python examples/trl_dpo.py --model Qwen/Qwen3-0.6B --text my.txt
    torchrun --nproc-per-node 8 examples/trl_dpo.py --model Qwen/Qwen3-8B --seq 2048 --fsdp

The pairs are made here: the chosen completion goes on as the text does, the rejected one is the text backwards.
`--unpatched` trains without liger_hw, to compare.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from local import load, lora, read, sharded
from trl import DPOConfig, DPOTrainer

import liger_hw

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--text", type=Path, help="a text file to train on (default: Python's manual)")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--lora", action="store_true")
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--unpatched", action="store_true")
options = parser.parse_args()

model, tokenizer = load(options.model)
adapters = {"peft_config": lora()} if options.lora else {"ref_model": load(options.model)[0]}
if not options.unpatched:
    print(liger_hw.patch(model))

half, text = options.seq // 2, read(options.text)
starts = range(0, options.seq * options.batch * options.steps, options.seq)
pieces = [(text[at : at + half], text[at + half : at + options.seq - 2]) for at in starts]
pairs = [{"prompt": before, "chosen": after, "rejected": after[::-1]} for before, after in pieces]

settings = DPOConfig(
    "out",
    max_steps=options.steps,
    per_device_train_batch_size=options.batch,
    max_length=options.seq,
    learning_rate=1e-4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=False,
    gradient_checkpointing=False,
    **(sharded(model) if options.fsdp else {}),
)
data = Dataset.from_list(pairs)
trainer = DPOTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer, **adapters)
trainer.train()
for entry in trainer.state.log_history[:-1]:
    print(f"loss {entry['loss']}")
