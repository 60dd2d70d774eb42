"""Supervised fine-tuning with transformers' Trainer, with or without LoRA.

    python examples/trainer_sft.py --model Qwen/Qwen3-0.6B --text my.txt --lora
    torchrun --nproc-per-node 8 examples/trainer_sft.py --model Qwen/Qwen3-8B --seq 4096 --fsdp

`--fsdp` shards the model over the processes (FSDP2); without it each has a whole copy (DDP), as LoRA wants it.
`--unpatched` trains without liger_hw, to compare.
"""

import argparse
from pathlib import Path

from local import load, lora, rows, sharded
from transformers import Trainer, TrainingArguments

import liger_hw

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--text", type=Path, help="a text file to train on (default: Python's manual)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--lora", action="store_true")
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--unpatched", action="store_true")
options = parser.parse_args()

model, tokenizer = load(options.model)
if options.lora:
    from peft import get_peft_model

    model = get_peft_model(model, lora())
if not options.unpatched:
    print(liger_hw.patch(model))

ids = rows(tokenizer, options.text, options.seq, options.batch * options.steps)
settings = TrainingArguments(
    "out",
    max_steps=options.steps,
    per_device_train_batch_size=options.batch,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    **(sharded(model) if options.fsdp else {}),
)
trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
trainer.train()
for entry in trainer.state.log_history[:-1]:
    print(f"loss {entry['loss']}")
