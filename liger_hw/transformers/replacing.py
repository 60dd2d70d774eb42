"""Replacements of forwards and rotary functions: a kernel on the module's own weights, under guards (`guarded`).

probing/ runs a module and chooses the replacement that computes the same. A patched class may have instances that
differ, and a module may change after patching. So guards are checked at every call; if one fails, the original runs.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from .. import env
from ..distributed import owners
from ..recompute import recipes
from ..recompute.recipes import owns_outputs, project, recomputing, tileable
from ..runtime.operator import is_transformed
from ..runtime.triton_import import INTERPRET
from . import functional
from .marks import original_of
from .source import EVERYTHING, OF_CONFIG, reads

KERNEL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Dtypes that kernels take. The CPU references take float64 too."""


def should_use_original(x: Any) -> bool:
    """Whether a patched module runs its original forward on x: under torch.jit, torch.fx and torch.func, for dtypes
    other than KERNEL_DTYPES, and on the CPU.

    On the CPU the references of kernels are slower than the original. They run only if kernels are interpreted,
    activations are recomputed, or LIGER_HW_CPU_REFERENCE is set.
    """
    if is_traced() or isinstance(x, torch.fx.Proxy):
        return True
    if x.is_cpu:
        return not (INTERPRET or recomputing() or _references_wanted())
    return x.dtype not in KERNEL_DTYPES


def is_traced() -> bool:
    """Whether torch.jit is tracing or torch.func transforming; then a model's original code runs."""
    return torch.jit.is_tracing() or is_transformed()


def _references_wanted() -> bool:
    return env.LIGER_HW_CPU_REFERENCE


# what torch.compiler.assume_constant_result does, without importing the compiler
_references_wanted._dynamo_marked_constant = True


def runs_kernels(x: Any) -> bool:
    """Whether a patched module runs a kernel on x."""
    return not should_use_original(x) and not x.is_nested


# -- guards: what another module, or the same one later, must share with the probed module ----------------------------

Guards = tuple[tuple[str, str, Any], ...]
"""(kind, attribute, expected value) for each attribute of the module that is compared; `holds` defines the kinds."""

INSTANCE_FORWARDS = ("forward", "_old_forward", "_hf_hook")
"""Attributes by which accelerate's hooks or other code replace the forward of one module."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Types whose values are compared with ==."""


def guards_of(module: nn.Module, function: Callable, used: frozenset[str]) -> Guards:
    """Guards under which `function` computes the same on another module of the class as on `module`.

    They compare all attributes that `function` reads, except those `used` by the kernel and sizes of weights. A weight
    is compared by its number of dimensions, or as None.
    """
    names = reads(type(module), function)
    if EVERYTHING in names:
        names = names | vars(module).keys() | module._modules.keys() | module._parameters.keys()
    sizes = _weight_sizes(module)
    guards: list[tuple[str, str, Any]] = []
    shapes = owners.parameter_shapes(module)
    flattened = shapes.keys() - module._parameters.keys()
    for name in sorted(names - flattened - (used - shapes.keys())):
        if name in module._modules:
            child = module._modules[name]
            guards.append(("child", name, None if child is None else _state(child)))
        elif name in module._parameters:
            shape = shapes[name]
            guards.append(("dims", name, None if shape is None else len(shape)))
        elif name in vars(module) and name not in (*_MODULE_ATTRIBUTES, *INSTANCE_FORWARDS, "config"):
            guards += _value_guard(name, module, sizes)
        elif name not in INSTANCE_FORWARDS and not hasattr(nn.Module, name):
            member = inspect.getattr_static(type(module), name, None)
            if isinstance(member, types.FunctionType):
                guards.append(("method", name, member))
    config = vars(module).get("config")
    if config is not None and "config" in names:
        if EVERYTHING not in names:
            names = {name.removeprefix(OF_CONFIG) for name in names if name.startswith(OF_CONFIG)}
        if "_experts_implementation" in names:  # a property that reads this attribute
            names = names | {"_experts_implementation_internal"}
        for name in sorted(names & set(vars(config))):
            value = vars(config)[name]
            if isinstance(value, (bool, int, float, str, type(None))) and value not in sizes:
                guards.append(("config", name, value))
    return tuple(guards)


