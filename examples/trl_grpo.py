"""Reinforcement learning (GRPO) with TRL: the policy is patched, and TRL's output head runs on our kernels.

    pip install trl; python examples/trl_grpo.py --model Qwen/Qwen3-0.6B --text my.txt
    torchrun --nproc-per-node 8 examples/trl_grpo.py --model Qwen/Qwen3-8B --lora

The reward is a toy: the share of letters in a completion. `--unpatched` trains without liger_hw, to compare.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from local import load, lora, read
from trl import GRPOConfig, GRPOTrainer

import liger_hw
import liger_hw.trl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--text", type=Path, help="a text file whose lines begin the prompts (default: Python's manual)")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--batch", type=int, default=4, help="completions a process makes at a time, all of one prompt")
parser.add_argument("--seq", type=int, default=128, help="tokens of a completion, at most")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--unpatched", action="store_true")
options = parser.parse_args()

model, tokenizer = load(options.model)
if not options.unpatched:
    print(liger_hw.patch(model))
    liger_hw.trl.install()


def letters(completions, **_):
    """One reward a completion."""
    return [sum(map(str.isalpha, one)) / max(1, len(one)) for one in completions]


text = read(options.text)
prompts = [{"prompt": text[at : at + 32]} for at in range(0, 32 * options.batch * options.steps * 8, 32)]
settings = GRPOConfig(
    "out",
    max_steps=options.steps,
    per_device_train_batch_size=options.batch,
    num_generations=options.batch,
    max_completion_length=options.seq,
    learning_rate=1e-4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=False,
    gradient_checkpointing=False,
)
trainer = GRPOTrainer(
    model,
    letters,
    args=settings,
    train_dataset=Dataset.from_list(prompts),
    processing_class=tokenizer,
    peft_config=lora() if options.lora else None,
)
trainer.train()
for entry in trainer.state.log_history[:-1]:
    print(f"loss {entry['loss']}")
