"""Medusa-style training: extra heads predict the tokens after the next, each a residual block and its own linear head.

    python examples/medusa.py [--heads 3 --hidden 128 ...]

Every head's loss is a fused linear cross entropy, so the logits of no head ever exist: with plain torch they are
heads + 1 tensors of [tokens, vocabulary].
"""

import torch
import torch.nn.functional as F
from common import arguments, compare, tiny_llama, windows

from liger_hw.transformers import apply_liger_kernel_to_llama
from liger_hw.transformers.functional import liger_fused_linear_cross_entropy


class Head(torch.nn.Module):
    """hidden -> hidden + silu(linear(hidden)) -> logits"""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.block = torch.nn.Linear(hidden, hidden)
        self.out = torch.nn.Linear(hidden, vocab, bias=False)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.silu(self.block(hidden))


def train(options, fused: bool, steps) -> list[float]:
    model = tiny_llama(options)
    if fused:
        apply_liger_kernel_to_llama(model=model)
    sizes = options.hidden, model.config.vocab_size
    heads = torch.nn.ModuleList(Head(*sizes) for _ in range(options.heads)).to(model.device, model.dtype)
    optimizer = torch.optim.AdamW([*model.parameters(), *heads.parameters()], lr=options.lr)
    losses = []
    for batch in windows(options.batch * options.steps, options.seq).split(options.batch):
        batch = batch.to(model.device)
        hidden = model.model(input_ids=batch).last_hidden_state
        loss = 0.0
        for ahead, head in enumerate([model, *heads], start=1):
            features = (hidden if ahead == 1 else head.features(hidden))[:, :-ahead].flatten(0, 1)
            weight = model.lm_head.weight if ahead == 1 else head.out.weight
            target = batch[:, ahead:].flatten()
            if fused:
                one = liger_fused_linear_cross_entropy(features, weight, target)
            else:
                one = F.cross_entropy(F.linear(features, weight).float(), target)
            loss = loss + 0.8 ** (ahead - 1) * one
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        steps()
    return losses


if __name__ == "__main__":
    compare(train, arguments(__doc__, heads=3))
