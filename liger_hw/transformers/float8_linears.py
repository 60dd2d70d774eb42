"""`liger_hw.float8(model)`: linears of a live model compute their products in FP8.

Their class becomes `Float8Linear`, a subclass of `nn.Linear`. Parameters, buffers, hooks and names stay the same, so
state_dict, optimizers, checkpointing and FSDP work as before, and `undo` restores the class. With `keep_frozen`, a
linear whose weight does not train becomes a `KeptFloat8Linear`, which stores the weight in FP8 only; `weight` and
state_dict still have its former dtype. Linears of one parent with the same input (q, k, v; gate, up) quantise it once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import env
from ..kernels.float8 import geglu_float8, swiglu_float8
from ..kernels.float8.float8_linear import RECIPES, Recipe, Scales, as_rows, linear
from ..kernels.float8.formats import E4M3, Float8Rows, float8_dtype
from ..kernels.float8.gated_rows import gated_linear
from ..kernels.float8.quantize_float8 import quantized
from ..kernels.float8.whole_rows import too_wide
from ..ops import expect
from ..private import without_torch_function
from ..runtime.sharding import is_dtensor
from ..text import table
from .replacing import KERNEL_DTYPES, is_traced

GATES = {"silu": swiglu_float8.GATE, "gelu_tanh": geglu_float8.TANH, "gelu": geglu_float8.EXACT}
SMALLEST = 512
"""For linears with fewer inputs or outputs, quantising takes longer than FP8 saves."""
_ROUTERS = {"router", "gate"}
"""Names in paths of linears that choose experts; rounding could change the choice."""


class SharedInput:
    """The last input of some linears and its FP8 copy, as weak references; the linears' backwards keep the copy."""

    def __init__(self) -> None:
        self.state: tuple | None = None

    def rows(self, x: torch.Tensor, settings: Settings) -> Float8Rows:
        """x in FP8: the previous linear's copy, if x is the same tensor and unchanged.

        Each linear uses a copy once. If x comes to it again, x is quantised again, since a write through `x.data` does
        not change the version. (Such a write between two linears of one forward is not noticed. In plain torch it makes
        the first one's gradient wrong too.) Tensors of `torch.inference_mode` have no version and are quantised each
        time.
        """
        has_version, user = not x.is_inference(), id(settings)
        if has_version and self.state is not None:
            ref, version, users, *parts = self.state
            data, scale = (part() for part in parts)
            is_same = ref() is x and x._version == version and user not in users
            if is_same and data is not None and scale is not None:
                users.add(user)
                return Float8Rows(data, scale)
        with torch.no_grad():
            rows = quantized(as_rows(x), E4M3, settings.recipe.rowwise)
        if has_version:
            self.state = weakref.ref(x), x._version, {user}, weakref.ref(rows.data), weakref.ref(rows.scale)
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {"state": None}


@dataclass
class Settings:
    """How one linear computes. shared: one for all linears with the same input; kept_dtype: former dtype of a weight
    that is kept in FP8"""

    recipe: Recipe
    shared: SharedInput | None = None
    kept_dtype: torch.dtype | None = None
    scales: Scales = field(default_factory=Scales)


