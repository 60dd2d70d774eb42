"""`fused_moe` as an experts implementation of transformers 5, under the name `liger_hw`.

    liger_hw.transformers.register_experts()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="liger_hw")

Every patch function registers the name and writes it into the configurations of the models that it patches (choice.py).
Experts run the kernel while their configuration has this name, so `model.set_experts_implementation(...)` works after a
patch.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from typing import Callable

import torch
import torch.nn.utils.parametrize

from ..distributed import owners
from . import probing
from .choice import CHOICE, NAME, SLOT, Chosen
from .marks import original_of
from .replacing import guarded, guards_of

log = logging.getLogger("liger_hw")
_DEFAULT = "grouped_mm"
"""transformers' default, which runs if the op does not support a module."""


def register_experts() -> bool:
    """Register `experts_implementation="liger_hw"` in transformers. Returns False for a release without that setting.

    Raises `ImportError` if transformers is not installed.
    """
    import transformers  # noqa: F401

    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # transformers 4
        return False
    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return True


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The implementation `liger_hw` of experts with batched parameters: `fused_moe` if it computes the same as the
    module, else transformers' default, with one warning.

    hidden_states: [tokens, hidden]; top_k_index, top_k_weights: [tokens, k], where an index of at least
    `self.num_experts` contributes nothing. Returns [tokens, hidden] in the dtype of hidden_states.
    """
    if SLOT in self.__dict__:
        return self.__dict__[SLOT](hidden_states, top_k_index, top_k_weights)
    if type(getattr(self.config, CHOICE)) is Chosen:  # from a patch of other modules, or a reverted one
        return previous_experts(self, hidden_states, top_k_index, top_k_weights)
    forward = _forwards.get(id(self)) or _recognised(self)
    return forward(self, hidden_states, top_k_index, top_k_weights)


_forwards: dict[int, Callable] = {}  # id of a module -> its forward; compiled code can compute an id


@torch.compiler.disable(reason="the first call of experts recognises them; run one step uncompiled before")
def _recognised(module: torch.nn.Module) -> Callable:
    """The forward for this and later calls of a module."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    default = ALL_EXPERTS_FUNCTIONS[_DEFAULT]
    plain = _unparametrized(module)
    of_class = original_of(type(plain).forward)
    result = probing.recognise(plain, of_class)
    if isinstance(result, probing.Match):
        forward = guarded(result, guards_of(plain, of_class, result.used), default, [True])
    else:
        why_invalid = result.reason if result else "they are not experts"
        _log_once(f"liger_hw: {type(module).__name__} runs by {_DEFAULT}: {why_invalid}")
        forward = default
    _forwards[id(module)] = forward
    weakref.finalize(module, _forwards.pop, id(module), None)
    return forward


def _unparametrized(module: torch.nn.Module) -> torch.nn.Module:
    """The module without PEFT's parametrizations, which compute its parameters while adapters run."""
    if not torch.nn.utils.parametrize.is_parametrized(module):
        return module
    plain = object.__new__(type(module).__mro__[1])  # the class from before parametrize
    originals = {name: parametrization.original for name, parametrization in module.parametrizations.items()}
    children = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    plain.__dict__ = {**vars(module), "_parameters": {**module._parameters, **originals}, "_modules": children}
    return plain


_log_once = functools.lru_cache(maxsize=256)(log.warning)


def previous_experts(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The implementation that the configuration named before a patch wrote `liger_hw` into it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    previous = getattr(getattr(self.config, CHOICE), "previous", _DEFAULT)
    eager = inspect.unwrap(original_of(type(self).forward))
    return ALL_EXPERTS_FUNCTIONS.get_interface(previous, eager)(self, hidden_states, top_k_index, top_k_weights)


# -- experts whose forward transformers has replaced -----------------------------------------------------------------


def is_expert_parallel(module: torch.nn.Module, forward: Callable) -> bool:
    """Whether transformers has distributed a module's experts over ranks and replaced its `forward`.

    Newer versions mark modules of which each rank has some of the experts. Others are recognised by the name of the
    function that made the forward.
    """
    if getattr(module, "_is_expert_parallel", False):
        return True
    style = (owners.tensor_parallel_forward(module) or {}).get("self")
    maker = getattr(forward, "__qualname__", "")
    return type(style).__name__ == "MoeExpertsParallel" or maker.startswith("MoeExpertsParallel.install_forward.")