def holds(module: nn.Module, guards: Guards) -> bool:
    """Whether `module`, as it is now, meets the guards."""
    for kind, name, value in guards:
        if kind == "config":
            agree = vars(module.config).get(name) == value
        elif kind == "child":
            child = module._modules.get(name)
            agree = child is None if value is None else _has_state(child, value)
        elif kind == "dims":
            agree = _dims_now(module, name) in (value, _UNKNOWN)
        elif kind == "method":  # the class's method, not hidden by a function on the module
            agree = name not in module.__dict__ and stands_for(getattr(type(module), name, None), value)
        elif kind == "same":
            agree = getattr(module, name, None) == value
        else:
            current = getattr(module, name, None)
            agree = current is value.value or _comparable(current, module) == value.comparable
        if not agree:
            return False
    return True


def stands_for(current: Any, function: Any) -> bool:
    """Whether `current` is `function`, or a patch's replacement of it."""
    return current is function or original_of(current) is original_of(function)


_UNKNOWN = -1


def _dims_now(module: nn.Module, name: str) -> int | None:
    """The number of dimensions of a weight now, or None for no weight. A kernel for [width] cannot take [heads, width].

    `_UNKNOWN` for a parameter that PEFT computes at each access, which this would repeat.
    """
    # FSDP1 and replicas keep a weight as an attribute
    weight = (module._parameters if name in module._parameters else module.__dict__).get(name, module)
    return None if weight is None else weight.dim() if isinstance(weight, torch.Tensor) else _UNKNOWN


def _value_guard(name: str, module: nn.Module, sizes: set[int]) -> Guards:
    value = vars(module)[name]
    if isinstance(value, int) and not isinstance(value, bool) and value in sizes:
        return ()
    if isinstance(value, (tuple, list, torch.Size)) and all(isinstance(v, int) and v in sizes for v in value):
        return ()
    return (("same", name, value),) if isinstance(value, _PLAIN) else (("alike", name, _Value(value, module)),)


class _Value:
    """An attribute's value, compared and hashed by `_comparable`."""

    def __init__(self, value: Any, owner: nn.Module) -> None:
        self.value, self.comparable = value, _comparable(value, owner)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Value) and self.comparable == other.comparable

    def __hash__(self) -> int:
        return hash(self.comparable)


def _comparable(value: Any, owner: nn.Module) -> Any:
    """A key that is equal for values that compute the same.

    Tuples and partial functions are compared by their parts, methods of `owner` by their functions, and other values
    that are not `_PLAIN` by identity.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return tuple(_comparable(part, owner) for part in value)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return tuple(value.keywords), tuple(_comparable(part, owner) for part in parts)
    if isinstance(value, types.MethodType):
        return id(value.__func__), None if value.__self__ is owner else id(value.__self__)
    return id(value)


# -- children: what an activation computes depends on its class, its attributes and its hooks ------------------------


class _State(NamedTuple):
    """What a child module's result depends on. For a child with weights or children this is only the class. For others,
    such as activations, it is also the class's forward, whether the child is customised, and its attributes."""

    cls: type
    forward: Callable | None = None
    customised: bool = False
    attributes: tuple[tuple[str, _Value], ...] = ()


def _state(child: nn.Module) -> _State:
    if child._parameters or child._modules or child._buffers:
        return _State(type(child))
    names = [name for name in vars(child) if name not in _MODULE_ATTRIBUTES and name not in INSTANCE_FORWARDS]
    attributes = tuple((name, _Value(vars(child)[name], child)) for name in names)
    return _State(type(child), type(child).forward, is_customised(child), attributes)


def _has_state(child: Any, state: _State) -> bool:
    cls, forward, customised, attributes = state
    if type(child) is not cls:
        return False
    if forward is not None and (cls.forward is not forward or is_customised(child) != customised):
        return False
    for name, value in attributes:
        current = child.__dict__.get(name)
        if current is not value.value and _comparable(current, child) != value.comparable:
            return False
    return True


def current_forward(module: Any, slot: str = "forward") -> Callable:
    """The function behind a module's or class's attribute, unbound."""
    function = getattr(module, slot)
    return getattr(function, "__func__", function)


