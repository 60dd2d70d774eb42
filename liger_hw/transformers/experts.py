"""`fused_moe` as an experts implementation of transformers 5, under the name `liger_hw`.

    liger_hw.transformers.register_experts()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="liger_hw")

Every patch function registers it too, and needs the name for one thing: experts that transformers has spread over
ranks, whose forward it has replaced. There the patch puts a view of the configuration in the module's place for one
(`choosing`), which names `liger_hw` where the configuration names what was to be replaced.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from typing import Any, Callable

import torch
import torch.nn.utils.parametrize

from ..distributed import owners
from . import probing
from .marks import PATCH_MARK
from .replacing import guarded

log = logging.getLogger("liger_hw")
NAME = "liger_hw"
_INSTEAD = "grouped_mm"
"""What runs where the op cannot: transformers' own default."""


def register_experts() -> bool:
    """Make `experts_implementation="liger_hw"` known to transformers; whether this transformers has such a choice.

    Doing it twice does nothing more. Raises `ImportError` when transformers is not installed.
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
    """The experts of a module with batched parameters, by `fused_moe` where it computes what the module does.

    hidden_states: [tokens, hidden]; top_k_index, top_k_weights: [tokens, k], where an index of at least
    `self.num_experts` contributes nothing. Returns [tokens, hidden] in the dtype of hidden_states.
    Other experts run as transformers' default has them, and the log says once why.
    """
    forward = _forwards.get(id(self)) or _recognised(self)
    return forward(self, hidden_states, top_k_index, top_k_weights)


_forwards: dict[int, Callable] = {}  # by the module's id, which compiled code can ask for


@torch.compiler.disable(reason="the first call of experts is where they are recognised; run one step uncompiled before")
def _recognised(module: torch.nn.Module) -> Callable:
    """The forward of one module from now on."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    original = ALL_EXPERTS_FUNCTIONS[_INSTEAD]
    plain = _unparametrized(module)
    own = type(plain).forward
    found = probing.recognise(plain, own)
    if isinstance(found, probing.Match) and found.slot == "forward":
        forward = guarded(found, probing.guards_of(plain, own, found.used), original, [True])
    else:
        why = found.reason if isinstance(found, probing.Refused) else found.variant if found else "they are no experts"
        _say_once(f"liger_hw: {type(module).__name__} runs by {_INSTEAD}: {why}")
        forward = original
    _forwards[id(module)] = forward
    weakref.finalize(module, _forwards.pop, id(module), None)
    return forward


def _unparametrized(module: torch.nn.Module) -> torch.nn.Module:
    """The module as it is when PEFT computes none of its parameters, as it does while its adapters run."""
    if not torch.nn.utils.parametrize.is_parametrized(module):
        return module
    plain = object.__new__(type(module).__mro__[1])  # parametrize has given it a class of its own
    originals = {name: held.original for name, held in module.parametrizations.items()}
    children = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    plain.__dict__ = {**vars(module), "_parameters": {**module._parameters, **originals}, "_modules": children}
    return plain


@functools.lru_cache(maxsize=256)
def _say_once(words: str) -> None:
    log.warning(words)


# -- experts whose forward transformers has replaced -----------------------------------------------------------------


def is_spread(module: torch.nn.Module, forward: Callable) -> bool:
    """Whether transformers has spread a module's experts over ranks: `forward`, in its place, calls the class's own.

    Each rank has some of the experts, or a part of every one. Newer versions say the first of the module; of the
    second, and before of both, the only sign is who has made the forward.
    """
    if getattr(module, "_is_expert_parallel", False):
        return True
    style = (owners.tensor_parallel_forward(module) or {}).get("self")
    made_by = getattr(forward, "__qualname__", "")
    return type(style).__name__ == "MoeExpertsParallel" or made_by.startswith("MoeExpertsParallel.install_forward.")


def choosing(config: Any, part: str, kernel: str) -> Any:
    """A view of `config`, all of whose attributes it shares, that names liger_hw as experts implementation.

    When another implementation is chosen later, the view names that one. A deep copy is a view of a copy; pickle
    stores the configuration itself.
    """
    cls = type(config)
    view = object.__new__(type(cls.__name__, (_Choosing, cls), {PATCH_MARK: (part, kernel)}))
    object.__setattr__(view, "__dict__", vars(config))
    type(view).original, type(view).instead_of = config, config._experts_implementation
    return view


class _Choosing:
    """The part of such a view that differs from its configuration."""

    original: Any
    instead_of: str | None

    @property
    def _experts_implementation(self) -> str | None:
        chosen = self._experts_implementation_internal
        return NAME if chosen == self.instead_of else chosen

    @_experts_implementation.setter
    def _experts_implementation(self, value: Any) -> None:
        self.original._experts_implementation = value

    def __deepcopy__(self, memo: dict) -> Any:
        return choosing(copy.deepcopy(self.original, memo), *getattr(self, PATCH_MARK))

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _itself, (self.original,)


def _itself(value: Any) -> Any:
    return value
