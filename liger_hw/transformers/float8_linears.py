"""`liger_hw.float8(model)`: the linears of a live model multiply in FP8.

Their class becomes `Float8Linear`, a subclass of `nn.Linear`. Parameters, buffers, hooks and names stay the same, so
state_dict, optimizers, checkpointing and FSDP work as before, and `undo` restores the class. With `keep_frozen`, a
linear whose weight does not train becomes a `KeptFloat8Linear`, which stores only FP8; `weight` and state_dict still
give it in its dtype. Linears of one parent share the FP8 copy of an input that several of them take (q, k, v; gate,
up).
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
"""A linear with fewer inputs or outputs takes longer to quantise than its product saves."""
_ROUTERS = {"router", "gate"}
"""Parts of the paths of linears that choose experts: rounding could change their discrete choice."""


class SharedInput:
    """The last input of some linears and its FP8 copy, which a backward keeps. Both are weak references."""

    def __init__(self) -> None:
        self.state: tuple | None = None

    def rows(self, x: torch.Tensor, settings: Settings) -> Float8Rows:
        """x in FP8: the previous linear's copy, if that had the same tensor, unchanged since.

        Each linear takes a copy once: a tensor that comes to it again is quantised again, since a write through
        `x.data` does not change the version. (Such a write between two linears of one forward goes unnoticed; in torch
        too it makes the first one's gradient wrong.) Tensors of `torch.inference_mode` have no version and are
        quantised each time.
        """
        counts, taker = not x.is_inference(), id(settings)
        if counts and self.state is not None:
            ref, version, takers, *parts = self.state
            data, scale = (part() for part in parts)
            is_same = ref() is x and x._version == version and taker not in takers
            if is_same and data is not None and scale is not None:
                takers.add(taker)
                return Float8Rows(data, scale)
        with torch.no_grad():
            rows = quantized(as_rows(x), E4M3, settings.recipe.rowwise)
        if counts:
            self.state = weakref.ref(x), x._version, {taker}, weakref.ref(rows.data), weakref.ref(rows.scale)
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {"state": None}


@dataclass
class Settings:
    """How one linear computes. shared: the SharedInput of linears with the same input; kept: the former dtype of a
    weight that is kept in FP8."""

    recipe: Recipe
    shared: SharedInput | None = None
    kept: torch.dtype | None = None
    scales: Scales = field(default_factory=Scales)


class Float8Linear(nn.Linear):
    """An `nn.Linear` whose products are in FP8; see `liger_hw.transformers.functional.liger_float8_linear`."""

    float8: Settings

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [..., in_features]; returns [..., out_features]."""
        undone = not isinstance(self, Float8Linear)  # a wrapper has kept this method after `undo`
        if undone or isinstance(input, torch.fx.Proxy):
            return nn.functional.linear(input, self.weight if undone else self._widened(), self.bias)
        settings, (weight, *state) = self.float8, self._operands()
        if _is_left_to_torch(input, weight):
            return nn.functional.linear(input, self._widened(), self.bias)
        if is_dtensor(weight) or is_dtensor(input):
            raise ValueError(
                "float8: this linear's weight is split over ranks (tensor parallelism), whose scales would differ; "
                "call report.undo(), or shard with FSDP2, which gathers a weight before it is used"
            )
        rows = None
        if settings.shared is not None and not torch.compiler.is_compiling():
            rows = settings.shared.rows(input, settings)
        return linear(input, weight, self.bias, rows, settings.recipe, "float8", *state)

    def after_gate(self, act: str, a: torch.Tensor, b: torch.Tensor, owned: bool) -> torch.Tensor | None:
        """This linear of act(a) * b, which is written in FP8 only; None if a hook or another forward needs it."""
        hooks = self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks
        if any(hooks) or "forward" in vars(self) or act not in GATES or not self.float8.recipe.rowwise or too_wide(a):
            return None
        weight, *state = self._operands()
        if is_dtensor(weight) or is_dtensor(a) or _is_left_to_torch(a, weight):
            return None
        return gated_linear(GATES[act], a, b, weight, self.bias, owned, "float8", *state)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor | None, Scales | None]:
        """The weight, its scale if it is kept in FP8, and where to note scales for `overflow` (not under
        torch.compile)."""
        return self.weight, None, None if torch.compiler.is_compiling() else self.float8.scales

    def _widened(self) -> torch.Tensor:
        """The weight in its dtype."""
        return self.weight

    def give_back(self) -> None:
        """Become the former linear again. A weight that was kept in FP8 stays rounded."""
        del self.float8
        self.__class__ = nn.Linear


_KEPT_AS_IT_IS = (
    "float8: a weight kept in FP8 cannot be changed, trained, or have an adapter merged into it; call report.undo() "
    "first, which gives the weights back in their dtype"
)
_CAST = (
    "float8: a weight kept in FP8 was cast to {}, without its scale; do not cast the model (model.to(dtype), "
    "FSDP's MixedPrecisionPolicy(param_dtype=)), or leave out keep_frozen"
)


