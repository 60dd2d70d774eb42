"""Sets the levels of decoder layers. A layer's forward then runs in its level's scope, or under a checkpoint.

A `Dial` replaces the forward of each layer of one model, `class_patch` the forward of the layers' class. With "fit" or
a size the levels are planned in the first training forward, and again for a larger batch.

`put_default` sets the last layer to `cheap` if a patch has the fused loss and the user names no level: peak memory is
reached in the loss. Layers with small inputs keep everything, as Python's time bounds their steps.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import types
import weakref
from typing import Any, Callable, Mapping, Sequence

import torch

from ..kernels.pointwise.tiled_mlp import Tiles
from ..transformers.marks import PATCH_MARK, SWITCH, mark
from ..transformers.replacing import last_at_cheap
from ..transformers.report import PATCH_LOCK, Patch, PatchReport, PatchRow, forward_slot
from . import recipes
from .levels import CHECKPOINTED, FIT, LEVELS, Levels, check_level, in_words, is_budget, level_of_each, parse_size
from .offload import SHARE, free_host_memory, host_memory
from .planner import Prediction, of_module, usable

log = logging.getLogger("liger_hw")
_PART = "activations"
_DEFAULT = "activations by default"
"""Marks a default level, which a level that the user names may replace; `_PART` marks the user's."""
_SCOPES = {"keep": recipes.KEEP, "cheap": recipes.CHEAP, "mlp": recipes.MLP}


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers: the `ModuleList` with most parameters, preferring layers that transformers can checkpoint.

    A list whose last layer has the model's last `layer_idx` comes first, before a larger vision tower. Raises
    `ValueError` if the model has no `ModuleList`.
    """
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    with_layers = [m for m in lists if all(_is_layer(child) for child in m)] or lists
    if not with_layers:
        raise ValueError(
            f"activations: {type(model).__name__} has no list of layers; run its forward in a "
            "`with liger_hw.activations(level):` block instead"
        )
    return list(max(with_layers, key=lambda m: (_is_last(m[-1]), sum(p.numel() for p in m.parameters()))))


def _is_layer(module: torch.nn.Module) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def activations(setting: Levels, model: torch.nn.Module | None = None) -> "recipes.Scope | Dial":
    """Keep or recompute activations by level: of our ops in a `with` block, or of each layer of a model.

    setting: `keep`, `cheap`, `mlp`, `full`, `tiled` or `offload` (levels.py describes them). With a model also a
    sequence with one level for each layer, a mapping from layer index to level, `fit` (the fastest mix that fits the
    device's memory), or a size such as `80GiB`.
    model: a live model with a list of layers. Its levels hold until `revert()` or the end of the `with` block.

    Gradients are bit-identical to `keep`'s. Only gradients of an MLP's weights at `tiled` and `offload` differ:
    these are fp32 sums over tiles, rounded once. Raises `ValueError` for an invalid setting.
    """
    if model is not None:
        return Dial(model, setting)
    if is_budget(setting) or not isinstance(setting, str) or setting in CHECKPOINTED:
        raise ValueError(
            f"activations({setting!r}) needs the model's layers: call activations({setting!r}, model), or pass "
            "activations= to its apply_liger_kernel_to_* function; keep, cheap and mlp need no model"
        )
    return recipes.Scope(_SCOPES[check_level(setting)])


# -- one layer -------------------------------------------------------------------------------------------------------


def run_at(level: str, layer: torch.nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """`forward(*args, **kwargs)` of a layer at a level.

    As in transformers, a checkpointed layer gets no cache in training, and is not checkpointed if it gets one in
    `eval()`. Raises `ValueError` in training for a cache that has tokens, such as prefix tuning's.
    """
    checkpointed_already = level in CHECKPOINTED and recipes.inside_foreign_hooks()
    caches = _caches(args, kwargs) if level in CHECKPOINTED else []
    fills_cache = bool(caches) and not layer.training
    if checkpointed_already or fills_cache or not torch.is_grad_enabled():
        if checkpointed_already and level == "offload":
            recipes.log_once(
                "activations: level offload moves no layer inputs to the host under another checkpoint "
                "(gradient_checkpointing); turn that off"
            )
        with Tiles() if level in ("tiled", "offload") else contextlib.nullcontext():
            return forward(*args, **kwargs)
    if level not in CHECKPOINTED:
        hooked = recipes.inside_foreign_hooks()
        if level != "keep" and recipes.hooks_may_write(layer):
            recipes.log_once(
                f"activations: level {level} keeps everything in layers whose modules have hooks: a hook may write to "
                "an output's `.data`, which would not be repeated; level full runs hooks again",
                logging.WARNING,
            )
            level = "keep"
        with recipes.Scope(_SCOPES[level]) as scope:
            returned = forward(*args, **kwargs)
        if level != "keep" and not scope.handles and not hooked:
            _warn_nothing_saved(level, layer, returned)
        return returned
    if any(_has_tokens(cache, layer) for cache in caches):
        words = f"level {level} recomputes layers, which cannot read a cache that has tokens (prefix tuning)"
        raise ValueError(f"activations: {words}; name keep, cheap or mlp")
    if caches:
        recipes.log_once("a layer that is recomputed cannot fill a cache; as in transformers, it gets none")
        args = tuple(None if _is_cache(arg) else arg for arg in args)
        kwargs = {name: None if name in _CACHES or _is_cache(arg) else arg for name, arg in kwargs.items()}
    options = {} if level == "full" else {"context_fn": lambda: (Tiles(), Tiles())}  # for forward, for recomputation
    if isinstance(forward, functools.partial) and getattr(forward.args[0], "gradient_checkpointing", False):
        # with transformers' checkpoint inside this one, the layer would be computed three times
        forward = functools.partial(getattr(forward.func, "__wrapped__", forward.func), *forward.args)
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    memory = host_memory(device) if level == "offload" else None
    with contextlib.nullcontext() if memory is None else memory.hooks():
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


_CACHES = "cache", "past_key_values"
"""Keywords of a layer's cache, since transformers 5.24 and before. `_is_cache` recognises caches under other names."""


def _caches(args: tuple, kwargs: dict) -> list[Any]:
    named = [arg for name, arg in kwargs.items() if arg is not None and (name in _CACHES or _is_cache(arg))]
    return [arg for arg in args if _is_cache(arg)] + named


def _is_cache(arg: Any) -> bool:
    return hasattr(arg, "get_seq_length")


def _has_tokens(cache: Any, layer: torch.nn.Module) -> bool:
    """Whether a cache has tokens of this layer. False for caches of recurrent layers, which do not count tokens."""
    try:
        if not cache.get_seq_length():
            return False
        index = _place(layer)[0] or 0
        return index in getattr(cache, "transformer_layers", (index,)) and bool(cache.get_seq_length(index))
    except (AttributeError, ValueError):  # an unknown kind of cache; a recurrent layer, since transformers 5
        return False


def _warn_nothing_saved(level: str, layer: torch.nn.Module, returned: Any) -> None:
    """Warn once that a layer keeps everything at its level. A frozen layer, which keeps nothing, gets no warning."""
    first = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(first, torch.Tensor) or not first.requires_grad:
        return
    recipes.log_once(
        f"activations: level {level} saves no memory in {type(layer).__name__}: none of its kept tensors can be "
        "recomputed. The cause is torch's tensor parallelism (DTensors), a device without kernels, or unpatched norms "
        "and gates. Level full works there too",
        logging.WARNING,
    )


# -- choosing --------------------------------------------------------------------------------------------------------


class Choice:
    """The levels of a model's `count` layers: named by the setting, or planned in the first training forward.

    planned_for, prediction: (batch, sequence length) and Prediction of the plan, or None
    """

    def __init__(self, setting: Any, count: int, config: Any) -> None:
        self.setting, self.planning, self.config = setting, is_budget(setting), config
        self.levels = ("keep",) * count if self.planning else level_of_each(setting, count)
        self.prediction: Prediction | None = None
        self.planned_for: tuple[int, int] | None = None

    def level(self, index: int, source: torch.nn.Module, args: tuple, kwargs: dict) -> str:
        """The level of layer `index` in this call. source: the module whose dtypes and sharding the planner reads"""
        first = not index or self.planned_for is None  # later stages of a pipeline have no layer 0
        if self.planning and first and torch.is_grad_enabled():
            self._plan(source, args, kwargs)
        return self.levels[index]

    def _plan(self, source: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Plan for this batch, unless the current plan is for as many tokens."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or recipes.inside_foreign_hooks():
            return
        shape, planned = tuple(hidden.shape[:2]), self.planned_for
        if planned is not None and shape[0] * shape[1] <= planned[0] * planned[1]:
            return
        device = hidden.device
        autocast = torch.is_autocast_enabled(device.type)
        compute = torch.get_autocast_dtype(device.type).itemsize if autocast else hidden.element_size()
        planner = of_module(source, self.config, *shape, compute)
        budget = usable(device) if self.setting == FIT else parse_size(self.setting)
        host = SHARE * free_host_memory() if device.type != "cpu" else math.inf
        self.prediction, self.planned_for = planner.best(budget, host), shape
        self.levels = self.prediction.levels
        words = "liger_hw: activations=%r at %d x %d: %s (%s)"
        log.info(words, self.setting, *shape, self.prediction, planner.assumptions)


# -- one model, or a class -------------------------------------------------------------------------------------------


class Dial:
    """Levels set on the layers of one live model, until `revert()` or the end of the `with` block.

    levels: each layer's current level; prediction: the plan's, or None. `activations` describes `setting`.
    """

    def __init__(self, model: torch.nn.Module, setting: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            got = model.__name__ if isinstance(model, type) else type(model).__name__
            raise TypeError(f"activations: model must be a loaded model, got {got}; call activations(setting, model)")
        self.model = model
        self.layers = layers_of(model)
        self._choice = Choice(setting, len(self.layers), getattr(model, "config", None))
        if self._choice.planning:
            of_module(model, self._choice.config, 1, 1)  # raises if it cannot be planned
        self._patches: list[Patch] = []
        with PATCH_LOCK:
            for index, layer in enumerate(self.layers):
                slot = forward_slot(layer)
                forward = getattr(layer, slot)
                _check_has_no_level(forward, type(layer).__name__)
                replacement = types.MethodType(self._at_its_level(index, forward, layer), layer)
                self._patches.append(Patch(layer, slot, replacement))
            for patch in self._patches:
                patch.apply()

    def _at_its_level(self, index: int, forward: Callable[..., Any], layer: torch.nn.Module) -> Callable[..., Any]:
        choice, model = self._choice, self.model
        function = forward.__func__ if getattr(forward, "__self__", None) is layer else None
        of_class = function is type(layer).forward

        @functools.wraps(forward)
        def at_its_level(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # `self` may be a copy of the layer, and FSDP2 replaces a layer's class
            unbound = type(self).forward if of_class else function
            layer_forward = forward if unbound is None else functools.partial(unbound, self)
            if torch.compiler.is_compiling():
                recipes.log_compiling()
                return layer_forward(*args, **kwargs)
            return run_at(choice.level(index, model, args, kwargs), self, layer_forward, args, kwargs)

        mark(at_its_level, _PART, _PART)
        return at_its_level

    @property
    def levels(self) -> tuple[str, ...]:
        return self._choice.levels

    @property
    def prediction(self) -> Prediction | None:
        return self._choice.prediction

    def revert(self) -> bool:
        """Put every layer's forward back; False if other code has replaced one, which a later call tries again."""
        with PATCH_LOCK:
            self._patches = [patch for patch in reversed(self._patches) if not patch.revert()][::-1]
        return not self._patches

    def __enter__(self) -> "Dial":
        return self

    def __exit__(self, *_: Any) -> None:
        self.revert()

    def __repr__(self) -> str:
        return f"activations of {type(self.model).__name__}: {in_words(self.levels)}"


def class_patch(cls: type, setting: Any) -> Patch:
    """The patch that gives every layer of class `cls` its level, in existing models and in new ones.

    A layer's index and its model's config are read from its modules (`layer_idx`, `config`). Without them `setting`
    must be one level for all layers, else the layer's forward raises `ValueError`.
    """
    original, switch = cls.forward, [True]
    _check_has_no_level(original, cls.__name__)
    choices: dict[int, Choice] = {}  # by id of the config, which the choice keeps alive
    positions: weakref.WeakKeyDictionary[torch.nn.Module, tuple] = weakref.WeakKeyDictionary()

    def position(layer: torch.nn.Module) -> tuple[int | None, Choice | None]:
        index, config = _place(layer)
        if index is not None and config is not None:
            return index, choices.setdefault(id(config), Choice(setting, config.num_hidden_layers, config))
        if setting in LEVELS:
            return None, None
        raise ValueError(
            f"activations={setting!r}: {cls.__name__} has no layer_idx or config to find its level by; patch a live "
            "model (model=...) or name one level for all layers"
        )

    @functools.wraps(original)
    def at_its_level(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(original, self)
        if torch.compiler.is_compiling():
            recipes.log_compiling()
            return forward(*args, **kwargs)
        if not switch:
            return forward(*args, **kwargs)
        if self not in positions:
            positions[self] = position(self)
        index, choice = positions[self]
        level = setting if choice is None else choice.level(index, self, args, kwargs)
        return run_at(level, self, forward, args, kwargs)

    return _on_class(cls, at_its_level, _PART, switch)


def _place(layer: torch.nn.Module) -> tuple[int | None, Any]:
    """A layer's index and its model's config."""
    parts = list(layer.modules())
    index = next((m.layer_idx for m in parts if isinstance(getattr(m, "layer_idx", None), int)), None)
    config = next((m.config for m in parts if hasattr(getattr(m, "config", None), "num_hidden_layers")), None)
    return index, config


def _on_class(cls: type, forward: Callable[..., Any], part: str, switch: list[bool]) -> Patch:
    """The patch of a layer class's forward by `forward`, inside the checkpointing wrapper that transformers'
    GradientCheckpointingLayer puts around the forward of every subclass.

    switch: emptied by revert; FSDP2's subclass of a layer has a wrapper too, which outlives the patch
    """
    replacement = vars(type(cls.__name__, (cls,), {"forward": forward}))["forward"]
    mark(replacement, part, _PART, switch)
    return Patch(cls, "forward", replacement)


def _check_has_no_level(forward: Callable[..., Any], name: str) -> None:
    if getattr(forward, PATCH_MARK, ("",))[0] == _PART and getattr(forward, SWITCH, True):
        raise ValueError(
            f"activations: {name} has a level already; revert() that first (in a copy of a patched model: "
            "liger_hw.revert(model))"
        )


def put_on(
    report: PatchReport, setting: Any, model: torch.nn.Module | None, samples: Sequence[torch.nn.Module]
) -> None:
    """Apply `activations=` of a patch function to a live model, or to the layer classes of samples."""
    if model is not None:
        dial = Dial(model, setting)
        report.patches.append(dial)
        names = {type(layer).__name__ for layer in dial.layers}
    else:
        if not is_budget(setting) and (isinstance(setting, str) or not isinstance(setting, (Mapping, Sequence))):
            level_of_each(setting, 1)  # raises for an invalid setting
        classes = {type(layers_of(sample)[0]) for sample in samples}
        for cls in classes:
            patch = class_patch(cls, setting)
            patch.apply()
            report.patches.append(patch)
        names = {cls.__name__ for cls in classes}
    report.rows += [PatchRow(_PART, f"{name}.forward", "-", str(setting)) for name in sorted(names)]


# -- the default -----------------------------------------------------------------------------------------------------


def put_default(report: PatchReport, model: torch.nn.Module | None, samples: Sequence[torch.nn.Module]) -> None:
    """Set the last layer to `cheap`: of a live model, or of all models with the layer classes of samples.

    Does nothing if there is no list of layers, if the last layer has a level or a replaced forward, or, for classes, if
    the class is another family's or has no `layer_idx`.
    """
    for sample in samples if model is None else (model,):
        try:
            layer = layers_of(sample)[-1]
        except ValueError:
            continue
        slot, cls, switch = forward_slot(layer), type(layer), [True]
        forward = getattr(layer, slot)
        unchanged = getattr(forward, "__self__", None) is layer and forward.__func__ is cls.forward
        if not unchanged or hasattr(forward, PATCH_MARK):
            continue
        if model is not None:
            function = last_at_cheap(cls.forward, None, switch)
            mark(function, _DEFAULT, _PART, switch)
            patch = Patch(layer, slot, types.MethodType(function, layer))
        elif cls.__module__ == report.module and _is_last(layer):
            patch = _on_class(cls, last_at_cheap(cls.forward, _is_last, switch), _DEFAULT, switch)
        else:
            continue
        words = 'at cheap by default; activations="keep" keeps all'
        patch.apply()
        report.patches.append(patch)
        report.rows.append(PatchRow(_PART, f"last {cls.__name__}.forward", "-", words))


def _is_last(layer: torch.nn.Module) -> bool:
    index, config = _place(layer)
    return config is not None and index == config.num_hidden_layers - 1
