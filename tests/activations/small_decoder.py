"""A small decoder built of our layers, plain enough to see what autograd keeps of it."""

from __future__ import annotations

import types

import torch

from liger_hw.kernels.norms.rms_norm import LigerRMSNorm
from liger_hw.kernels.pointwise.swiglu import LigerSwiGLUMLP

HIDDEN, WIDE, TOKENS = 32, 48, 10


class Layer(torch.nn.Module):
    """norm -> q, k, v -> attention -> o, norm -> gated MLP, with residuals."""

    def __init__(self, mlp=LigerSwiGLUMLP, act="silu"):
        super().__init__()
        config = types.SimpleNamespace(hidden_size=HIDDEN, intermediate_size=WIDE, hidden_act=act, mlp_bias=False)
        self.before, self.behind = LigerRMSNorm(HIDDEN), LigerRMSNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(HIDDEN, HIDDEN, bias=i == 1) for i in range(4))
        self.mlp = mlp(config)

    def forward(self, hidden_states):
        y = self.before(hidden_states)
        heads = (part(y).view(*y.shape[:-1], 4, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = hidden_states + self.o(mixed.transpose(1, 2).reshape(hidden_states.shape))
        return x + self.mlp(self.behind(x))


class Decoder(torch.nn.Module):
    """`count` layers with weights from a fixed seed, in training mode."""

    def __init__(self, count=3, dtype=torch.float32, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(**options) for _ in range(count))
        self.to(dtype).train()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def some_input(dtype=torch.float32, tokens=TOKENS):
    x = torch.randn(2, tokens // 2, HIDDEN, generator=torch.Generator().manual_seed(3))
    return x.to(dtype).requires_grad_()


def gradients(model, around, *, x=None, backward_inside=False):
    """Gradients of the input and of every parameter that trains, after a forward inside `around` and a backward."""
    model.zero_grad(set_to_none=True)
    x = some_input(next(model.parameters()).dtype) if x is None else x
    with around:
        loss = model(x).float().square().mean()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def identical(found, expected):
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))
