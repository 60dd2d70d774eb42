"""Reports of patches, and how to revert these.

A patch replaces attributes of classes, Python modules or a live model's modules (`Patch`). The functions that it
installs are marked (marks.py). A `PatchReport` lists and reverts them; `revert(model)` needs no report.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import sys
import threading
import types
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from .. import env, registry
from ..locks import fork_safe
from ..text import fold, table, with_notes
from . import choice
from .marks import SWITCH, is_ours, mark, mark_of

log = logging.getLogger("liger_hw")
_MISSING = object()

PATCHED = "patched"
ALREADY = "already patched"

SLOTS = ("forward", choice.SLOT)
"""Methods that a patch sets on a module: its forward, or choice.SLOT on experts whose forward transformers replaced."""

PATCH_LOCK = fork_safe(threading.RLock())
"""Held during every patch and revert, so that several threads' do not overlap."""


def patched_parts(model: Any) -> dict[str, int]:
    """Kernel -> number of a model's modules that run it."""
    places = ((module, slot) for module in model.modules() for slot in (forward_slot(module), choice.SLOT))
    marks = (mark_of(getattr(module, slot, None)) for module, slot in places)
    return dict(Counter(mark[1] for mark in marks if mark is not None))


def forward_slot(owner: Any) -> str:
    """The attribute with a module's own forward: accelerate's hooks move it to `_old_forward`."""
    return "_old_forward" if hasattr(owner, "_hf_hook") and "_old_forward" in vars(owner) else "forward"


@dataclass(frozen=True)
class PatchRow:
    """One row of a report, for code that was patched or left alone.

    part: keyword of the patch function; where: class and method, or function; kernel: op; state: outcome, in words
    variant: the variant of the kernel, in words; path: the module's name in a live model (`model.layers.0.mlp`)
    """

    part: str
    where: str
    kernel: str
    state: str
    variant: str = ""
    path: str = ""

    @property
    def left_alone(self) -> bool:
        return self.state.startswith("left alone")


@dataclass
class Patch:
    """The replacement of one attribute of a class, Python module or instance."""

    owner: Any
    name: str
    replacement: Any
    original: Any = _MISSING

    def apply(self) -> None:
        self.original = vars(self.owner).get(self.name, _MISSING)
        setattr(self.owner, self.name, self.replacement)
        if isinstance(self.owner, torch.nn.Module):
            _add_copy_methods(self.owner)

    def revert(self) -> bool:
        """Restore the original. Returns False, with a warning, if other code has replaced the patch's function.

        Other code's hooks or wrappers may still call that function, which runs the original from now on.
        """
        restored = self._restore()
        if not restored or isinstance(self.owner, type):
            getattr(self.replacement, SWITCH, []).clear()
        if restored and isinstance(self.owner, torch.nn.Module) and not any(map(is_ours, vars(self.owner).values())):
            _remove_copy_methods(self.owner)
        return restored

    def _restore(self) -> bool:
        attributes = vars(self.owner)
        current = attributes.get(self.name, _MISSING)
        if current is self.replacement:
            if self.original is _MISSING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
            return True
        if attributes.get("_old_forward") is self.replacement:  # moved there by accelerate's hook
            self.owner._old_forward = types.MethodType(type(self.owner).forward, self.owner)
            return True
        if "_old_forward" in attributes and not is_ours(attributes["_old_forward"]):  # the hook has another forward
            return True
        if is_ours(current) or is_ours(attributes.get("_old_forward")) or current is not self.original:
            owner = self.owner if hasattr(self.owner, "__name__") else type(self.owner)
            log.warning("liger_hw: %s of %s was changed after patching; left as it is", self.name, owner.__name__)
            return False
        return True


# -- copies of a patched module --------------------------------------------------------------------------------------

_COPY_METHODS = ("_replicate_for_data_parallel", "__getstate__")


def _add_copy_methods(module: torch.nn.Module) -> None:
    """Make copies of a module with replaced methods use the copies' weights.

    A replaced method is in the module's `__dict__`, bound to the module. `copy.deepcopy` binds it to the copy, but
    `nn.DataParallel` and `copy.copy` copy the `__dict__` unchanged. The methods added here bind it to a replica, and
    leave it out of shallow copies and pickles.
    """
    module.__dict__["_replicate_for_data_parallel"] = types.MethodType(_replica, module)
    module.__dict__["__getstate__"] = types.MethodType(_state, module)


def _remove_copy_methods(module: torch.nn.Module) -> None:
    for name in _COPY_METHODS:
        module.__dict__.pop(name, None)


def _replica(module: torch.nn.Module) -> torch.nn.Module:
    replica = type(module)._replicate_for_data_parallel(module)
    for name, value in module.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            replica.__dict__[name] = types.MethodType(value.__func__, replica)
    return replica


