"""For `liger_kernel.functional`: liger_hw's functions with Liger Kernel's signatures and defaults.

`impl`, `mode` and `backend` have no effect. A name that is not defined here is `liger_<name>` of
`liger_hw.transformers.functional`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Callable

from ..transformers import functional
from .checked import liger_cross_entropy, liger_fused_linear_cross_entropy
from .loss_utils import unpack_cross_entropy_result


def _any_impl(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, impl: str | None = None, mode: str | None = None, backend: str | None = None, **kwargs: Any):
        return function(*args, **kwargs)

    return call


@_any_impl
def rms_norm(x, weight, eps=1e-6, *, offset=0.0, casting_mode="llama", in_place=False, row_mode=None):
    return functional.liger_rms_norm(x, weight, eps, offset, casting_mode, in_place)


@_any_impl
def layer_norm(x, weight, bias=None, eps=1e-6):
    return functional.liger_layer_norm(x, weight, bias, eps)


@_any_impl
def fused_add_rms_norm(X, R, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=False):
    return functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode, in_place)


@_any_impl
def jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


@_any_impl
def kl_div(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
    return functional.liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


@_any_impl
def cross_entropy(
    input,
    target,
    weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
):
    """(loss, z_loss, token_accuracy, predicted_tokens), None for what was not asked for."""
    numbers = reduction, label_smoothing, lse_square_scale, softcap
    flags = return_z_loss, return_token_accuracy, return_predicted_tokens
    result = liger_cross_entropy(input, target, weight, None, ignore_index, None, *numbers, *flags)
    return unpack_cross_entropy_result(result)


@_any_impl
def fused_linear_cross_entropy(_input, weight, target, *args, **kwargs):
    """(loss, z_loss, token_accuracy, predicted_tokens), None for what was not asked for."""
    result = liger_fused_linear_cross_entropy(_input, weight, target, *args, **kwargs)
    return unpack_cross_entropy_result(result)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return _any_impl(getattr(functional, f"liger_{name}"))