def is_customised(module: nn.Module) -> bool:
    """Whether a module has hooks or its own forward, so that a call does more than its class's forward.

    Hooks of FSDP2 and ZeRO-3, which gather weights, and accelerate's AlignDevicesHook do not count.
    """
    if owners.hooks_of(module) - {owners.FSDP2, owners.ZERO3}:
        return True
    hook = module.__dict__.get("_hf_hook")
    if hook is not None and all(type(each).__name__ == "AlignDevicesHook" for each in getattr(hook, "hooks", (hook,))):
        return False
    return current_forward(module) is not type(module).forward


def _weight_sizes(module: nn.Module) -> set[int]:
    sizes: set[int] = set()
    for part in (module, *module.children()):
        for shape in owners.parameter_shapes(part).values():
            sizes |= set(shape or ())
        for name in ("in_features", "out_features"):
            if isinstance(getattr(part, name, None), int):
                sizes.add(getattr(part, name))
    return sizes


# -- methods that a patch puts in place -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """A kernel that computes what a module or a rotary function computes.

    kernel: op name; variant: in words, for the report
    replacement: for a module a function of (module, *inputs), for a rotary function one of the original's arguments
    used: attributes of the module that `replacement` reads at every call, which guards therefore do not compare
    inputs: number of tensors that `replacement` takes after the module
    ready: function of (module, first input), called at every call besides the guards; False: the original runs
    takes: function of a call's other arguments {name: value}; False, or None with any argument: the original runs
    """

    kernel: str
    variant: str
    replacement: Callable
    used: frozenset[str] = frozenset()
    inputs: int = 1
    ready: Callable[[Any, torch.Tensor], bool] | None = None
    takes: Callable[[dict[str, Any]], bool] | None = None


def guarded(match: Match, guards: Guards, original: Callable, switch: list[bool]) -> Callable:
    """A method with `original`'s signature that calls `match.replacement`.

    It calls `original` if `switch` is empty, a guard fails, `runs_kernels` or `match.ready` is false for the input, or
    the match does not take the arguments.
    """
    replacement, ready, takes = match.replacement, match.ready, match.takes or (lambda options: not options)
    parameters = inspect.signature(original).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    takes_one, input_names = match.inputs == 1, names[: match.inputs]

    def applies(self: Any, x: Any) -> bool:
        if not switch or not runs_kernels(x) or (guards and not holds(self, guards)):
            return False
        return ready is None or ready(self, x)

    @functools.wraps(original)  # torch.fx reads the signature of the wrapped function
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if takes_one and len(args) == 1 and not kwargs:
            x = args[0]
            return replacement(self, x) if applies(self, x) else original(self, x)
        options = {**kwargs, **dict(zip(names, args))}
        fits = len(options) == len(args) + len(kwargs)  # false for too many arguments, or an argument passed twice
        inputs = [options.pop(name, None) for name in input_names]
        if not fits or any([t is None for t in inputs]) or not takes(options) or not applies(self, inputs[0]):
            return original(self, *args, **kwargs)
        return replacement(self, *inputs, **options)

    return forward


def if_class_unchanged(original: Callable, forward: Callable) -> Callable:
    """A method that runs `forward` while the class's forward is `original`, and the class's forward otherwise."""

    @functools.wraps(forward)
    def bound(self, *args, **kwargs):
        current = self.__class__.forward
        return (forward if stands_for(current, original) else current)(self, *args, **kwargs)

    return bound


def if_global_unchanged(module: Any, name: str, original: Callable, function: Callable) -> Callable:
    """A rotary function for a live model's copy of a forward. It calls `function`, the replacement of `original`. If a
    program sets the global `name` of `module` to another function, it calls that function."""
    initial = getattr(module, name)

    def rotary(*args, **kwargs):
        value = getattr(module, name)
        return (function if value is initial or stands_for(value, original) else value)(*args, **kwargs)

    rotary.__signature__ = inspect.signature(function)
    return rotary


# -- the last layer ----------------------------------------------------------------------------------------------------

LEAST_BYTES = 16 << 20
"""Least bytes of a layer's input for the default level of `recompute/dial.py`: 2048 tokens of width 4096 in bf16."""