def _state(module: torch.nn.Module) -> Any:
    of_class = getattr(type(module), "__getstate__", None)  # every class has one since Python 3.11
    state = module.__dict__ if of_class is None else of_class(module)
    if not isinstance(state, dict) or sys._getframe(1).f_code is copy.deepcopy.__code__:
        return state
    return {name: value for name, value in state.items() if name not in _COPY_METHODS and not is_ours(value)}


# -- revert and report -----------------------------------------------------------------------------------------------


def revert(model: torch.nn.Module | type[torch.nn.Module]) -> int:
    """Revert all patches of a live model or of a family's classes; returns the number of restored methods.

    model: a live model, or a deep or unpickled copy of one; patches of its classes stay, with a warning. Or a class of
    transformers (`revert(LlamaForCausalLM)`): all patches of its family's classes are reverted.
    """
    if isinstance(model, type):
        return _revert_classes(model)
    if not callable(getattr(model, "modules", None)):
        raise TypeError(f"revert: model must be a loaded model or a class of models, got {type(model).__name__}")
    count = _revert_model(model)
    if cls := _patched_class(model):
        words = "liger_hw: the classes of this %s are patched, and stay so; liger_hw.revert(%s) reverts that"
        log.warning(words, type(model).__name__, cls.__name__)
    return count


def _revert_model(model: torch.nn.Module) -> int:
    count = 0
    with PATCH_LOCK:
        for module in model.modules():
            attributes = vars(module)
            slots = [s for s in SLOTS if is_ours(attributes.get(s))]
            for slot in slots:
                delattr(module, slot)
            count += len(slots)
            if slots:
                choice.release(attributes.get("config"))
            if is_ours(attributes.get("_old_forward")):
                module._old_forward = types.MethodType(type(module).forward, module)
                count += 1
            _remove_copy_methods(module)
    return count


_class_reports: list["PatchReport"] = []
"""Reports of current patches of classes, oldest first, for `revert(cls)`."""


def _patched_class(model: torch.nn.Module) -> type | None:
    """The class with which `revert` undoes patches of this model's classes: the model's or a submodule's; or None."""
    classes = {base: None for module in model.modules() for base in type(module).__mro__}
    with PATCH_LOCK:
        for cls in classes:
            ours = any(is_ours(vars(cls).get(slot)) for slot in SLOTS)
            if ours and any(report.module == cls.__module__ for report in _class_reports):
                named = {base.__module__ for base in type(model).__mro__}
                return type(model) if cls.__module__ in named else cls
    return None


def _revert_classes(cls: type) -> int:
    defined_in = {base.__module__ for base in cls.__mro__}
    with PATCH_LOCK:
        reports = [report for report in _class_reports if report.module in defined_in]
        before = sum(len(report.patches) for report in reports)
        for report in reversed(reports):
            report.revert()
        return before - sum(len(report.patches) for report in reports)


class NewModels:
    """Calls `prepare(model)` for each new model of these transformers classes until `revert`. Used as a `Patch`."""

    def __init__(self, classes: set[type], prepare: Callable[[Any], None]) -> None:
        self.models: weakref.WeakSet = weakref.WeakSet()
        self.patches = [Patch(cls, "post_init", self._post_init(cls, prepare)) for cls in classes]

    def _post_init(self, cls: type, prepare: Callable[[Any], None]) -> Callable[[Any], None]:
        original = cls.post_init

        @functools.wraps(original)
        def post_init(model: Any) -> None:
            original(model)
            with PATCH_LOCK:
                if model not in self.models:  # called twice for a subclass of a patched class
                    self.models.add(model)
                    prepare(model)

        return mark(post_init, "new models", "")

    def apply(self) -> None:
        for patch in self.patches:
            patch.apply()

    def revert(self) -> bool:
        self.patches = [patch for patch in self.patches if not patch.revert()]
        for model in list(self.models):
            _revert_model(model)
        self.models.clear()
        return not self.patches