class Float8Linear(nn.Linear):
    """An `nn.Linear` with products in FP8, by `liger_hw.transformers.functional.liger_float8_linear`'s kernels."""

    float8: Settings

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [..., in_features]; returns [..., out_features]."""
        undone = not isinstance(self, Float8Linear)  # a wrapper still calls this method after `undo`
        if undone or isinstance(input, torch.fx.Proxy):
            return nn.functional.linear(input, self.weight if undone else self._widened(), self.bias)
        settings, (weight, *state) = self.float8, self._operands()
        if _is_left_to_torch(input, weight):
            return nn.functional.linear(input, self._widened(), self.bias)
        if is_dtensor(weight) or is_dtensor(input):
            raise ValueError(
                "float8: this linear's weight is split over ranks (tensor parallelism), each with other scales; call "
                "report.undo(), or shard with FSDP2, which gathers a weight before it is used"
            )
        rows = None
        if settings.shared is not None and not torch.compiler.is_compiling():
            rows = settings.shared.rows(input, settings)
        return linear(input, weight, self.bias, rows, settings.recipe, "float8", *state)

    def after_gate(self, act: str, a: torch.Tensor, b: torch.Tensor, owned: bool) -> torch.Tensor | None:
        """This linear's output for the input act(a) * b, which is computed in FP8 only. None if the linear has hooks or
        another forward, which may read that input, or if the kernel does not support the arguments."""
        hooks = self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks
        if any(hooks) or "forward" in vars(self) or act not in GATES or not self.float8.recipe.rowwise or too_wide(a):
            return None
        weight, *state = self._operands()
        if is_dtensor(weight) or is_dtensor(a) or _is_left_to_torch(a, weight):
            return None
        return gated_linear(GATES[act], a, b, weight, self.bias, owned, "float8", *state)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor | None, Scales | None]:
        """(weight, its scale if it is kept in FP8, the Scales that `overflow` reads; None under torch.compile)"""
        return self.weight, None, None if torch.compiler.is_compiling() else self.float8.scales

    def _widened(self) -> torch.Tensor:
        """The weight in its former dtype."""
        return self.weight

    def restore(self) -> None:
        """Become an `nn.Linear` again. A weight that was kept in FP8 stays rounded."""
        del self.float8
        self.__class__ = nn.Linear


_READ_ONLY = (
    "float8: a weight kept in FP8 cannot be changed, trained, or have an adapter merged into it; call report.undo() "
    "first, which gives the weights back in their dtype"
)
_CAST = (
    "float8: a weight kept in FP8 was cast to {}, without its scale; do not cast the model (model.to(dtype), "
    "FSDP's MixedPrecisionPolicy(param_dtype=)), or leave out keep_frozen"
)


class KeptWeight(torch.Tensor):
    """`weight` of a `KeptFloat8Linear`: a temporary tensor in the weight's former dtype. Writing to it raises
    `ValueError`, since the values would be lost."""

    _is_param = True  # for isinstance(weight, nn.Parameter)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs["out"] if "out" in kwargs else next(iter((*args, *kwargs.values())), None)
        name = func.__name__.partition(".")[0]  # torch.ops.aten.add_.Tensor is "add_.Tensor"
        writes = name.endswith("_") and not name.endswith("__") or name.startswith(("__i", "__set")) or "out" in kwargs
        freezes = name in ("__set__", "requires_grad_") and args[-1] is False
        targets = target if isinstance(target, (list, tuple)) else (target,)
        if writes and not freezes and any(isinstance(one, KeptWeight) for one in targets):
            raise ValueError(_READ_ONLY)
        with without_torch_function():
            result = func(*args, **kwargs)
            tensors = isinstance(result, torch.Tensor) and isinstance(target, KeptWeight) and result.dim() > 0
            is_view = tensors and result.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
            return result.as_subclass(cls) if is_view else result

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.clone()


class KeptFloat8Linear(Float8Linear):
    """A `Float8Linear` with a frozen weight, which is kept in FP8 only: a parameter `weight_fp8` and a buffer
    `weight_scale`."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight in its former dtype, computed at each read."""
        weight = self._widened()
        if not is_dtensor(weight) and not torch.compiler.is_compiling():
            weight = weight.as_subclass(KeptWeight)
            weight.linear = self
        return weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif getattr(value, "linear", None) is not self:  # PEFT's unload() assigns the weight that it has read
            raise ValueError(_READ_ONLY)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor | None, Scales | None]:
        weight = self.weight_fp8
        if weight.dtype.itemsize > 1:
            raise ValueError(_CAST.format(weight.dtype))
        if weight.requires_grad:
            raise ValueError(_READ_ONLY)
        return weight, self.weight_scale, None if torch.compiler.is_compiling() else self.float8.scales

    def _apply(self, fn: Callable, *args: Any) -> nn.Module:
        weight = self.weight_fp8
        if (dtype := fn(torch.empty(1, dtype=weight.dtype, device=weight.device)).dtype) is not weight.dtype:
            raise ValueError(_CAST.format(dtype))
        return super()._apply(fn, *args)

    def keep(self) -> None:
        """Quantise the weight of a linear that has just got this class, and free it in its former dtype."""
        weight = self._parameters.pop("weight")
        rows = quantized(weight.detach(), E4M3, self.float8.recipe.rowwise)
        self.float8.kept_dtype = weight.dtype
        self._parameters = {"weight_fp8": nn.Parameter(rows.data, requires_grad=False), **self._parameters}
        self.register_buffer("weight_scale", rows.scale, persistent=False)

    def _widened(self) -> torch.Tensor:
        weight, scale = self.weight_fp8.detach(), self.weight_scale[:, None]
        if is_dtensor(weight):  # sharded by FSDP2: some rows on each rank, but every scale
            from torch.distributed.tensor import Replicate

            mesh = weight.device_mesh
            scale = type(weight).from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return (weight.float() * scale).to(self.float8.kept_dtype)

    def restore(self) -> None:
        weight = nn.Parameter(self._widened(), requires_grad=False)
        del self.weight_fp8, self.weight_scale
        self._parameters = {"weight": weight, **self._parameters}
        super().restore()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Store the weight in its former dtype, on the CPU, as it might not fit on the device."""
        weight = self._widened()
        destination[f"{prefix}weight"] = weight if is_dtensor(weight) else weight.cpu()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight_fp8"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight, kept = state_dict.pop(f"{prefix}weight", None), self.weight_fp8
        if weight is None:
            missing_keys, weight = args[2], kept
            missing_keys.append(f"{prefix}weight")
        elif weight.shape == kept.shape:
            weight = weight.full_tensor() if is_dtensor(weight) else weight
            weight, scale = quantized(weight.to(self.weight_scale.device), E4M3, self.float8.recipe.rowwise)
            self.weight_scale.copy_(scale)
            if is_dtensor(kept):
                from torch.distributed.tensor import distribute_tensor

                weight = distribute_tensor(weight, kept.device_mesh, kept.placements, src_data_rank=None)
        state_dict[f"{prefix}weight_fp8"] = weight
        super()._load_from_state_dict(state_dict, prefix, *args)


_CLASSES = (Float8Linear, KeptFloat8Linear)


@dataclass
class Float8Report:
    """What `float8` changed; `undo` reverts it. linears: path -> sizes of each linear in FP8; left_alone: path -> why a
    linear is not in FP8; unmatched: texts of `skip` that are in no linear's path"""

    recipe: str
    linears: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    _modules: list[nn.Linear] = field(default_factory=list, repr=False)

    def undo(self) -> int:
        """Restore the linears' class; returns their number. Raises `ValueError` if a linear was later parametrised or
        made an FSDP2 unit, or a weight that is kept in FP8 was later sharded."""
        for path, module in zip(self.linears, self._modules):
            if isinstance(module, Float8Linear) and type(module) not in _CLASSES:
                raise ValueError(
                    f"float8: {path} was parametrised since, or sharded by itself, and is a {type(module).__name__}; "
                    "remove its parametrizations before undo(), or call undo() before fully_shard()"
                )
            if is_dtensor(getattr(module, "weight_fp8", None)):
                raise ValueError(f"float8: {path}'s weight is kept in FP8 and was sharded since; save a state_dict")
        ours = [module for module in self._modules if type(module) in _CLASSES]
        for module in ours:
            module.restore()
        self._modules.clear()
        return len(ours)

    def overflow(self) -> dict[str, str]:
        """Path -> which of `input`, `weight` and `gradient` (of the output) had an infinity or NaN in the linear's
        last forward and backward. Quantising finite numbers never overflows.

        The call reads their scales, so a step does no extra work, and waits for the device. Linears in compiled code
        are not included.
        """
        overflows = {}
        for path, module in zip(self.linears, self._modules):
            scales = vars(module.float8.scales).items()
            if names := [name for name, scale in scales if bool(scale.isnan().any())]:
                overflows[path] = ", ".join(names)
        return overflows

    def __str__(self) -> str:
        lines = [("linears", "", "what")]
        for what, entries in ((f"in FP8, {self.recipe}", self.linears), ("left alone", self.left_alone)):
            parts = [([part for part in path.split(".") if not part.isdigit()], text) for path, text in entries.items()]
            kinds = Counter((".".join(names[-2:]), text) for names, text in parts)
            lines += [(str(count), name, f"{what}: {text}") for (name, text), count in kinds.items()]
        lines += [("0", text, "skip= has this text, but no linear's path does") for text in self.unmatched]
        undone = "" if self._modules or not self.linears else "\nUndone: none of this is in place any more."
        return table(lines) + undone


