"""Training with Lightning: the model is patched in `configure_model`, and nothing else differs.

    pip install lightning; python examples/lightning_sft.py --model Qwen/Qwen3-0.6B --text my.txt

`--unpatched` trains without liger_hw, to compare.
"""

import argparse
from pathlib import Path

import lightning
import torch
from local import load, rows

import liger_hw

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--text", type=Path, help="a text file to train on (default: Python's manual)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--unpatched", action="store_true")
options = parser.parse_args()


class Tuning(lightning.LightningModule):
    tokenizer = None

    def configure_model(self) -> None:
        if self.tokenizer is None:
            self.model, self.tokenizer = load(options.model)
            if not options.unpatched:
                print(liger_hw.patch(self.model))

    def train_dataloader(self):
        ids = rows(self.tokenizer, options.text, options.seq, options.batch * options.steps)
        return torch.utils.data.DataLoader(ids, batch_size=options.batch)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        print(f"loss {loss.item()}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(max_steps=options.steps, devices=1, logger=False, enable_checkpointing=False)
trainer.fit(Tuning())
