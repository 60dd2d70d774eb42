"""Calls to be measured: inputs, gradients of outputs, and tensors to restore."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from ..autotune.record import tensors_in


@dataclass
class Inputs:
    """Arguments of one call, and the gradients of its outputs (`output_grads`), which are the same for every arm.

    moved: bytes that the floor counts, forward and backward; exact: further arguments of the reference in fp64
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    moved: int = 0
    exact: dict[str, Any] = field(default_factory=dict)
    output_grads: dict[tuple, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*tensors_in(self.args), *tensors_in(tuple(self.kwargs.values()))]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in [*self.tensors, *self.output_grads.values()])

    def gradient_for(self, position: int, output: torch.Tensor) -> torch.Tensor:
        """The gradient of output number `position`, with its strides: random, or 1 for a scalar."""
        place = (position, tuple(output.shape), output.stride(), output.dtype)
        if place not in self.output_grads:
            if output.numel() == 1:
                self.output_grads[place] = torch.ones_like(output, requires_grad=False)
            else:
                generator = torch.Generator(output.device).manual_seed(self.seed + position)
                values = torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float32)
                self.output_grads[place] = torch.empty_like(output, requires_grad=False).copy_(values)
        return self.output_grads[place]

    def clone(self, dtype: torch.dtype | None = None) -> "Inputs":
        """A deep copy without gradients of outputs, with floating-point tensors in `dtype`."""

        def copy(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                copied_dtype = dtype if dtype is not None and value.is_floating_point() else value.dtype
                fresh = torch.empty_like(value, dtype=copied_dtype).copy_(value.detach())  # keeps the strides
                return fresh.requires_grad_(value.requires_grad)
            if isinstance(value, (tuple, list)):
                return type(value)(copy(item) for item in value)
            return value

        return Inputs(copy(self.args), {k: copy(v) for k, v in self.kwargs.items()}, self.seed, exact=self.exact)


class Work:
    """A function and its input sets. backward: whether a call includes the gradients of all leaves"""

    def __init__(self, function: Callable[..., Any], sets: list[Inputs], backward: bool) -> None:
        self.function, self.sets, self.backward = function, sets, backward
        self.saved: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in sets]
        self.overwrites_inputs = False

    def forward(self, inputs: Inputs) -> list[torch.Tensor]:
        outputs = tensors_in(self.function(*inputs.args, **inputs.kwargs))
        return [output for output in outputs if output.requires_grad]

    def gradients(self, inputs: Inputs, outputs: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        output_grads = [inputs.gradient_for(i, output) for i, output in enumerate(outputs)]
        return torch.autograd.grad(outputs, inputs.leaves, output_grads, allow_unused=True)

    def call(self, index: int = 0) -> tuple:
        """One call: (outputs, gradients)."""
        inputs = self.sets[index]
        outputs = self.forward(inputs)
        return outputs, self.gradients(inputs, outputs) if self.backward else ()

    def sweep(self) -> None:
        """One call on every set. All forwards run first, so that a backward does not find its inputs in L2."""
        outputs = [self.forward(inputs) for inputs in self.sets]
        if self.backward:
            for inputs, output in zip(self.sets, outputs):
                self.gradients(inputs, output)

    @property
    def bytes(self) -> int:
        """Bytes of all arguments, without gradients of outputs, whose size differs between arms."""
        return sum(tensor.numel() * tensor.element_size() for inputs in self.sets for tensor in inputs.tensors)

    def learn_overwrites(self) -> None:
        """Call the function and note the tensors that it overwrites, for `restore`."""
        with torch.no_grad():
            before = [tensor.detach().clone() for tensor in self.sets[0].tensors]
        outputs = self.forward(self.sets[0])
        for position, output in enumerate(outputs):  # made now, not in a timed call
            for inputs in self.sets:
                inputs.gradient_for(position, output)
        output_grads = list(self.sets[0].output_grads.values())
        with torch.no_grad():
            before += [tensor.clone() for tensor in output_grads]
        if self.backward:
            self.gradients(self.sets[0], outputs)
        del outputs
        tensors = [*self.sets[0].tensors, *output_grads]
        changed = [i for i, (old, new) in enumerate(zip(before, tensors)) if not torch.equal(old, new.detach())]
        self.overwrites_inputs = any(i < len(self.sets[0].tensors) for i in changed)
        for number, inputs in enumerate(self.sets):
            now = [*inputs.tensors, *inputs.output_grads.values()]
            kept = before if number == 0 else {i: now[i].detach().clone() for i in changed}
            self.saved[number] = [(now[i].detach(), kept[i]) for i in changed]
        self.restore()

    def restore(self) -> None:
        """Restore the overwritten tensors in few launches, so that the host stays ahead of the device."""
        pairs = [pair for pairs in self.saved for pair in pairs]
        with torch.no_grad():
            if pairs:
                torch._foreach_copy_([tensor for tensor, _ in pairs], [kept for _, kept in pairs])


def sample_sets(make: Callable[[int], Inputs], l2: int) -> list[Inputs]:
    """Input sets, at most 32, that together have 4 times the size of L2; a single set if it has 16 times the size.

    make(seed): returns a set. Tiny inputs stay in L2, as they do in training.
    """
    first = make(0)
    if first.bytes >= 16 * l2:
        return [first]
    count = max(2, min(32, -(-4 * l2 // max(1, first.bytes))))
    return [first, *(make(seed) for seed in range(1, count))]