def float8(
    model: nn.Module,
    recipe: str = "rowwise",
    *,
    skip: Iterable[str] | None = (),
    smallest: int = SMALLEST,
    keep_frozen: bool = False,
) -> Float8Report:
    """Make linears of a live model compute in FP8, forward and backward. It may be called before or after `patch`.

    model: on a device that has FP8, or on the CPU, where FP8 is computed exactly and slowly
    recipe: `rowwise`, a scale for each row of each tensor, or `tensorwise`, one for each tensor
    skip: linears whose path contains one of these texts are left alone. So are heads, routers, linears with fewer than
    `smallest` inputs or outputs or with sizes that are no multiples of 16, other classes (quantised linears, GPT-2's
    Conv1D), and linears with a replaced forward.
    keep_frozen: weights that do not train, such as LoRA's base weights, are kept in FP8 only: one byte a number, and no
    quantising in a step. `weight`, `state_dict` and `undo` return them in their former dtype, rounded. Weights of
    several modules are not changed, nor is a model's first weight, from which `model.dtype` is read.

    Returns a `Float8Report`. Raises `ValueError` for an unknown recipe, a device without FP8, a model in which every
    linear is left alone, and for keep_frozen if all weights train.
    """
    if recipe not in tuple(RECIPES):
        reason = "; block scales are for sm100 and later and have no kernel here; use rowwise" * (recipe == "mxfp8")
        raise ValueError(f"float8: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}{reason}")
    expect(model, nn.Module, "model", "a loaded model")
    expect(smallest, int, "smallest", "a number of inputs or outputs")
    expect(skip, (Iterable, type(None)), "skip", "texts of paths")
    report, heads, groups = Float8Report(recipe), _heads(model), {}
    skip = (skip,) if isinstance(skip, str) else tuple(skip or ())
    for text in skip:
        expect(text, str, "skip", "texts of paths")
    disabled = "LIGER_HW_DISABLE is set" if env.LIGER_HW_DISABLE else ""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
            continue
        why_invalid = disabled or ("the loss head" if module in heads else _why_not(path, module, skip, smallest))
        if why_invalid:
            report.left_alone[path] = why_invalid
            continue
        if module.weight.device.type != "meta":
            float8_dtype(module.weight.device, E4M3)
        report.linears[path] = f"{module.in_features} -> {module.out_features}"
        report._modules.append(module)
        parent = path.removesuffix(".base_layer").rpartition(".")[0]  # LoRA's base layers are one level deeper
        groups.setdefault((parent, module.in_features), []).append(module)
    paths = (*report.linears, *report.left_alone)
    report.unmatched = tuple(text for text in skip if not any(text in path for path in paths))
    if not report.linears and not disabled:
        raise ValueError("float8: no linear of this model fits:\n" + str(report))
    if keep_frozen and report.linears and all(module.weight.requires_grad for module in report._modules):
        raise ValueError(
            "float8: keep_frozen=True, but every weight of the linears trains; call it after get_peft_model or after "
            "requires_grad_(False), or leave it out"
        )
    for path, module in zip(report.linears, report._modules) if keep_frozen else ():
        if is_dtensor(module.weight) or module.weight.is_meta or not module.weight.numel():
            raise ValueError(
                f"float8: keep_frozen=True, but {path}.weight is sharded or has no data yet; call it after the model "
                "is loaded and before it is sharded"
            )
    for modules in groups.values():
        shared = SharedInput() if len(modules) > 1 else None
        for module in modules:
            module.__class__ = Float8Linear
            module.float8 = Settings(RECIPES[recipe], shared)
    uses = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    uses.update(next(module.parameters(), None) for module in model.modules() if hasattr(type(module), "dtype"))
    for path, module in zip(report.linears, report._modules) if keep_frozen else ():
        weight = module.weight
        if not weight.requires_grad and weight.dtype is not torch.float64 and uses[weight] == 1:
            module.__class__ = KeptFloat8Linear
            module.keep()
            report.linears[path] += ", kept"
    return report


