"""The error of an arm's results against the reference in fp64."""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

import torch

from .cases import ROW_DIMS, Case, make_inputs, with_few_rows
from .inputs import Inputs, tensors_in
from .timing import Meter


class Accuracy:
    """Relative error of an arm's outputs and gradients: ||arm - fp64|| / ||fp64||.

    The number of rows is halved while the first tensor has over 2^26 elements (2^20 on the CPU) in more than 16 rows,
    and while the reference runs out of memory.
    """

    def __init__(self, case: Case, meter: Meter, first: Inputs) -> None:
        limit = 1 << (20 if meter.module is None else 26)
        self.sizes, self.inputs = case.sizes, first
        rows = max([size for name, size in zip(case.op.tunables[0].dims, case.sizes) if name in ROW_DIMS] or case.sizes)
        while (rows > 16 and self.inputs.tensors[0].numel() > limit) or not self._reference(case):
            if rows < 2:
                raise RuntimeError("the reference in fp64 does not fit into the device's memory")
            meter.forget()
            rows //= 2
            self.sizes = with_few_rows(case, rows)
            self.inputs = make_inputs(case, self.sizes, meter.device, 0)

    def _reference(self, case: Case) -> bool:
        """Compute the reference's results; False if they do not fit into the device's memory."""
        try:
            inputs = self.inputs.clone()
            exact = inputs.clone(torch.float64)
            with torch.enable_grad():
                outputs = tensors_in(case.op.reference(*exact.args, **exact.kwargs, **exact.exact))
                outputs = [output for output in outputs if output.is_floating_point()]
                output_grads = [inputs.gradient_for(i, out.detach().to(case.dtype)) for i, out in enumerate(outputs)]
                pairs = [(output, grad.double()) for output, grad in zip(outputs, output_grads) if output.requires_grad]
                with_grad, their_grads = [output for output, _ in pairs], [grad for _, grad in pairs]
                grads = torch.autograd.grad(with_grad, exact.leaves, their_grads, allow_unused=True)
        except torch.OutOfMemoryError:
            return False
        self.inputs = inputs
        self.output_grads = [grad.clone() for grad in output_grads]
        self.outputs, self.grads = [output.detach() for output in outputs], grads
        return True

    def of(self, function: Callable[..., Any]) -> tuple[float | None, float | None]:
        """(largest error of an output, largest error of a gradient) of an arm."""
        inputs = self.inputs.clone()
        outputs = [o for o in tensors_in(function(*inputs.args, **inputs.kwargs)) if o.is_floating_point()]
        differentiable = [(output, grad) for output, grad in zip(outputs, self.output_grads) if output.requires_grad]
        values = [output.detach().clone() for output in outputs]  # backward may overwrite outputs
        output_grads = [grad.to(output.dtype, copy=True) for output, grad in differentiable]
        with_grad = [output for output, _ in differentiable]
        grads = torch.autograd.grad(with_grad, inputs.leaves, output_grads, allow_unused=True)
        return _worst(values, self.outputs), _worst(grads, self.grads)


def _worst(values: Sequence[torch.Tensor | None], exact: Sequence[torch.Tensor | None]) -> float | None:
    errors = []
    for one, other in zip(values, exact):
        if one is None or other is None:
            continue
        scale = float(other.norm())
        errors.append(float((one.double().reshape(other.shape) - other).norm()) / (scale or 1.0))
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error) if errors else None
