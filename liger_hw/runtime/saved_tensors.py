"""May a backward write its result over a tensor that the forward saved?

Doing so halves the memory of a gated activation's backward. It is right where the caller made the tensor for this call,
passes it to nothing else and says so (`owned=True`): the gate and up of an MLP whose projections are plain.
"""

from __future__ import annotations

from typing import Any

import torch

from ..private import hooks_on_every_module, keeps_graph
from ..recompute import recipes
from .operator import is_transformed

_PACKAGES = ("torch", "torchao", "peft", "bitsandbytes", "liger_hw")
"""Packages whose projections keep nothing of what they return."""


def owns_outputs(*projections: torch.nn.Module) -> bool:
    """Whether no code but the caller's keeps what these modules return when it calls them.

    That is so of linear layers, plain, quantised or with adapters, without hooks or another forward. It is not so under
    saved-tensor hooks of other programs, which may keep what is saved; checkpointing's do not.
    """
    if torch.compiler.is_compiling():
        return False
    if recipes.inside_foreign_hooks():
        pack, *_ = recipes.innermost_hooks() or (None,)
        if getattr(pack, "__module__", "") != "torch.utils.checkpoint":
            return False
    _, after_forward, _, after_backward = hooks_on_every_module()
    if after_forward or after_backward or not recipes.supported():
        return False
    return all([_is_plain(module) for module in projections])


def _is_plain(module: Any) -> bool:
    attributes = module.__dict__
    if type(module) is not torch.nn.Linear:
        package = type(module).__module__.partition(".")[0]
        base = attributes["_modules"].get("base_layer")
        if package not in _PACKAGES or not hasattr(module, "out_features"):
            return False
        if not _is_plain(base) if base is not None else package == "peft":  # modules_to_save: any module is inside
            return False
    return not (attributes["_forward_hooks"] or attributes["_backward_hooks"] or "forward" in attributes)


def may_overwrite(ctx: Any, saved: tuple[torch.Tensor, ...]) -> bool:
    """Whether the backward of an autograd Function may overwrite its saved tensors, which its caller owns."""
    return ctx.owned and not graph_is_kept() and not is_transformed() and all([type(t) is torch.Tensor for t in saved])


def graph_is_kept() -> bool:
    """Whether this backward may run again over the same saved tensors: with retain_graph, while torch.compile traces,
    and where this version of torch cannot tell.

    A captured device graph counts by the call it recorded: replaying a backward twice after one forward is
    retain_graph.
    """
    return torch.compiler.is_compiling() or keeps_graph is None or keeps_graph()
