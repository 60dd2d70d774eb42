"""Recipes: in backward, compute tensors again that autograd would have saved.

In its forward an op attaches a recipe to its output (`offer`): how it is computed again from tensors that are saved
anyway. In an open `Scope`, saved-tensor hooks save a `Handle` in place of each tensor that has a recipe. A recipe also
covers views of the output and autocast's copies of it. In backward it calls the same operator on the same inputs under
the same autocast state, so gradients are bit-identical.

    x --rms_norm--> y --linear--> q        y's recipe is rms_norm(x, w); q, k and v each save a handle on it.
                      --linear--> k        The first whose backward runs computes y, the last releases it.
                      --linear--> v

A recipe's inputs may have recipes too. Tensors without a recipe are saved with a version check, which torch omits in
saved-tensor hooks. Ops import this file, so it must not import them.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import weakref
from typing import Any, Callable

import torch

from ..locks import fork_safe
from ..private import allows_saved_tensor_hooks, hooks_on_every_module, hooks_on_top

log = logging.getLogger("liger_hw")

KEEP, CHEAP, MLP = 0, 1, 2
"""What a scope recomputes: nothing; outputs of ops that offer a recipe; projections before a gate too."""
_MARK = "_liger_hw_recipe"
_scopes_open = 0  # process-wide, so that ops without a scope pay one comparison
_casts_seen = False  # process-wide: whether an output was computed under autocast
_counting = fork_safe(threading.Lock())
_logged: set[str] = set()


class _Local(threading.local):
    def __init__(self) -> None:
        self.scope: Scope | None = None  # the innermost open one
        self.entered: list[tuple] = []  # (outer scope, own hooks) of each open one; None: entered without gradients
        self.tiles: Callable[..., torch.Tensor] | None = None  # runs `tileable` forwards, if set


_local = _Local()

# -- what ops call ---------------------------------------------------------------------------------------------------


def offer(
    ctx: Any,
    output: torch.Tensor,
    call: Callable[..., Any],
    args: tuple,
    index: int | None = None,
    unsaved: torch.Tensor | None = None,
    number: int = 0,
) -> None:
    """Give `output` a recipe, in an autograd.Function's forward: `call(*args)`, or the item `index` of its result.

    call: deterministic and cheap, returns new tensors; args: the Function saves all tensors among them except `unsaved`
    unsaved: a tensor among `args` that must have a recipe itself; else `output` gets none
    number: the output's place among the Function's outputs
    """
    global _casts_seen
    if _no_scope_open() or _level() == KEEP or not any(ctx.needs_input_grad) or output.is_meta:
        return
    if unsaved is not None and _recipe_of(unsaved) is None:
        return
    recipe = Recipe(call, args, index, output)
    _attach(recipe, output)
    if output.dtype is torch.float32 and torch.is_autocast_enabled(output.device.type):
        _casts_seen = True
        ctx.__dict__.setdefault(_MARK, {})[number] = weakref.ref(output)  # the node outlives its outputs


def offer_all(ctx: Any, outputs: tuple[torch.Tensor, ...], call: Callable[..., Any], args: tuple) -> None:
    """`offer` for a Function whose outputs are the items of `call(*args)`, which is computed once for all of them."""
    if _no_scope_open() or _level() == KEEP:
        return
    whole = Recipe(call, args, None, outputs[0])
    for number, output in enumerate(outputs):
        offer(ctx, output, operator.itemgetter(number), (Handle(whole),), number=number)


def project(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`module(x)` for a projection before a gated activation, which level `mlp` computes again in backward.

    Only linears, also with LoRA, without hooks and active dropout are recomputed; outputs of other modules are kept.
    """
    y = module(x)
    if _no_scope_open() or _level() < MLP or not isinstance(y, torch.Tensor) or y.grad_fn is None:
        return y
    call = _recipe_for_module(module, x) if type(y) is torch.Tensor else None
    if call is None:
        log_once(
            f"level mlp keeps the output of a {type(module).__name__} instead of computing it again: it has hooks or a "
            "forward that replaces its class's (tensor parallelism, ZeRO-3, FSDP units), gives a DTensor, or "
            "drops at random",
            logging.WARNING,
        )
    else:
        _attach(Recipe(*call, None, y), y)
    return y


