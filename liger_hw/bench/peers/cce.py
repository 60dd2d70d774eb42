"""cut-cross-entropy; `filter_eps` is its filter of small gradients, None computes them all."""

from __future__ import annotations

import importlib
from typing import Any, Callable

from .common import only


def table(filter_eps: str | None) -> dict[str, Callable[..., Any]]:
    def fused_linear_cross_entropy(
        input, weight, target, bias=None, ce_weight=None, ignore_index=-100, reduction="mean", softcap=None, **more
    ):
        only({}, bias=bias, ce_weight=ce_weight, **{name: value for name, value in more.items() if value})
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        options = {"ignore_index": ignore_index, "softcap": softcap, "reduction": reduction, "filter_eps": filter_eps}
        return function(input, weight, target, **options)

    return {"fused_linear_cross_entropy": fused_linear_cross_entropy}
