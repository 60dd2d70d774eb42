"""Our own ops one after the other, where an op of ours does in one what several can."""

from __future__ import annotations

from typing import Any, Callable


def _qk_norm_rope(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps=1e-6,
    offset=0.0,
    casting_mode="llama",
    position_ids=None,
    unsqueeze_dim=1,
    rotary_dim=None,
    shared_halves=False,
):
    from liger_hw.kernels.norms.rms_norm import liger_rms_norm
    from liger_hw.kernels.rotary.rope import liger_rope

    def normed(x, w):
        """Rows as they lie in memory: a model norms before it transposes."""
        swap = unsqueeze_dim == 1 and x.stride(1) < x.stride(2)
        y = liger_rms_norm(x.transpose(1, 2) if swap else x, w, eps, offset, casting_mode)
        return y.transpose(1, 2) if swap else y

    q, k = normed(q, q_weight), normed(k, k_weight)
    return liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, shared_halves)


SEPARATE: dict[str, Callable[..., Any]] = {"qk_norm_rope": _qk_norm_rope}
