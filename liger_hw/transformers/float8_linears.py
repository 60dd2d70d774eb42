"""`liger_hw.float8(model)`: the linears of a live model multiply in FP8.

Each one's class becomes `Float8Linear`, a subclass of `nn.Linear`: parameters, buffers, hooks and names stay the very
objects, so that state_dict, optimizers, checkpointing and FSDP see no difference, and `undo` gives the class back.
Linears of one parent share the FP8 copy of an input that several of them take (q, k, v; gate, up).
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Iterable

import torch
from torch import nn

from ..kernels.float8 import geglu_float8, swiglu_float8
from ..kernels.float8.float8_linear import RECIPES, Recipe, as_rows, linear
from ..kernels.float8.formats import E4M3, Float8Rows, float8_dtype
from ..kernels.float8.gated_rows import WIDEST, gated_linear
from ..kernels.float8.quantize_float8 import quantized
from ..runtime.sharding import is_dtensor
from ..text import table
from .replacing import is_traced

GATES = {"silu": swiglu_float8.GATE, "gelu_tanh": geglu_float8.TANH, "gelu": geglu_float8.EXACT}
SMALLEST = 512
"""A linear with fewer inputs or outputs takes longer to quantise than its product saves."""
_ROUTERS = ("router", "gate")
"""Last parts of the names of linears that choose experts: the choice is discrete, and no place for rounding."""


class SharedInput:
    """The last input of some linears, and its FP8 while a backward keeps it. Neither is kept alive from here."""

    def __init__(self) -> None:
        self.state: tuple | None = None

    def rows(self, x: torch.Tensor, recipe: Recipe) -> Float8Rows:
        """x in FP8: what the linear before made of it, if it had this very tensor, unchanged since.

        A tensor of `torch.inference_mode` does not count its changes: it is quantised each time.
        """
        counts = not x.is_inference()
        if counts and self.state is not None:
            ref, version, *parts = self.state
            data, scale = (part() for part in parts)
            if ref() is x and x._version == version and data is not None and scale is not None:
                return Float8Rows(data, scale)
        with torch.no_grad():
            rows = quantized(as_rows(x), E4M3, recipe.rowwise)
        if counts:
            self.state = weakref.ref(x), x._version, weakref.ref(rows.data), weakref.ref(rows.scale)
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {"state": None}


@dataclass
class Settings:
    """How one linear computes. shared: with whom it shares an input, or None."""

    recipe: Recipe
    shared: SharedInput | None = None


class Float8Linear(nn.Linear):
    """An `nn.Linear` whose products are in FP8; see `liger_hw.transformers.functional.liger_float8_linear`."""

    float8: Settings

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [..., in_features]; returns [..., out_features]."""
        settings, weight = self.float8, self.weight
        if is_dtensor(weight) or is_dtensor(input):
            raise ValueError(
                "float8: this linear's weight is split over ranks (tensor parallelism), whose scales would differ; "
                "call report.undo(), or shard with FSDP2, which gathers a weight before it is used"
            )
        if is_traced() or isinstance(input, torch.fx.Proxy) or input.dtype is torch.float64:
            return super().forward(input)
        rows = None
        if settings.shared is not None and not torch.compiler.is_compiling():
            rows = settings.shared.rows(input, settings.recipe)
        return linear(input, weight, self.bias, rows, settings.recipe, "float8")

    def after_gate(self, act: str, a: torch.Tensor, b: torch.Tensor, owned: bool) -> torch.Tensor | None:
        """This linear of act(a) * b, which is written in FP8 and nothing else; None where it is not, as with hooks."""
        hooks = self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks
        settings, weight = self.float8, self.weight
        if any(hooks) or act not in GATES or not settings.recipe.rowwise or a.shape[-1] > WIDEST:
            return None
        if is_dtensor(weight) or is_dtensor(a) or is_traced() or a.dtype is torch.float64:
            return None
        return gated_linear(GATES[act], a, b, weight, self.bias, owned, "float8")


