"""What hooks of a program do to tensors inside of layers: at every level the gradients are those of keeping them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import pytest
import torch
from small_decoder import Decoder, gradients, identical

import liger_hw

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]


class _Alias(torch.autograd.Function):
    """The same memory, written on the way if `factor` is not 1."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor, alias = factor, t.detach()
        return alias if factor == 1 else alias.mul_(factor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient * ctx.factor, None


def _quietly(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.mul_(1.5)


def _part(t: torch.Tensor) -> None:
    t[..., :3] = 0.5


PASSED_ON: dict[str, Callable[[torch.Tensor], Any]] = {
    "written": lambda t: t.mul_(1.5),
    "written without gradients": _quietly,
    "a part written": _part,
    "an alias written": lambda t: _Alias.apply(t, 1.5),
    "a detached alias written": lambda t: _quietly(t.detach()),
    "an alias": lambda t: _Alias.apply(t, 1.0),
    "an alias of a clone": lambda t: _Alias.apply(t.clone(), 1.5),
    "a view": lambda t: t.view(-1, t.shape[-1]).view(t.shape),
    "a part of a view, written": lambda t: t.unsqueeze(0)[0].sigmoid_(),
    "a copy in other strides": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "halves": lambda t: torch.cat(t.chunk(2, -1)[::-1], -1),
    "other memory": lambda t: setattr(t, "data", t.data * 1.5),
    "written through data": lambda t: _quietly(t.data),
    "written through numpy": lambda t: t.detach().view(torch.uint8).numpy().__setitem__((..., 1), 62),
    "written through another tensor": lambda t: _quietly(torch.empty(0).set_(t.detach())),
    "another dtype and back": lambda t: t.double().to(t.dtype),
}
PLACES = ["before", "q", "behind", "mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def outcome(model: Decoder, level: Any, autocast: bool, places: list[str], change: Callable) -> Any:
    """Gradients, or the error, with the change made to inputs or outputs of these modules of every layer."""
    first = lambda args: args[0] if isinstance(args, tuple) else args  # noqa: E731
    hook = lambda _, args, *output: change(output[0] if output else first(args))  # noqa: E731
    with contextlib.ExitStack() as stack:
        for layer in model.layers:
            for place in places:
                module = layer.get_submodule(place.removesuffix(" (input)"))
                register = module.register_forward_pre_hook if "(" in place else module.register_forward_hook
                stack.callback(register(hook).remove)
        stack.enter_context(liger_hw.activations(level, model))
        try:
            return gradients(model, torch.autocast("cpu", torch.bfloat16, enabled=autocast))
        except RuntimeError as error:
            return str(error)  # where torch, too, notices a write


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", PASSED_ON)
def test_what_hooks_pass_on(change, autocast):
    model, compared = Decoder(count=1), 0
    inputs = [f"{place} (input)" for place in PLACES]
    for places in [[place] for place in PLACES + inputs] + [["before", "mlp.up_proj (input)"]]:
        expected = outcome(model, "keep", autocast, places, PASSED_ON[change])
        for level in () if isinstance(expected, str) else ("cheap", ["mlp"]):
            found = outcome(model, level, autocast, places, PASSED_ON[change])
            assert not isinstance(found, str), (places, level, found)
            assert identical(found, expected), (places, level)
            compared += 1
    assert compared > 8
