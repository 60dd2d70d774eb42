"""Medusa-style training: extra heads predict the tokens after the next, each a residual block and its own linear head.

    python examples/medusa.py --model Qwen/Qwen3-0.6B --heads 3

Every head's loss is a fused linear cross entropy, so the logits of no head ever exist: with plain torch (`--unpatched`)
they are heads + 1 tensors of [tokens, vocabulary].
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from local import load, rows

import liger_hw
from liger_hw.transformers.functional import liger_fused_linear_cross_entropy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--text", type=Path, help="a text file to train on (default: Python's manual)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--heads", type=int, default=3)
parser.add_argument("--unpatched", action="store_true")
options = parser.parse_args()


class Head(torch.nn.Module):
    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.block = torch.nn.Linear(hidden, hidden)
        self.out = torch.nn.Linear(hidden, vocab, bias=False)

    def loss(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = hidden + F.silu(self.block(hidden))
        if options.unpatched:
            return F.cross_entropy(self.out(hidden).float(), target)
        return liger_fused_linear_cross_entropy(hidden, self.out.weight, target)


device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
model, tokenizer = load(options.model)
model.to(device)
if not options.unpatched:
    print(liger_hw.patch(model))
sizes = model.config.hidden_size, model.config.vocab_size
heads = torch.nn.ModuleList(Head(*sizes) for _ in range(options.heads)).to(device, model.dtype)
optimizer = torch.optim.AdamW([*model.parameters(), *heads.parameters()], lr=1e-3)
for batch in rows(tokenizer, options.text, options.seq, options.batch * options.steps).to(device).split(options.batch):
    hidden = model.model(input_ids=batch).last_hidden_state
    loss = model(input_ids=batch, labels=batch).loss
    for ahead, head in enumerate(heads, start=2):
        loss = loss + 0.8 ** (ahead - 1) * head.loss(hidden[:, :-ahead].flatten(0, 1), batch[:, ahead:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item()}")
