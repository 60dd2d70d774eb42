"""Supervised fine-tuning with transformers.Trainer, unpatched and patched by one line.

    python examples/trainer_sft.py [--steps 10 --hidden 128 ...]

Where only liger-kernel's switch is to be had, `PYTHONPATH=$(liger-hw shim)` makes `TrainingArguments(
use_liger_kernel=True)` mean liger_hw, with nothing else changed.
"""

import tempfile

from common import Timed, arguments, compare, tiny_llama, windows
from transformers import Trainer, TrainingArguments

from liger_hw.transformers import apply_liger_kernel_to_llama


def train(options, patch: bool, steps) -> list[float]:
    model = tiny_llama(options)
    if patch:
        print(apply_liger_kernel_to_llama(model=model))
    rows = [{"input_ids": row, "labels": row} for row in windows(options.batch * options.steps, options.seq)]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            logging_steps=1,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=options.device.type == "cpu",
            disable_tqdm=True,
        )
        trainer = Trainer(model, settings, train_dataset=rows, callbacks=[Timed(steps)])
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    compare(train, arguments(__doc__))