def last_at_cheap(original: Callable, is_last: Callable[[nn.Module], bool] | None, switch: list[bool]) -> Callable:
    """A forward that runs the last layer at `cheap`. is_last: whether a layer is the last; None: the forward is for the
    last layer only.

    Without kernels, and under torch.compile, a level that the user named or other saved-tensor hooks, it does nothing.
    """
    is_last_layer: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unlevelled = original if is_last else type(self).forward  # FSDP2 changes a layer's class
        if torch.compiler.is_compiling() or not switch or not recipes.is_free():
            return unlevelled(self, *args, **kwargs)
        if self not in is_last_layer:
            is_last_layer[self] = is_last is None or is_last(self)
        x = args[0] if args else kwargs.get("hidden_states")
        too_small = not isinstance(x, torch.Tensor) or x.nbytes < LEAST_BYTES
        if not is_last_layer[self] or too_small or should_use_original(x) or recipes.hooks_may_write(self):
            return unlevelled(self, *args, **kwargs)
        with recipes.Scope(recipes.CHEAP):
            return unlevelled(self, *args, **kwargs)

    return forward


# -- norms ------------------------------------------------------------------------------------------------------------


def rms_norm_replacement(weight: str | None, eps: str | float, offset: float, casting_mode: str) -> Callable:
    """RMSNorm as a function of (module, x). weight: an attribute name or None; eps: a number or an attribute name"""
    from ..kernels.norms.rms_norm import CASTING_MODES, RMSNormFunction

    casting = CASTING_MODES[casting_mode]

    def replacement(self: Any, x: torch.Tensor) -> torch.Tensor:
        return RMSNormFunction.apply(x, weight and getattr(self, weight), _epsilon(self, eps), offset, casting)

    return replacement


def _epsilon(module: Any, eps: str | float) -> float:
    return getattr(module, eps) if isinstance(eps, str) else eps


