"""How far an arm's results are from the reference in fp64."""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

import torch

from .cases import ROW_DIMS, Case, make_inputs, with_few_rows
from .floors import PRODUCTS
from .inputs import Inputs, tensors_in
from .timing import Meter


class Accuracy:
    """Error of an arm's outputs and gradients against the op's reference in fp64: ||arm - fp64|| / ||fp64||.

    On all rows where no argument (and no logits of a GEMM-bound op) has more than 2^26 (2^30) elements (2^20 and 16
    rows on the CPU), else on as many as fit; on half as many while the reference runs out of memory.
    """

    def __init__(self, case: Case, meter: Meter, first: Inputs) -> None:
        on_cpu = meter.module is None
        self.sizes, self.inputs, self.meter = case.sizes, first, meter
        rows = max([size for name, size in zip(case.op.tunables[0].dims, case.sizes) if name in ROW_DIMS] or case.sizes)
        if on_cpu and case.op.name in PRODUCTS:
            rows = min(rows, 16)
        self._shrink(case, rows)
        while not ((rows <= 16 or self._fits(case, on_cpu)) and self._reference(case)):
            if rows < 2:
                raise RuntimeError("the reference in fp64 does not fit into the device's memory")
            meter.forget()
            rows //= 2
            self._shrink(case, rows)

    def _fits(self, case: Case, on_cpu: bool) -> bool:
        if case.op.name in PRODUCTS and not on_cpu:
            m, n, *_ = PRODUCTS[case.op.name](*self.sizes)[0][0]
            return m * n <= 1 << 30
        return max(tensor.numel() for tensor in self.inputs.tensors) <= 1 << (20 if on_cpu else 26)

    def _shrink(self, case: Case, rows: int) -> None:
        sizes = with_few_rows(case, rows)
        if sizes != self.sizes:
            self.sizes, self.inputs = sizes, make_inputs(case, sizes, self.meter.device, 0)

    def _reference(self, case: Case) -> bool:
        """Compute what is exact. False where it does not fit into the device's memory."""
        try:
            inputs = self.inputs.clone()
            exact = inputs.clone(torch.float64)
            with torch.enable_grad():
                outputs = tensors_in(case.op.reference(*exact.args, **exact.kwargs, **exact.exact))
                outputs = [output for output in outputs if output.is_floating_point()]
                flowing = [inputs.gradient_for(i, output.detach().to(case.dtype)) for i, output in enumerate(outputs)]
                pairs = [(output, flow.double()) for output, flow in zip(outputs, flowing) if output.requires_grad]
                grads = torch.autograd.grad(
                    [o for o, _ in pairs], exact.leaves, [g for _, g in pairs], allow_unused=True
                )
        except torch.OutOfMemoryError:
            return False
        self.inputs = inputs
        self.flowing = [flow.clone() for flow in flowing]
        self.outputs, self.grads = [output.detach() for output in outputs], grads
        return True

    def of(self, function: Callable[..., Any]) -> tuple[float | None, float | None]:
        """(largest error of an output, largest error of a gradient) of an arm."""
        mine = self.inputs.clone()
        outputs = [o for o in tensors_in(function(*mine.args, **mine.kwargs)) if o.is_floating_point()]
        differentiable = [(output, flow) for output, flow in zip(outputs, self.flowing) if output.requires_grad]
        values = [output.detach().clone() for output in outputs]  # a backward may overwrite them
        flowing = [flow.to(output.dtype, copy=True) for output, flow in differentiable]
        grads = torch.autograd.grad([output for output, _ in differentiable], mine.leaves, flowing, allow_unused=True)
        return _worst(values, self.outputs), _worst(grads, self.grads)


def _worst(values: Sequence[torch.Tensor | None], exact: Sequence[torch.Tensor | None]) -> float | None:
    errors = []
    for one, other in zip(values, exact):
        if one is None or other is None:
            continue
        scale = float(other.norm())
        errors.append(float((one.double().reshape(other.shape) - other).norm()) / (scale or 1.0))
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error) if errors else None