@dataclass(eq=False, repr=False)
class PatchReport:
    """What `apply_liger_kernel_to_<family>` did. `revert()` undoes that call only; `str(report)` is a table.

    As a context manager it reverts at the end: `with apply_liger_kernel_to_mistral(): ...`.

    module: for a patch of classes, the transformers module that defines them
    logits: for a live model, the number of logits for a token
    unnamed: for a live model, classes that were not examined because of their names (`probing.is_overlooked`)
    packing: a line if packed documents attend to each other, or might (`packing.packing_note`)
    """

    family: str
    target: str
    rows: list[PatchRow] = field(default_factory=list)
    patches: list[Patch | NewModels] = field(default_factory=list)
    module: str = ""
    logits: int = 0
    unnamed: list[str] = field(default_factory=list)
    packing: str = ""
    reverted: bool = False

    @property
    def patched(self) -> list[PatchRow]:
        """The rows that this call changed."""
        return [row for row in self.rows if row.state == PATCHED]

    def apply(self, patch: Any) -> None:
        """Apply a `Patch`, `NewModels` or `choice.Choice`, which `revert` undoes."""
        patch.apply()
        self.patches.append(patch)

    def change(self, row: PatchRow, patch: Patch) -> None:
        self.apply(patch)
        self.rows.append(row)

    def remember(self) -> None:
        """Keep a report of classes for `revert(cls)`."""
        if self.module and self.patches:
            _class_reports.append(self)

    def revert(self) -> None:
        """Restore every original, newest first.

        A function that other code has replaced is left as it is, with a warning, and the next call tries again.
        """
        with PATCH_LOCK:
            applied = bool(self.patches)
            self.patches = [patch for patch in reversed(self.patches) if not patch.revert()][::-1]
            self.reverted = self.reverted or (applied and not self.patches)
            if not self.patches and self in _class_reports:
                _class_reports.remove(self)

    def __enter__(self) -> "PatchReport":
        return self

    def __exit__(self, *_: Any) -> None:
        self.revert()

    def summary(self) -> str:
        """One line: family, target, kernels with counts, and parts that were not patched."""
        done = Counter(row.kernel for row in self.patched)
        kept = [row for row in self.rows if row.state != PATCHED]
        text = ", ".join(f"{kernel} x{n}" if n > 1 else kernel for kernel, n in done.items()) or "nothing new"
        others = "; ".join(sorted({f"{row.part}: {row.state}" for row in kept}))
        return f"{self.family} ({self.target}): {text}" + (f" [{others}]" if others else "")

    def __repr__(self) -> str:
        kept = len({(row.part, row.state) for row in self.rows if row.left_alone})
        left = ", reverted" if self.reverted else f", {kept} kinds left alone" if kept else ""
        return f"<PatchReport {self.family} ({self.target}): {len(self.patched)} patched{left}; print() shows them>"

    def __str__(self) -> str:
        cells, notes = with_notes(self._cells())
        lines = map(fold, [*notes, *self._others(), self._in_short()])
        return "\n".join([f"{self.family}: {self.target}", table(cells), *lines])

    def _in_short(self) -> str:
        """One sentence: whether a training step keeps the logits, their size, and which parts are left alone."""
        if self.reverted:
            return "Reverted: none of this is in place any more."
        losses = [row for row in self.rows if row.kernel == "cross_entropy"]
        running = {row.kernel for row in self.rows if row.state in (PATCHED, ALREADY)}
        if not running:
            return "Nothing runs on kernels."
        size = f" ({self.logits} a token, {self.logits / 512:.1f} KiB in bf16)" if self.logits else ""
        if "fused_linear_cross_entropy" in running:
            text = f"A training step with labels never holds the logits{size}"
        elif losses:
            why = losses[0].variant.removeprefix("logits computed: ").partition(";")[0]
            text = f"A training step holds the logits of the head{size}: {why or 'cross_entropy=True asks for them'}"
        else:
            text = "No loss was recognised"
        left = ", ".join(sorted({row.part for row in self.rows if row.left_alone}))
        return f"{text}; {f'left alone: {left}' if left else 'nothing that was recognised is left alone'}."

    def _cells(self) -> list[tuple[str, ...]]:
        """The table: a header, and one row for each group of rows that differ only in their path."""
        groups: dict[PatchRow, list[str]] = {}
        for row in self.rows:
            groups.setdefault(dataclasses.replace(row, path=""), []).append(row.path)
        cells = [("part", "where", "kernel", "state", "configuration")]
        for row, paths in groups.items():
            state, n = row.state, len(paths)
            if state == PATCHED and row.variant.startswith("logits computed"):  # only the head's loss is replaced
                state = "logits kept"
            source = config_source(row.kernel) if state in (PATCHED, ALREADY, "logits kept") else "-"
            words = f"{row.kernel} ({row.variant})" if row.variant else row.kernel
            place = f"{row.where} x{n}" if n > 1 else row.where
            if paths[0] and source == "-":
                place += f" ({'first ' if n > 1 else ''}{paths[0]})"
            cells.append((row.part, place, words, state, source))
        return cells

    def _others(self) -> list[str]:
        lines = [self.packing] if self.packing else []
        if self.unnamed:
            classes = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in Counter(self.unnamed).items())
            lines.append(f"not looked at, as the names say neither norm nor MLP: {classes}")
        return lines


def config_source(kernel: str) -> str:
    """Sources of the launch configurations that an op's variants have used in this process, or why there are none."""
    layers_of: dict[str, set[str]] = {}
    for plan in registry.plans():
        if plan.tunable.op == kernel:
            layers_of.setdefault(plan.tunable.variant, set()).add(plan.layer)
    if layers_of:
        return ", ".join(f"{variant}: {'/'.join(sorted(layers))}" for variant, layers in layers_of.items())
    if not torch.accelerator.is_available() and not registry.interpreting():
        return "torch reference" if env.LIGER_HW_CPU_REFERENCE else "its own code on a CPU"
    return "resolved at the first launch"