def layer_norm_replacement(weight: str | None, bias: str | None, eps: str | float, offset: float) -> Callable:
    """LayerNorm as a function of (module, x). weight, bias, eps as above; offset: is added to the weight"""
    liger_layer_norm = functional.liger_layer_norm

    def replacement(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale = None if weight is None else getattr(self, weight)
        shift = None if bias is None else getattr(self, bias)
        if x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
            x = x.float()  # as torch's LayerNorm under autocast
        return liger_layer_norm(x, scale + offset if offset else scale, shift, _epsilon(self, eps))

    return replacement


def gated_rms_norm_replacement(
    weight: str, eps: str | float, activation: str, casting_mode: str, norm_before_gate: bool, groups: Any
) -> Callable:
    """Gated RMSNorm as a function of (module, x, gate). weight, eps as above; groups: a _Groups of probing/norms.py"""
    liger_gated_rms_norm = functional.liger_gated_rms_norm

    def replacement(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        options = activation, casting_mode, norm_before_gate, groups.columns(self, x.shape[-1])
        return liger_gated_rms_norm(x, gate, getattr(self, weight), _epsilon(self, eps), *options)

    return replacement


def weights_fit_kernel(
    weights: tuple[str, ...], eps: str | float, one_dtype: bool, outside_autocast: bool
) -> Callable[[Any, torch.Tensor], bool]:
    """A check of (module, x) before the kernel: each weight is a vector as wide as x, and epsilon a number.

    A program may have set others, which only the original takes. A weight that a parametrization computes is not
    checked, since reading it would compute it once more.
    one_dtype: x must have the first weight's dtype too; outside_autocast: autocast must be off
    """
    by_name = isinstance(eps, str)

    def ready(self: Any, x: torch.Tensor) -> bool:
        if outside_autocast and torch.is_autocast_enabled(x.device.type):
            return False
        parameters, attributes = self._parameters, self.__dict__  # FSDP1 and replicas keep weights as attributes
        for name in weights:
            computed = x  # marks a weight that is in neither
            weight = parameters[name] if name in parameters else attributes.get(name, computed)
            if weight is None or (weight is not computed and (weight.dim() != 1 or weight.size(0) != x.size(-1))):
                return False
        if by_name and not isinstance(attributes.get(eps), (float, int)):
            return False
        return not one_dtype or x.dtype is getattr(self, weights[0]).dtype

    return ready


# -- MLPs -------------------------------------------------------------------------------------------------------------

Cast = frozenset[torch.dtype]
"""Weight dtypes to which a module casts the input of its down projection (T5 casts to fp32 for its fp32 `wo`)."""


def _projected(down: nn.Module, y: torch.Tensor, cast: Cast) -> torch.Tensor:
    if cast:
        weight = down.weight
        if isinstance(weight, torch.Tensor) and weight.dtype in cast:
            y = y.to(weight.dtype)
    return down(y)


def _gate_kernel(act: str) -> Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]:
    """act(gate) * up as a function of (gate, up, owned). owned: whether backward may overwrite gate and up"""
    if act == "silu":
        from ..kernels.pointwise.swiglu import SiLUMulFunction

        return lambda gate, up, owned: SiLUMulFunction.apply(gate, up, 1.0, 1.0, owned)
    from ..kernels.pointwise.geglu import GELUMulFunction

    return lambda gate, up, owned: GELUMulFunction.apply(gate, up, act == "gelu_tanh", owned)


def gated_replacement(
    act: str, gate: str, up: str, down: str, *, up_first: bool, gate_scale: str, out_scale: str, cast: Cast
) -> Callable:
    """down(act(gate(x)) * up(x)) as a function of (module, x). gate, up, down: names of the module's projections

    gate_scale, out_scale: names of attributes that scale the gate and the result, or ""; up_first: up is called first
    cast: down's input is cast to the dtype of down's weight if that is among these
    """
    kernel, liger_swiglu, may_fuse = _gate_kernel(act), functional.liger_swiglu, not gate_scale and not cast

    @tileable
    def replacement(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate_projection, up_projection, projection = getattr(self, gate), getattr(self, up), getattr(self, down)
        if up_first:
            u = project(up_projection, x)
            g = project(gate_projection, x)
        else:
            g = project(gate_projection, x)
            u = project(up_projection, x)
        if g.dtype is not u.dtype:  # a hook or an adapter has cast one of them to a wider dtype
            wide = torch.promote_types(g.dtype, u.dtype)
            g, u = g.to(wide), u.to(wide)
        owned, y = owns_outputs(gate_projection, up_projection), None
        if may_fuse and hasattr(type(projection), "after_gate"):  # Float8Linear: one kernel for gate and quantisation
            y = projection.after_gate(act, g, u, owned)
        if y is None:
            h = liger_swiglu(g, u, getattr(self, gate_scale), owned=owned) if gate_scale else kernel(g, u, owned)
            y = _projected(projection, h, cast)
        return y * getattr(self, out_scale) if out_scale else y

    return replacement


def halves_replacement(act: str, gate_first: bool) -> Callable:
    """act(gate) * up as a function of (module, gate_up, owned). gate_up: both as halves of one tensor; owned: whether
    backward may overwrite it"""
    if act == "silu" and gate_first:
        fused = functional.liger_fused_gate_up_swiglu
        return lambda self, gate_up, owned: fused(gate_up, owned=owned)
    kernel = _gate_kernel(act)

    def replacement(self: Any, gate_up: torch.Tensor, owned: bool) -> torch.Tensor:
        first, second = gate_up.chunk(2, -1)
        return kernel(first, second, owned) if gate_first else kernel(second, first, owned)

    return replacement


def one_projection_replacement(activation: Callable, up: str, down: str, out_scale: str, cast: Cast) -> Callable:
    """down(activation(module, up(x), owned)) as a function of (module, x); cast as above."""

    @tileable
    def replacement(self: Any, x: torch.Tensor) -> torch.Tensor:
        projection = getattr(self, up)
        y = activation(self, project(projection, x), owns_outputs(projection))
        y = _projected(getattr(self, down), y, cast)
        return y * getattr(self, out_scale) if out_scale else y

    return replacement


# -- rotary functions -------------------------------------------------------------------------------------------------
#
# Each function below returns a replacement of `original` that calls one kernel. If the kernel does not support a call
# (no k, a cache of another length, learned angles, another layout), the replacement calls `original`.


def of_q_and_k(function: type, form: Any, widths: int, original: Callable) -> Callable:
    """For functions of (q, k, cos, sin, [position_ids], unsqueeze_dim=1).

    function: the kernel's autograd.Function; form: layout of pairs and angles (`kernels/rotary/rotary.py`)
    widths: number of rotated columns for each column of cos
    position_ids is ignored, as in transformers since 4.40, whose cos and sin belong to the positions already.
    """

    def rotated(q: Any, k: Any, cos: Any, sin: Any, axis: int) -> Any:
        if not runs_kernels(q):
            return None
        if axis == 0 and cos.dim() == 2:  # one image's patches: [T, width] for every batch and head
            cos, sin, axis = cos[None], sin[None], 1
        if not _fits_q_and_k(q, k, cos, sin, axis):
            return None
        return function.apply(q, k, cos, sin, widths * cos.shape[-1], axis, form)

    if "position_ids" in inspect.signature(original).parameters:

        def rotary(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
            return rotated(q, k, cos, sin, unsqueeze_dim) or original(q, k, cos, sin, position_ids, unsqueeze_dim)

    else:

        def rotary(q, k, cos, sin, unsqueeze_dim=1):
            return rotated(q, k, cos, sin, unsqueeze_dim) or original(q, k, cos, sin, unsqueeze_dim)

    return rotary


def _fits_q_and_k(q: torch.Tensor, k: Any, cos: torch.Tensor, sin: torch.Tensor, axis: int) -> bool:
    if k is None or axis not in (1, 2) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return False
    tokens = q.shape[3 - axis]
    if k.shape[3 - axis] != tokens or k.shape[0] != q.shape[0] or cos.shape[1] != tokens:
        return False
    return cos.shape[0] in (1, q.shape[0]) and not cos.requires_grad and not sin.requires_grad


def three_axes(original: Callable) -> Callable:
    """For Qwen2-VL's function in transformers 4: cos and sin of three position axes; mrope_section: columns of each."""
    mrope = functional.liger_qwen2vl_mrope

    def rotary(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        if not runs_kernels(q) or cos.requires_grad or q.dim() != 4 or cos.dim() != 4:
            return original(q, k, cos, sin, mrope_section, unsqueeze_dim)
        return mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)

    return rotary


def packed_patches(original: Callable) -> Callable:
    """For packed patches of all images: q and k [T, heads, width], cos and sin [T, width]."""
    rope = functional.liger_vision_rope

    def rotary(q, k, cos, sin):
        packed = runs_kernels(q) and q.dim() == 3 and cos.dim() == 2 and cos.shape[0] == q.shape[0] == k.shape[0]
        if not packed or cos.requires_grad or sin.requires_grad:
            return original(q, k, cos, sin)
        return rope(q, k, cos, sin)

    return rotary


def complex_angles(tokens_axis: int, original: Callable) -> Callable:
    """For functions of (q, k, complex angles).

    q and k: [B, T, heads, width] for tokens_axis 1 (Llama 4), [B, heads, T, width] for 2 (DeepSeek-V2)
    angles: [B or 1, T, half], or [T, 1, half] in Llama 4's vision tower
    """
    rope = functional.liger_llama4_rope

    def rotated(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> Any:
        if not runs_kernels(q) or q.dim() != 4 or k.dim() != 4 or angles.dim() != 3 or angles.requires_grad:
            return None
        if not angles.is_complex():  # model.to(torch.bfloat16) makes a buffer of angles real
            return None
        tokens = q.shape[tokens_axis]
        if angles.shape[1] == 1 and angles.shape[0] == tokens != 1:
            angles = angles.transpose(0, 1)
        if k.shape[tokens_axis] != tokens or angles.shape[1] != tokens or angles.shape[0] not in (1, q.shape[0]):
            return None
        angles = angles.to(q.device)
        if tokens_axis == 1:
            return rope(q, k, angles)
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), angles)
        return q.transpose(1, 2), k.transpose(1, 2)

    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def rotary(*args, **kwargs):
        inputs = *args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)
        result = rotated(*inputs) if len(inputs) == len(args) + len(kwargs) == 3 else None
        return result or original(*args, **kwargs)

    del rotary.__wrapped__  # else `rebind` takes it for a decorator around the original
    return rotary