def _attach(recipe: Recipe, output: torch.Tensor) -> None:
    """Attach the recipe to the output's storage. A storage with two outputs gets none, since a saved view could be of
    either."""
    marks = vars(output.untyped_storage())
    marks[_MARK] = None if _MARK in marks else recipe


def _no_scope_open() -> bool:
    """Whether no scope is open in any thread."""
    return not _scopes_open


# torch.compile takes the value at tracing for a constant; a guard would compile code twice, in and outside a scope.
_no_scope_open._dynamo_marked_constant = True


def recomputing() -> bool:
    """Whether this thread's open scope recomputes outputs with recipes."""
    return _level() > 0


def is_free() -> bool:
    """Whether this thread has neither an open scope nor other saved-tensor hooks."""
    return _local.scope is None and not inside_foreign_hooks()


def _level() -> int:
    """KEEP, CHEAP or MLP, by this thread's innermost scope."""
    if torch.compiler.is_compiling() or _local.scope is None:
        return KEEP
    return _local.scope.level


# -- the hooks -------------------------------------------------------------------------------------------------------


def pack(t: torch.Tensor) -> Any:
    """Saved-tensor hook: a Handle for a tensor with a recipe, else (tensor, version)."""
    recipe = _recipe_of(t)
    if recipe is None:
        return pack_kept(t)
    if _local.scope is not None:
        _local.scope.handles += 1
    return Handle(recipe, t)


def _recipe_of(t: torch.Tensor) -> "Recipe | None":
    try:
        recipe = t.untyped_storage().__dict__.get(_MARK)
    except NotImplementedError:  # sparse tensors have no storage
        return None
    if recipe is None and _casts_seen:
        recipe = _recipe_of_cast(t if t._base is None else t._base)
    return recipe if recipe is not None and recipe.is_valid_for(t) else None


