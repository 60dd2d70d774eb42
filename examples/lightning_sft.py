"""Training with Lightning: the model is patched in `configure_model`, and nothing else differs.

pip install lightning; python examples/lightning_sft.py [--steps 10 --hidden 128 ...]
"""

import logging

import lightning
import torch
from common import arguments, compare, tiny_llama, windows

from liger_hw.transformers import apply_liger_kernel_to_llama


class Tuning(lightning.LightningModule):
    def __init__(self, options, patch: bool, steps) -> None:
        super().__init__()
        self.options, self.patch, self.steps = options, patch, steps
        self.model, self.losses = None, []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_llama(self.options)
            if self.patch:
                apply_liger_kernel_to_llama(model=self.model)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_) -> None:
        self.steps()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.options.lr)


def train(options, patch: bool, steps) -> list[float]:
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator="cpu" if options.device.type == "cpu" else "auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Tuning(options, patch, steps)
    batches = torch.utils.data.DataLoader(windows(options.batch * options.steps, options.seq), batch_size=options.batch)
    trainer.fit(module, batches)
    return module.losses


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    compare(train, arguments(__doc__))
