"""Activation memory as a dial: what backward needs is kept, or computed again, by level.

    with liger_hw.activations("cheap"):                    # whatever runs in it, with our ops
        loss = model(**batch).loss
    loss.backward()

    dial = liger_hw.activations("fit", model)              # each layer of a model, until dial.revert()

This package is itself the function: calling `liger_hw.activations(...)` calls `activations` below. recipes.py is the
mechanism, levels.py the words, dial.py puts levels on models, planner.py chooses them. docs/activations.md explains.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def activations(setting: Any, model: "torch.nn.Module | None" = None) -> Any:
    """A context in which activations are kept or recomputed as `setting` says; with a model, put onto its layers.

    setting: `keep`, `cheap`, `mlp` or `full` (levels.py says what each recomputes). With a model also one level for each
    layer as a sequence, a mapping from layer index to level, `fit` (the fastest mix that fits the device's memory) or a
    size such as `80GiB`.
    model: a live model with a list of layers. The levels hold from now until `revert()` or the end of the `with` block.

    Gradients are bit-identical to keeping everything. Raises `ValueError` for a setting that means nothing here.
    """
    from .levels import check_level, is_budget

    if model is not None:
        from .dial import Dial

        return Dial(model, setting)
    if is_budget(setting) or not isinstance(setting, str) or setting == "full":
        raise ValueError(
            f"activations({setting!r}) needs to know the layers: pass the model too, activations({setting!r}, model), or "
            "activations= of its apply_liger_kernel_to_* function; keep, cheap and mlp work without"
        )
    from . import recipes

    return recipes.Scope({"keep": recipes.KEEP, "cheap": recipes.CHEAP, "mlp": recipes.MLP}[check_level(setting)])


class _CallablePackage(types.ModuleType):
    def __call__(self, setting: Any, model: "torch.nn.Module | None" = None) -> Any:
        return activations(setting, model)

    __call__.__doc__ = activations.__doc__


sys.modules[__name__].__class__ = _CallablePackage