def pack_kept(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Saved-tensor hook for tensors that are kept: (tensor, version)."""
    if not t.is_leaf:
        t = t.detach()  # a node that saves its own output would never be freed
    return t, t._version


def unpack(packed: Any) -> torch.Tensor:
    """Saved-tensor hook: the packed tensor, bit for bit."""
    if type(packed) is tuple:
        t, version = packed
        if t._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{t.dtype} {list(t.shape)} is at version {t._version}; expected version {version} instead"
            )
        return t
    return packed.recipe.value_of(packed)


def _recipe_of_cast(t: torch.Tensor) -> "Recipe | None":
    """A recipe for autocast's copy of an output that has one. All copies in one dtype share it."""
    node = t.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    source, number = node.next_functions[0]
    output = getattr(source, _MARK, {}).get(number, _no_reference)()
    parent = None if output is None else _recipe_of(output)
    if parent is None or (t.shape, t.stride()) != parent.geometry[:2] or t.device != parent.device or t._version:
        return None
    recipe = parent.casts.get(t.dtype, _no_reference)()
    if recipe is None:
        recipe = Recipe(cast, (t.dtype, Handle(parent)), None, t)
        parent.casts[t.dtype] = weakref.ref(recipe)
    return recipe


def _no_reference() -> None:
    return None


class Recipe:
    """How to compute a tensor again. The tensor's storage and the handles saved in its place hold it.

    live: number of handles; value: the recomputed tensor, freed when each of `waiting` handles has read it
    epoch: number of recomputations so far; a handle's epoch is its number when the handle was last read
    """

    __slots__ = (
        *("call", "args", "index", "name", "dtype", "device", "version", "geometry", "casts"),
        *("live", "value", "waiting", "epoch", "stream", "__weakref__"),
    )

    def __init__(self, call: Callable[..., Any], args: tuple, index: int | None, output: torch.Tensor) -> None:
        self.call, self.index = call, index
        self.name = getattr(call, "__name__", None) or str(call)
        self.args = [_packed(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        self.dtype, self.device, self.version = output.dtype, output.device, output._version
        self.geometry = output.shape, output.stride(), output.storage_offset()
        self.casts: dict[torch.dtype, weakref.ref] = {}
        self.live = self.waiting = self.epoch = 0
        self.value = self.stream = None

    def is_valid_for(self, t: torch.Tensor) -> bool:
        """Whether `t`, in the output's storage, is unchanged and can be computed again.

        It cannot if an input was written to or freed. FSDP frees a norm's weight after the norm's forward, and gathers
        it for the norm's backward only after the next op's backward has needed the norm's output.
        """
        return t.dtype is self.dtype and t._version == self.version and self.has_inputs()

    def has_inputs(self) -> bool:
        for arg in self.args:
            if type(arg) in _PACKED and not arg.is_available():
                return False
        return True

    def value_of(self, handle: "Handle") -> torch.Tensor:
        """The tensor in whose place the handle was saved, bit for bit."""
        on_cpu = self.device.type == "cpu"
        stream = None if on_cpu else torch.get_device_module(self.device).current_stream(self.device)
        value = self.value
        if value is None:
            value = self._compute()
            self.epoch += 1
            self.waiting = self.live
            self.value, self.stream = value, stream
        elif stream != self.stream:  # this stream does not wait for the one that computed the value
            value = self._compute()
        if handle.epoch != self.epoch:
            handle.epoch = self.epoch
            self.waiting -= 1
        if not self.waiting:
            self.value = None
        return value if handle.view is None else value.as_strided(*handle.view)

    def release(self, handle: "Handle") -> None:
        """Called when a handle is freed."""
        self.live -= 1
        if self.value is not None and handle.epoch != self.epoch:
            self.waiting -= 1
            if not self.waiting:
                self.value = None

    def _compute(self) -> torch.Tensor:
        args = [arg.restore(self.name, i) if type(arg) in _PACKED else arg for i, arg in enumerate(self.args)]
        with torch.no_grad():
            result = self.call(*args)
        return result if self.index is None else result[self.index]


class Handle:
    """Saved in place of a tensor with a recipe. view: the tensor's (size, stride, offset); None: the output's"""

    __slots__ = ("recipe", "view", "epoch")

    def __init__(self, recipe: Recipe, t: torch.Tensor | None = None) -> None:
        self.recipe, self.view, self.epoch = recipe, None, 0
        if t is not None:
            geometry = t.shape, t.stride(), t.storage_offset()
            self.view = None if geometry == recipe.geometry else geometry
        recipe.live += 1
        if recipe.value is not None:
            recipe.waiting += 1

    def is_available(self) -> bool:
        return self.recipe.has_inputs()

    def restore(self, name: str, index: int) -> torch.Tensor:
        return self.recipe.value_of(self)

    def __del__(self) -> None:
        self.recipe.release(self)


def _packed(t: torch.Tensor) -> "Handle | _Input":
    recipe = _recipe_of(t)
    return _Input(t) if recipe is None else Handle(recipe, t)


class _Input:
    """A recipe's input that has no recipe, and is kept."""

    __slots__ = ("tensor", "version", "count")

    def __init__(self, t: torch.Tensor) -> None:
        self.tensor, self.version = pack_kept(t)
        self.count = t.numel()

    def is_available(self) -> bool:
        """Whether the tensor is unchanged and has memory. FSDP frees a weight's storage. ZeRO-3 makes a weight empty,
        unless it is persistent."""
        t = self.tensor
        has_memory = t.numel() == self.count and (self.count == 0 or t.untyped_storage().nbytes() > 0)
        return has_memory and t._version == self.version and getattr(t, "ds_persist", True)

    def restore(self, name: str, index: int) -> torch.Tensor:
        t = self.tensor
        if not self.is_available():
            what = "changed in place" if t._version != self.version else "freed"
            raise RuntimeError(
                f"liger_hw: the output of {name} was not kept, and cannot be computed again: argument {index} of "
                f"{name} ({t.dtype} {list(t.shape)}) was {what}. Do not change it before backward, or run that part "
                'under liger_hw.activations("keep")'
            )
        return t


_PACKED = (Handle, _Input)
"""Types of a recipe's arguments that were tensors."""

# -- whether a module can be run again with the same bits ------------------------------------------------------------


def _recipe_for_module(module: torch.nn.Module, x: torch.Tensor) -> tuple[Callable[..., Any], tuple] | None:
    """(call, args) of a recipe for `module(x)`; None if the bits might differ."""
    kind = x.device.type
    autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    if type(module) is torch.nn.Linear:
        return None if _has_hooks(module) else (linear, (autocast, x, module.weight, module.bias))
    if not all(_is_deterministic(part) and not _has_hooks(part) for part in module.modules()):
        return None
    return call_module, (autocast, module, x, *module.parameters())


def linear(autocast: tuple, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer. autocast: (device type, dtype, whether it is on)"""
    kind, dtype, enabled = autocast
    with torch.autocast(kind, dtype, enabled, cache_enabled=False):
        return torch.nn.functional.linear(x, weight, bias)


def call_module(autocast: tuple, module: torch.nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """`module(x)`. parameters: the module's; as arguments of a recipe they are checked for changes in place"""
    kind, dtype, enabled = autocast
    with torch.autocast(kind, dtype, enabled, cache_enabled=False):
        return module(x)


def cast(dtype: torch.dtype, source: torch.Tensor) -> torch.Tensor:
    return source.to(dtype)


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or hasattr(module, "_hf_hook") or "forward" in vars(module)  # as tensor parallelism replaces it


def _is_deterministic(module: torch.nn.Module) -> bool:
    """Linears, containers, and dropout that drops nothing."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p == 0 or not module.training
    plain = (torch.nn.Linear, torch.nn.Identity, torch.nn.ModuleDict, torch.nn.ModuleList, torch.nn.ParameterDict)
    return isinstance(module, plain) or any(True for _ in module.children())


_LINEARS_FROM = ("torch", "torchao", "peft", "bitsandbytes", "liger_hw")
"""Packages whose linears keep no reference to their outputs."""
_FRAMEWORKS = "transformers accelerate deepspeed lightning lightning_fabric pytorch_lightning".split()
_TRUSTED_HOOKS_FROM = (*_LINEARS_FROM, *_FRAMEWORKS)
"""Packages whose hooks do not write to a tensor without raising its version."""


def hooks_may_write(layer: torch.nn.Module) -> bool:
    """Whether user hooks run inside a layer. One that writes to an output's `.data` or numpy view does not raise the
    version, and a recipe would not repeat the write."""
    parts = list(layer.children())  # not the layer itself, whose hooks run outside its forward
    for part in parts:  # the loop appends to it
        if part._forward_hooks or part._forward_pre_hooks:
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
                module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
                if module.partition(".")[0] not in _TRUSTED_HOOKS_FROM:
                    return True
        parts += [child for child in part._modules.values() if child is not None]
    return False


def owns_outputs(*projections: torch.nn.Module) -> bool:
    """Whether nothing but the caller holds the outputs of these modules.

    If so, a gated activation's backward may overwrite them, its inputs, with their gradients (`owned=True`).
    True for linear layers (plain, quantised or with adapters) without hooks or a replaced forward. False in foreign
    saved-tensor hooks, which may keep the tensors, except in checkpointing's.
    """
    if torch.compiler.is_compiling():
        return False
    if inside_foreign_hooks():
        pack, *_ = innermost_hooks() or (None,)
        if getattr(pack, "__module__", "") != "torch.utils.checkpoint":
            return False
    _, after_forward, _, after_backward = hooks_on_every_module
    if after_forward or after_backward:
        return False
    return all([_is_plain(module) for module in projections])


def _is_plain(module: Any) -> bool:
    attributes = module.__dict__
    if type(module) is not torch.nn.Linear:
        package = type(module).__module__.partition(".")[0]
        base = attributes["_modules"].get("base_layer")
        if package not in _LINEARS_FROM or not hasattr(module, "out_features"):
            return False
        if not _is_plain(base) if base is not None else package == "peft":  # modules_to_save wraps any module
            return False
    return not (attributes["_forward_hooks"] or attributes["_backward_hooks"] or "forward" in attributes)


# -- scopes ----------------------------------------------------------------------------------------------------------


class Scope:
    """A block in which this thread recomputes activations by `level`: KEEP, CHEAP or MLP.

    Scopes nest and may be entered again. A scope has no effect without gradients, under torch.compile, and inside other
    saved-tensor hooks (gradient checkpointing, offloading), which must get every tensor saved in their block.
    handles: number of handles that were saved in place of tensors
    """

    __slots__ = ("level", "handles")

    def __init__(self, level: int) -> None:
        self.level, self.handles = level, 0

    def __enter__(self) -> "Scope":
        global _scopes_open
        if torch.compiler.is_compiling():
            log_compiling()
            return self
        if not torch.is_grad_enabled():
            _local.entered.append(None)
            return self
        scope, hooks = self, None
        if inside_foreign_hooks():
            scope = _KEEP_SCOPE
            log_once("activations: levels do nothing inside other saved-tensor hooks (checkpointing, offloading)")
        elif self.level != KEEP or innermost_hooks() is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(pack if self.level != KEEP else pack_kept, unpack)
            hooks.__enter__()
        _local.entered.append((_local.scope, hooks))
        _local.scope = scope
        with _counting:
            _scopes_open += 1
        return self

    def __exit__(self, *error: Any) -> None:
        global _scopes_open
        if torch.compiler.is_compiling():
            return
        entered = _local.entered.pop()
        if entered is None:
            return
        with _counting:
            _scopes_open -= 1
        _local.scope, hooks = entered
        if hooks is not None:
            hooks.__exit__(*error)


_KEEP_SCOPE = Scope(KEEP)


def tileable(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Make an MLP's `forward(self, x)` run in tiles of rows in a `with Tiles()` block (kernels/pointwise/tiled_mlp.py).
    Its rows must be independent."""

    @functools.wraps(forward)
    def run(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        tiles = None if torch.compiler.is_compiling() else _local.tiles
        return forward(self, x) if tiles is None else tiles(forward, self, x)

    return run


def run_tileable_by(tiles: Callable[..., torch.Tensor] | None) -> Callable[..., torch.Tensor] | None:
    """Run this thread's `tileable` forwards as `tiles(forward, module, x)`, or unchanged for None. Returns the previous
    setting."""
    before, _local.tiles = _local.tiles, tiles
    return before


def innermost_hooks() -> Any:
    """This thread's innermost saved-tensor hooks, or None."""
    return hooks_on_top(True)


def inside_foreign_hooks() -> bool:
    """Whether the innermost saved-tensor hooks are not ours, or hooks are forbidden."""
    hooks = innermost_hooks()
    if hooks is None:
        return not allows_saved_tensor_hooks()
    return hooks[0] is not pack and hooks[0] is not pack_kept


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message once in a process."""
    if message not in _logged:
        _logged.add(message)
        log.log(level, "liger_hw: %s", message)


def log_compiling() -> None:
    log_once("torch.compile decides what to keep for backward; activations= does nothing in compiled code")


log_compiling._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result does: it runs while tracing
