"""How far a result may be from the fp64 oracle.

The bound of one element:

    3 u_out |oracle|            the value is rounded on its way out, and at most twice more where an op's
                                definition says so (a cast in the middle, a product with a rounded factor); u = eps / 2
                                of a dtype
  + (8 + 4 sqrt(n)) u_acc scale   a sum of n terms in the accumulator's dtype (fp32; fp64 for fp64 inputs).
                                Rounding errors of a sum behave like a random walk, hence sqrt(n) (Higham and Mary, "A
                                new approach to probabilistic rounding error analysis", 2019); 4 is their confidence
                                factor, and 8 u covers the few ulp of exp, log, rsqrt and tanh
  + 2 spec scale                where the definition rounds an intermediate that is then summed (the cast of llama's
                                RMSNorm before the weight gradient, the 16-bit logits of a fused loss), the plain torch
                                reference in the same dtype errs too: `spec` is its largest error relative to the scale,
                                less its own output rounding u |oracle| in quadrature, as errors that know nothing of
                                each other add. Another order of the same roundings may err twice that. One run of the
                                reference is one draw of a random error, and few elements may show little of it: where a
                                gradient fails, the largest of three draws counts (the incoming gradient times 0.7 and
                                1.3 too, which rounds every intermediate elsewhere). Seen of an op that rounds its
                                gradient before scaling it
  + the smallest number the dtype holds: results below it are lost

scale is the size of the terms behind a row (last dimension) of the result: its largest |oracle|, or, where terms
cancel, the most that moving every input up or down by u_acc makes in the oracle, over u_acc (`sensitivity`, three
draws). Terms may also cancel whatever the inputs are. In the gradient of a normalisation, dy - n mean(dy n) is nearly
zero for an element that is most of its row's norm, and a logit less the log-sum-exp of one class is zero. Both move
little with the inputs, but their terms are rounded all the same, and no order of the same operations avoids it. So
where a result is beyond the bound, the most that moving every intermediate result of the oracle by u_acc makes counts
as well (`roundings`, three draws). That is the size of the terms of the definition, not of the kernel: a kernel whose
own terms cancel, where the definition's do not, gets nothing of it.

A device's products in FP8 (`float8=True`) are rounded to bf16, whose u then stands for the result's. Its tensor cores
add with about 14 bits (seen on an H200: errors of 2^-13 of the sum of |a b|). By Cauchy and Schwarz that sum is at most
sqrt(n) times the root of the terms' squares, which is what scale measures: 2^-13 sqrt(n) scale is granted.

A truth value or an index is the oracle's, or the reference's in the same dtype: which of two near logits is larger may
be decided by their rounding to 16 bits.

A reference that rounds nothing in the middle grants no allowance for it. And that no allowance hides a wrong result,
the whole tensor must be near in norm, whatever the reference does: |error| <= (4 eps_in + (8 + 4 sqrt(n)) u_acc)
|size|, with size the larger of |oracle| and the sensitivity, element by element.

n is `Sample.reduction` forward and `Sample.grad_reduction` backward. Nothing here was fitted to what passes.
"""

from __future__ import annotations

import math
from typing import Sequence

import torch


def unit(input_dtype: torch.dtype) -> float:
    """u of the accumulator for inputs of a dtype."""
    return torch.finfo(torch.float64 if input_dtype == torch.float64 else torch.float32).eps / 2


def assert_close(
    name: str,
    result: torch.Tensor,
    oracle: torch.Tensor,
    n: int,
    input_dtype: torch.dtype,
    spec: torch.Tensor,
    sensitivity: torch.Tensor,
    draws: Sequence[tuple[float, torch.Tensor, torch.Tensor]] = (),
    float8: bool = False,
) -> None:
    """Raise `AssertionError` with the worst element unless `result` is near enough to `oracle` (fp64).

    n: terms behind one element; spec: the reference's result in the working dtype; sensitivity: see above
    draws: (factor, reference's result, oracle) for incoming gradients times a factor
    """
    assert result.shape == oracle.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(oracle.shape)}"
    if not result.is_floating_point():
        wrong = int(((result != oracle.to(result.dtype)) & (result != spec)).sum())
        assert not wrong, f"{name}: {wrong} of {result.numel()} differ"
        return
    if not result.numel():
        return
    same = torch.equal(result.isnan(), oracle.isnan())
    assert same, f"{name}: {int(result.isnan().sum())} nan, the oracle has {int(oracle.isnan().sum())}"
    out, summed = torch.finfo(result.dtype), (8 + 4 * math.sqrt(n)) * unit(input_dtype)
    lost, eps = out.smallest_normal * out.eps, out.eps
    if float8:
        eps, summed = max(eps, torch.finfo(torch.bfloat16).eps), summed + 2**-13 * math.sqrt(n)
    exact = oracle.abs().nan_to_num(0.0)
    size = torch.maximum(exact, sensitivity.nan_to_num(0.0) / unit(input_dtype))
    scale = size.amax(-1, keepdim=True) if size.dim() else size
    scale_or_lost = scale.clamp_min(lost)
    allowance = 0.0
    for factor, drawn, of in ((1.0, spec, oracle), *draws):
        beyond = ((drawn.double() - of).square() - (eps / 2 * of).square()).nan_to_num(0.0).clamp_min(0).sqrt()
        allowance = max(allowance, 2 * float((beyond / (factor * scale_or_lost)).max()))
    limit = 1.5 * eps * exact + (summed + allowance) * scale + lost
    error = (result.double() - oracle).abs().nan_to_num(0.0)
    worst = int((error / limit).argmax())
    if float(error.flatten()[worst]) > float(limit.flatten()[worst]):
        got, expected = float(result.flatten()[worst]), float(oracle.flatten()[worst])
        raise AssertionError(
            f"{name}: {int((error > limit).sum())} of {result.numel()} elements of {result.dtype} are off; worst at "
            f"flat "
            f"index {worst} of shape {tuple(result.shape)}: {got!r}, exactly {expected!r}, "
            f"error {float(error.flatten()[worst]):.3g}, allowed {float(limit.flatten()[worst]):.3g}"
        )
    relative = 4 * max(torch.finfo(input_dtype).eps, eps) + summed
    norm, allowed = float(error.norm()), relative * float(size.norm()) + lost * math.sqrt(size.numel())
    assert norm <= allowed, f"{name}: error of norm {norm:.3g}, allowed {allowed:.3g}"
