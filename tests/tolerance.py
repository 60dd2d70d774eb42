"""How far a result may be from the fp64 oracle.

The bound of one element, with `scale` the largest |oracle| in its row (last dimension; the whole tensor when it has one):

    3 u_out |oracle|                      the value is rounded on its way out, and at most twice more where an op's
                                          definition says so (a cast in the middle, a product with a rounded factor);
                                          u = eps / 2 is the rounding error of a dtype
  + (8 + 4 sqrt(n)) u_acc scale           a sum of n terms in the accumulator's dtype (fp32; fp64 for fp64 inputs).
                                          Rounding errors of a sum behave like a random walk, hence sqrt(n) (Higham and
                                          Mary, "A new approach to probabilistic rounding error analysis", 2019); 4 is
                                          their confidence factor, and 8 u covers the few ulp of exp, log, rsqrt, tanh.
                                          The terms of a sum may cancel, hence scale and not |oracle|
  + 2 spec scale                          where the definition rounds an intermediate that is then summed (the cast of
                                          llama's RMSNorm before the weight gradient, the 16-bit logits of a fused
                                          loss), the plain torch reference in the same dtype errs too: `spec` is its
                                          largest error relative to its row's scale, beyond its own output rounding.
                                          Another order of the same roundings may err twice that
  + the smallest number the dtype holds   results below it are lost

So a reference that rounds nothing in the middle grants no allowance for it. And that no allowance hides a wrong result,
the whole tensor must be near in norm: |error| <= (4 eps_in + (8 + 4 sqrt(n)) u_acc) |oracle|, whatever the reference does.

n is `Sample.reduction` forward and `Sample.grad_reduction` backward. Nothing here was fitted to what passes.
"""

from __future__ import annotations

import math

import torch


def bound(
    oracle: torch.Tensor, dtype: torch.dtype, n: int, input_dtype: torch.dtype, spec: torch.Tensor | None = None
) -> torch.Tensor:
    """Elementwise bound on |result - oracle| (fp64) for a result of `dtype`, computed from inputs of `input_dtype`.

    oracle: the exact result; n: terms behind one element; spec: the reference's result in the working dtype, or None
    """
    out = torch.finfo(dtype)
    exact = oracle.abs()
    scale = exact.amax(-1, keepdim=True) if exact.dim() and exact.numel() else exact
    limit = 1.5 * out.eps * exact + _summed(n, input_dtype) * scale + out.smallest_normal * out.eps
    if spec is not None and exact.numel():
        error = ((spec.double() - oracle).abs() - 0.5 * out.eps * exact).clamp_min(0)
        limit = limit + 2 * float((error / scale.clamp_min(1e-300)).nan_to_num(0.0, 0.0).max()) * scale
    return limit


def _summed(n: int, input_dtype: torch.dtype) -> float:
    """Relative error of a sum of n terms in the accumulator's dtype."""
    accumulator = torch.float64 if input_dtype == torch.float64 else torch.float32
    return (8 + 4 * math.sqrt(n)) * torch.finfo(accumulator).eps / 2


def assert_close(
    name: str,
    result: torch.Tensor,
    oracle: torch.Tensor,
    n: int,
    input_dtype: torch.dtype,
    spec: torch.Tensor | None = None,
) -> None:
    """Raise `AssertionError` with the worst element unless `result` is within `bound` of `oracle`."""
    assert result.shape == oracle.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(oracle.shape)}"
    if not result.is_floating_point():
        wrong = (result != oracle.to(result.dtype)).sum()
        assert not wrong, f"{name}: {int(wrong)} of {result.numel()} differ"
        return
    if not result.numel():
        return
    same_nan = torch.equal(result.isnan(), oracle.isnan())
    assert same_nan, f"{name}: {int(result.isnan().sum())} nan, the oracle has {int(oracle.isnan().sum())}"
    limit = bound(oracle, result.dtype, n, input_dtype, spec)
    error = (result.double() - oracle).abs()
    excess = torch.where(error > limit, error / limit, torch.zeros_like(error)).nan_to_num(0.0, 0.0)
    worst = int(excess.argmax())
    if float(excess.flatten()[worst]) > 1:
        got, expected = float(result.flatten()[worst]), float(oracle.flatten()[worst])
        raise AssertionError(
            f"{name}: {int((excess > 1).sum())} of {result.numel()} elements of {result.dtype} are off; worst at flat "
            f"index {worst} of shape {tuple(result.shape)}: {got!r}, exactly {expected!r}, "
            f"error {float(error.flatten()[worst]):.3g}, allowed {float(limit.flatten()[worst]):.3g}"
        )
    out = torch.finfo(result.dtype)
    relative = 4 * max(torch.finfo(input_dtype).eps, out.eps) + _summed(n, input_dtype)
    allowed = relative * float(oracle.norm()) + out.smallest_normal * out.eps * math.sqrt(oracle.numel())
    norm = float(error.nan_to_num(0.0).norm())
    assert not oracle.isfinite().all() or norm <= allowed, f"{name}: error of norm {norm:.3g}, allowed {allowed:.3g}"
