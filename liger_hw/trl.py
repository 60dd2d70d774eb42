"""The output head of TRL's trainers on `liger_fused_linear_log_probs`.

    import liger_hw.trl

    liger_hw.trl.install()           # before trainer.train(); every trainer of this process
    with liger_hw.trl.install():     # or only inside this block
        trainer.train()

SFT, DPO, KTO, GRPO and RLOO of TRL 1.15 and 1.16 compute the results below from hidden states and the head's weight in
one autograd function, which does not store logits. `install` replaces this function. With z = hidden @ weight^T + bias
of a row and its label y:

    s = softcap(z * logit_scale) / temperature, where softcap(x) = softcap * tanh(x / softcap), optional; p = softmax(s)
    log_probs = log p[y]      entropy = -sum p log p      log_sum_sq_probs = log sum p^2
    mean_logits = mean s      is_top1 = (y is the first column of the largest s)

log_probs and entropy have gradients, as in TRL.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F

from .transformers.functional import liger_fused_linear_log_probs

_NAME = "_ChunkedLogProbFunction"
_ARGUMENTS = "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs".split()
_MAX_LOGITS = 1 << 25
"""The most logits that `_mean_logits` computes at once with a softcap."""


def log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int = 0,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs",),
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N], fp32 and bool; None if not in `outputs`.

    hidden: [N, hidden]; weight: [vocab, hidden]; bias: [vocab] or None; targets: [N] int64. Products are in the dtype
    of hidden, or of autocast. chunk_size is ignored.
    Raises `ValueError` for a logit_scale that is not positive, and as `liger_fused_linear_log_probs` does.
    """
    if not logit_scale > 0:
        raise ValueError(f"liger_hw.trl: logit_scale must be positive, got {logit_scale!r}")
    if hasattr(weight, "ds_id"):  # ZeRO-3 frees a gathered weight after the call, before backward
        weight, bias = weight.clone(), bias if bias is None else bias.clone()
    if not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), bias if bias is None else bias.to(hidden.dtype)
    softcap = final_logit_softcapping and final_logit_softcapping / logit_scale
    temperature, options = temperature / logit_scale, {"bias": bias, "softcap": softcap}
    flags = {"return_entropy": "entropy" in outputs, "return_top1": "is_top1" in outputs}
    result = liger_fused_linear_log_probs(hidden, weight, targets, temperature=temperature, **options, **flags)
    logp, entropy, is_top1 = (result, None, None) if isinstance(result, torch.Tensor) else result[:3]
    log_sum_sq = mean = None
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:  # p^2 is the distribution at half the temperature, times sum p^2
            half = liger_fused_linear_log_probs(hidden, weight, targets, temperature=temperature / 2, **options)
            log_sum_sq = 2 * logp - half
        if "mean_logits" in outputs:
            mean = _mean_logits(hidden, weight, bias, softcap) / temperature
    return logp, entropy, log_sum_sq, mean, is_top1


def _mean_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    """The mean logit of each row, [N] fp32. Without a softcap it is the product with the mean row of the weight."""
    if not softcap:
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return mean if bias is None else mean + bias.mean(dtype=torch.float32)
    rows = max(1, _MAX_LOGITS // weight.shape[0])
    means = [(softcap * torch.tanh(F.linear(h, weight, bias).float() / softcap)).mean(-1) for h in hidden.split(rows)]
    return torch.cat(means)


class _Function:
    """Replaces TRL's autograd function. TRL calls only `apply`."""

    apply = staticmethod(log_probs)


class Installed(contextlib.ExitStack):
    """A context manager. Its end or `uninstall()` restores the previous function, if `install`'s is still there."""

    uninstall = contextlib.ExitStack.close


def install() -> Installed:
    """Replace TRL's function by `log_probs`, for all trainers of this process, existing and later ones.

    Raises `ImportError` without TRL, or if its head takes other arguments than in TRL 1.15 and 1.16.
    """
    utils, installed = _trl_utils(), Installed()
    previous = getattr(utils, _NAME)

    def restore() -> None:
        if getattr(utils, _NAME) is _Function:  # else `uninstall()` or another Installed has restored it
            setattr(utils, _NAME, previous)

    installed.callback(restore)
    setattr(utils, _NAME, _Function)
    return installed


def uninstall() -> None:
    """Restore TRL's function after any number of `install` calls."""
    setattr(_trl_utils(), _NAME, _function_of_trl())


def _function_of_trl() -> Any:
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction


def _trl_utils() -> types.ModuleType:
    """`trl.trainer.utils`. Raises `ImportError` unless its head takes the arguments of `log_probs`."""
    import trl

    try:
        from trl.trainer import utils

        arguments = list(inspect.signature(_function_of_trl().forward).parameters)
    except ImportError:
        arguments = []
    if arguments != _ARGUMENTS or not hasattr(utils, _NAME):
        raise ImportError(
            f"liger_hw.trl: trl {trl.__version__} has no output head of the form of TRL 1.15 and 1.16; "
            "patch the model instead (liger_hw.patch), which works with every TRL"
        )
    return utils
