"""Gated RMSNorms of linear attention and state space layers: recognised, patched, and left alone where they differ."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import liger_hw
from liger_hw.transformers import probing

FAMILIES = {  # module, class, arguments after the width, what is found
    "qwen3_next": ("Qwen3NextRMSNormGated", {}, "silu after the norm, llama"),
    "qwen3_5": ("Qwen3_5RMSNormGated", {}, "silu after the norm, llama"),
    "kimi_linear": ("KimiLinearRMSNormGated", {}, "sigmoid after the norm, gemma"),
    "mamba2": ("MambaRMSNormGated", {"group_size": 64}, "silu before the norm, llama"),
    "bamba": ("BambaRMSNormGated", {"group_size": 16}, "silu before the norm, llama, in groups"),
    "falcon_h1": (
        "FalconH1RMSNormGated",
        {"n_groups": 2, "norm_before_gate": False},
        "silu before the norm, gemma, in groups",
    ),
}


def norm_of(family: str) -> tuple[nn.Module, str]:
    """The family's norm and what is found; before groups, transformers' norms have none."""
    name, arguments, words = FAMILIES[family]
    cls = getattr(pytest.importorskip(f"transformers.models.{family}.modeling_{family}"), name)
    if not arguments.keys() <= inspect.signature(cls).parameters.keys():
        arguments, words = {}, words.removesuffix(", in groups")
    return cls(64, **arguments), words


def drops_an_axis(norm: nn.Module) -> bool:
    """Whether the norm returns one token's row without its axis, as falcon_h1's of transformers before 5.23 does."""
    return norm(torch.ones(1, 1, 64), torch.ones(1, 1, 64)).shape != (1, 1, 64)


class Layer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x, gate):
        return self.norm(x, gate)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_norm_computes_the_same(family, generator):
    norm, words = norm_of(family)
    if drops_an_axis(norm):
        pytest.skip("this transformers' norm drops the axis of one token: the test below")
    model = Layer(norm)
    nn.init.normal_(model.norm.weight)
    x, gate, dy = (torch.randn(2, 3, 64, generator=generator) for _ in range(3))
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        results = []
        for patched in (False, True):
            report = liger_hw.patch(model) if patched else None
            if report is not None:
                (row,) = [row for row in report.rows if row.kernel == "gated_rms_norm"]
                assert (row.part, row.state, row.variant) == ("rms_norm", "patched", words)
            leaves = [x.to(dtype).requires_grad_(), gate.to(dtype).requires_grad_(), model.norm.weight]
            y = model(*leaves[:2])
            results.append((y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))))
            if report is not None:
                report.revert()
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
        for a, b in zip(*results):
            torch.testing.assert_close(b, a, **tolerance)


def test_a_norm_that_drops_an_axis_is_left_alone():
    norm, _ = norm_of("falcon_h1")
    if not drops_an_axis(norm):
        pytest.skip("this transformers' norm keeps the axis of one token")
    (row,) = [row for row in liger_hw.patch(Layer(norm)).rows if row.kernel == "gated_rms_norm"]
    assert row.state == "left alone: of [1, 1, 64] in training it is no gated_rms_norm"


class Doubled(nn.Module):
    """A gated norm but for a factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x, gate=None):
        h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        h = self.weight * h.to(x.dtype)
        return h if gate is None else (h * self.factor * nn.functional.silu(gate.float())).to(x.dtype)


class DoubledRMSNorm(Doubled):
    factor = 2.0


class PlainRMSNorm(Doubled):
    factor = 1.0


def test_what_differs_is_left_alone(generator):
    """A factor on the gate is refused; without its gate a patched norm runs its own forward."""
    found = probing.recognise(DoubledRMSNorm(32))
    assert isinstance(found, probing.Refused) and found.kernel == "gated_rms_norm"
    model = Layer(PlainRMSNorm(32))
    x, gate = (torch.randn(4, 32, generator=generator) for _ in range(2))
    alone, both = model.norm(x), model.norm(x, gate)
    with liger_hw.patch(model) as report:
        assert [row.state for row in report.rows if row.kernel == "gated_rms_norm"] == ["patched"]
        torch.testing.assert_close(model.norm(x, gate=gate), both)
        for found in (model.norm(x), model.norm(x, None)):
            assert torch.equal(found, alone)