class KeptWeight(torch.Tensor):
    """What reading `weight` of a `KeptFloat8Linear` returns: a temporary tensor in its dtype. Writing to it raises
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
            raise ValueError(_KEPT_AS_IT_IS)
        with without_torch_function():
            result = func(*args, **kwargs)
            tensors = isinstance(result, torch.Tensor) and isinstance(target, KeptWeight) and result.dim() > 0
            is_view = tensors and result.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
            return result.as_subclass(cls) if is_view else result

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.clone()


class KeptFloat8Linear(Float8Linear):
    """A `Float8Linear` whose weight, which does not train, is kept in FP8 alone: a parameter `weight_fp8` and a buffer
    `weight_scale`."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight in its dtype, computed at each read."""
        weight = self._widened()
        if not is_dtensor(weight) and not torch.compiler.is_compiling():
            weight = weight.as_subclass(KeptWeight)
            weight.linear = self
        return weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif getattr(value, "linear", None) is not self:  # PEFT's unload() writes back the weight that it has read
            raise ValueError(_KEPT_AS_IT_IS)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor | None, Scales | None]:
        weight = self.weight_fp8
        if weight.dtype.itemsize > 1:
            raise ValueError(_CAST.format(weight.dtype))
        if weight.requires_grad:
            raise ValueError(_KEPT_AS_IT_IS)
        return weight, self.weight_scale, None if torch.compiler.is_compiling() else self.float8.scales

    def _apply(self, fn: Callable, *args: Any) -> nn.Module:
        weight = self.weight_fp8
        if (dtype := fn(torch.empty(1, dtype=weight.dtype, device=weight.device)).dtype) is not weight.dtype:
            raise ValueError(_CAST.format(dtype))
        return super()._apply(fn, *args)

    def keep(self) -> None:
        """Quantise the weight of a linear that has just got this class, and free the wider one."""
        weight = self._parameters.pop("weight")
        rows = quantized(weight.detach(), E4M3, self.float8.recipe.rowwise)
        self.float8.kept = weight.dtype
        self._parameters = {"weight_fp8": nn.Parameter(rows.data, requires_grad=False), **self._parameters}
        self.register_buffer("weight_scale", rows.scale, persistent=False)

    def _widened(self) -> torch.Tensor:
        weight, scale = self.weight_fp8.detach(), self.weight_scale[:, None]
        if is_dtensor(weight):  # FSDP2's: some rows on each rank, but all scales
            from torch.distributed.tensor import Replicate

            mesh = weight.device_mesh
            scale = type(weight).from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return (weight.float() * scale).to(self.float8.kept)

    def give_back(self) -> None:
        weight = nn.Parameter(self._widened(), requires_grad=False)
        del self.weight_fp8, self.weight_scale
        self._parameters = {"weight": weight, **self._parameters}
        super().give_back()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The weight is stored in its dtype, on the CPU, since the device may have no room for it."""
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
    """What `float8` did; `undo` reverts it. linears: path -> sizes of each linear in FP8; left_alone: path -> why it is
    not; unmatched: texts of `skip` that are in no linear's path."""

    recipe: str
    linears: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    _modules: list[nn.Linear] = field(default_factory=list, repr=False)

    def undo(self) -> int:
        """Restore every linear's class; returns how many. Raises `ValueError` if a linear was parametrised or sharded
        by itself since, or a weight that is kept in FP8 was sharded since."""
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
            module.give_back()
        self._modules.clear()
        return len(ours)

    def overflow(self) -> dict[str, str]:
        """Path -> which of `input`, `weight` and `gradient` (of the output) had an infinity or NaN in the linear's last
        forward and backward. Quantising finite numbers never overflows.

        It is read from the scales, so training does no extra work; the call waits for the device. Linears that
        torch.compile traced are not included.
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
    """Make the linears of a live model multiply in FP8, forward and backward; before or after `patch`.

    model: on a device that has FP8, or on the CPU, where FP8 is computed exactly and slowly
    recipe: `rowwise`, a scale for each row of each tensor, or `tensorwise`, one for each tensor
    skip: linears whose path contains one of these texts stay as they are. So do heads, routers, linears with fewer than
    `smallest` inputs or outputs or sizes that are no multiples of 16, other classes (quantised ones, GPT-2's Conv1D),
    and linears with a replaced forward.
    keep_frozen: weights that do not train, as LoRA's base weights, are kept in FP8 alone: one byte a number, and no
    quantising in a step. `weight`, `state_dict` and `undo` give them in their dtype, but rounded. Weights that several
    modules share do not change, nor does a model's first weight, from which `model.dtype` is read.

    Returns a `Float8Report`, whose `undo()` reverts it. Raises `ValueError` for another recipe, a device without FP8, a
    model in which no linear fits, and keep_frozen if all weights train.
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
                f"float8: keep_frozen=True, but the numbers of {path}.weight are not all here; call it after the model "
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
    """Whether torch's own linear runs for an input: traced, nested, sparse, of a width or dtype that torch refuses, in
    fp64, empty, or on the meta device."""
    if is_traced() or x.is_nested or x.layout is not torch.strided:
        return True
    return x.shape[-1:] != weight.shape[1:] or x.dtype not in KERNEL_DTYPES or not x.numel() or x.device.type == "meta"


def _heads(model: nn.Module) -> set[nn.Module]:
    """The loss heads of the model and of models inside it, by transformers' names, with the modules in a head (PEFT's
    copy of it, say), and linears whose weight is an embedding's."""
    modules = list(model.modules())
    embeddings = {module.weight for module in modules if isinstance(module, nn.Embedding)}
    heads = {module for module in modules if module._parameters.get("weight") in embeddings}
    for module in modules:
        output = getattr(module, "get_output_embeddings", None)
        try:
            head = output() if callable(output) else None
        except (AttributeError, NotImplementedError):  # a part without a head
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
