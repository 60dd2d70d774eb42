"""Preference tuning (DPO) with TRL: the policy is patched, the trainer is TRL's own.

    pip install trl; python examples/trl_dpo.py [--steps 6 --hidden 128 ...]

The data is made here: the chosen completion goes on as the text does, the rejected one is the text backwards.
"""

import tempfile

from common import BYTES, Timed, arguments, compare, text, tiny_llama
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from liger_hw.transformers import apply_liger_kernel_to_llama


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character of the text; made here because nothing may be downloaded."""
    letters = sorted({*text().decode()} - {"\0"})[: BYTES - 2]
    words = {"<pad>": 0, "<eos>": 1, **{letter: i + 2 for i, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def preferences(count: int, length: int) -> Dataset:
    half, words = length // 2, text().decode()
    words *= -(-count * length // len(words))
    pieces = [words[i * length : (i + 1) * length] for i in range(count)]
    rows = [{"prompt": p[:half], "chosen": p[half:], "rejected": p[half:][::-1]} for p in pieces]
    return Dataset.from_list(rows)


def train(options, patch: bool, steps) -> list[float]:
    model = tiny_llama(options)
    if patch:
        apply_liger_kernel_to_llama(model=model)
    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            max_length=options.seq,
            learning_rate=options.lr,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=options.device.type == "cpu",
            bf16=options.device.type != "cpu",
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = DPOTrainer(
            model,
            ref_model=tiny_llama(options),
            args=settings,
            train_dataset=preferences(options.batch * options.steps, options.seq - 2),
            processing_class=byte_tokenizer(),
            callbacks=[Timed(steps)],
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    options = arguments(__doc__, lr=1e-4, steps=6)
    compare(train, options, 2 * options.batch * options.seq)  # the chosen and the rejected