@dataclass
class Float8Report:
    """What `float8` did. linears: path -> sizes of each linear in FP8; left_alone: path -> why it is not.

    `print(report)` lists both; `undo` takes it back.
    """

    recipe: str
    linears: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    _modules: list[nn.Linear] = field(default_factory=list, repr=False)

    def undo(self) -> int:
        """Give every linear its class back; how many there were."""
        ours = [module for module in self._modules if type(module) is Float8Linear]
        for module in ours:
            module.__class__ = nn.Linear
            vars(module).pop("float8", None)
        self._modules.clear()
        return len(ours)

    def __str__(self) -> str:
        lines = [("linears", "", "what")]
        for what, entries in ((f"in FP8, {self.recipe}", self.linears), ("left alone", self.left_alone)):
            kinds = Counter((path.rpartition(".")[2], text) for path, text in entries.items())
            lines += [(str(count), name, f"{what}: {text}") for (name, text), count in kinds.items()]
        return table(lines)


def float8(
    model: nn.Module,
    recipe: str = "rowwise",
    *,
    skip: Iterable[str] = (),
    smallest: int = SMALLEST,
) -> Float8Report:
    """Let the linears of a live model multiply in FP8, forward and backward; before or after `patch`.

    model: on a device that has FP8, or on the CPU, where FP8 is computed exactly and slowly
    recipe: `rowwise`, a scale for each row of each tensor, or `tensorwise`, one for each tensor
    skip: linears whose path contains one of these texts stay as they are. So do the loss head, routers, linears with
    fewer than `smallest` inputs or outputs or sizes that are no multiples of 16, other classes (quantised ones), and
    linears with a replaced forward.
    Returns a `Float8Report`, whose `undo()` takes it back. Raises `ValueError` for another recipe, for a device without
    FP8 and for a model of which no linear fits.
    """
    if recipe not in RECIPES:
        reason = "; block scales (mxfp8) have no kernel here" if recipe == "mxfp8" else ""
        raise ValueError(f"float8: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}{reason}")
    if not callable(getattr(model, "named_modules", None)):
        raise TypeError(f"float8: model must be a loaded model, got {type(model).__name__}")
    report, heads, groups = Float8Report(recipe), _heads(model), {}
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        why_invalid = "the loss head" if module in heads else _why_not(path, module, skip, smallest)
        if why_invalid:
            report.left_alone[path] = why_invalid
            continue
        if module.weight.device.type != "meta":
            float8_dtype(module.weight.device, E4M3)
        report.linears[path] = f"{module.in_features} -> {module.out_features}"
        report._modules.append(module)
        parent = path.removesuffix(".base_layer").rpartition(".")[0]  # what LoRA wraps is one level deeper
        groups.setdefault((parent, module.in_features), []).append(module)
    if not report.linears:
        raise ValueError("float8: no linear of this model fits:\n" + str(report))
    for modules in groups.values():
        shared = SharedInput() if len(modules) > 1 else None
        for module in modules:
            module.__class__ = Float8Linear
            module.float8 = Settings(RECIPES[recipe], shared)
    return report


def _heads(model: nn.Module) -> set[nn.Module]:
    """The loss heads, as transformers names them, of the model and of all that it wraps; with what is inside a head, as
    PEFT's copy of it."""
    heads: set[nn.Module] = set()
    for module in model.modules():
        output = getattr(module, "get_output_embeddings", None)
        try:
            head = output() if callable(output) else None
        except (AttributeError, NotImplementedError):  # a part of a model that has no head
            continue
        if isinstance(head, nn.Module):
            heads.update(head.modules())
    return heads


def _why_not(path: str, module: nn.Linear, skip: tuple[str, ...], smallest: int) -> str:
    """Why a linear stays as it is, or ""."""
    if type(module) is Float8Linear:
        return "in FP8 already"
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}"
    if "forward" in vars(module):
        return "its forward was replaced"
    if any(text in path for text in skip):
        return "skipped"
    if path.rpartition(".")[2] in _ROUTERS:
        return "a router"
    sizes = f"{module.in_features} -> {module.out_features}"
    if min(module.in_features, module.out_features) < smallest:
        return f"{sizes}, smaller than {smallest}"
    if module.in_features % 16 or module.out_features % 16:
        return f"{sizes}, no multiples of 16"
    return ""