def _is_left_to_torch(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's linear runs for x: traced, nested, sparse, empty, on the meta device, of another width than the
    weight's, or of a dtype other than KERNEL_DTYPES."""
    if is_traced() or x.is_nested or x.layout is not torch.strided:
        return True
    return x.shape[-1:] != weight.shape[1:] or x.dtype not in KERNEL_DTYPES or not x.numel() or x.device.type == "meta"


def _heads(model: nn.Module) -> set[nn.Module]:
    """Linears whose weight is an embedding's, and `get_output_embeddings()` of the model and of models inside it, with
    the modules inside a head (PEFT's copy of it, say)."""
    modules = list(model.modules())
    embeddings = {module.weight for module in modules if isinstance(module, nn.Embedding)}
    heads = {module for module in modules if module._parameters.get("weight") in embeddings}
    for module in modules:
        output = getattr(module, "get_output_embeddings", None)
        try:
            head = output() if callable(output) else None
        except (AttributeError, NotImplementedError):  # a module without a head
            continue
        if isinstance(head, nn.Module):
            heads.update(head.modules())
    return heads


def _why_not(path: str, module: nn.Linear, skip: tuple[str, ...], smallest: int) -> str:
    if isinstance(module, Float8Linear):
        return "in FP8 already"
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}"
    if "forward" in vars(module):
        return "its forward was replaced"
    weight = module.weight
    if weight.dtype.itemsize == 1 or is_traceable_wrapper_subclass(weight) and not is_dtensor(weight):
        return f"its weight is quantised ({type(weight).__name__}, {weight.dtype})"
    if any(text in path for text in skip):
        return "skipped"
    if not _ROUTERS.isdisjoint(path.split(".")):
        return "a router"
    if any(name.endswith("head") for name in path.split(".")):
        return "a head, by its name"
    sizes = f"{module.in_features} -> {module.out_features}"
    if min(module.in_features, module.out_features) < smallest:
        return f"{sizes}, smaller than {smallest}"
    if module.in_features % 16 or module.out_features % 16:
        return f"{sizes}, no multiples of 16"
    return ""
