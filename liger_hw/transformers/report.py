"""What a patch did, and how to take it back.

A patch replaces attributes of classes, modules or one live model's modules (`Patch`). Everything it puts in place
carries `PATCH_MARK`. A `PatchReport` lists the places and reverts them; `revert(model)` cleans a model that no report
knows.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable

from ..locks import fork_safe

log = logging.getLogger("liger_hw")
_MISSING = object()

PATCHED = "patched"
ALREADY = "already patched"

PATCH_MARK = "_liger_hw_part"
"""Attribute of every function that a patch puts in place: (part, kernel)."""

PATCH_LOCK = fork_safe(threading.RLock())
"""Held while anything is patched or reverted, so that calls in several threads follow one another."""


def is_ours(held: Any) -> bool:
    """Whether a function or bound method was put in place by a patch."""
    return getattr(held, PATCH_MARK, None) is not None


def forward_slot(owner: Any) -> str:
    """The attribute that holds a module's own forward; accelerate's hooks move it aside."""
    return "_old_forward" if hasattr(owner, "_hf_hook") and "_old_forward" in vars(owner) else "forward"


@dataclass(frozen=True)
class PatchRow:
    """One place: `part` is the keyword of the public function, `kernel` the op, `state` what happened there.

    variant: which of the kernel's variants the module computes, in words
    """

    part: str
    where: str
    kernel: str
    state: str
    variant: str = ""


@dataclass
class Patch:
    """One attribute of a class, module or instance, replaced."""

    owner: Any
    name: str
    replacement: Any
    original: Any = _MISSING

    def apply(self) -> None:
        self.original = vars(self.owner).get(self.name, _MISSING)
        setattr(self.owner, self.name, self.replacement)

    def revert(self) -> bool:
        """Restore the very object that was there; false, with a warning, while somebody else's replaces ours."""
        held = vars(self.owner)
        current = held.get(self.name, _MISSING)
        if current is self.replacement:
            if self.original is _MISSING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
            return True
        if held.get("_old_forward") is self.replacement:  # accelerate's hook has moved it aside since
            self.owner._old_forward = _own_method(self.owner, "forward")
            return True
        if is_ours(current) or is_ours(held.get("_old_forward")) or current is not self.original:
            owner = getattr(self.owner, "__qualname__", None) or getattr(self.owner, "__name__", None)
            owner = owner or type(self.owner).__name__
            log.warning("liger_hw: %s of %s was changed after patching; left as it is", self.name, owner)
            return False
        return True


def revert(model: Any) -> int:
    """Take every kernel out of one live model, whichever call put it there; how many places were given back.

    Also for a deep copy or an unpickled copy of a patched model, which no report knows. Patched classes stay patched.
    """
    if not callable(getattr(model, "modules", None)) or isinstance(model, type):
        got = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"revert: model must be a loaded model, got {got}; a patched class is taken back by its report's revert()"
        )
    count = 0
    with PATCH_LOCK:
        for module in model.modules():
            held = vars(module)
            for slot in [s for s in ("forward", "_apply_gate") if is_ours(held.get(s))]:
                delattr(module, slot)
                count += 1
            if is_ours(held.get("_old_forward")):
                module._old_forward = _own_method(module, "forward")
                count += 1
        vars(model).pop(PickleNote.NAME, None)
    return count


def _own_method(owner: Any, name: str) -> Any:
    return types.MethodType(getattr(type(owner), name), owner)


class PickleNote:
    """An attribute of a patched live model, which warns when the model is pickled that the kernels are not stored.

    Pickle stores a bound method as its object and its name, so what is loaded has the class's own forward. A deep copy
    keeps the kernels. What is loaded needs no liger_hw: the note is stored as its words.
    """

    NAME = "_liger_hw_note"
    WORDS = (
        "%s is pickled while liger_hw's kernels are on it, and they are not stored: what is loaded runs its own code, "
        "until it is patched again"
    )

    def __init__(self, model: Any) -> None:
        self.owner = weakref.ref(model)
        self.words = self.WORDS % type(model).__name__

    def apply(self) -> None:
        setattr(self.owner(), self.NAME, self)

    def revert(self) -> bool:
        """Gone with the last kernel: other calls' may still be there."""
        model = self.owner()
        if model is not None and not any(is_ours(v) for m in model.modules() for v in vars(m).values()):
            vars(model).pop(self.NAME, None)
        return True

    def __reduce__(self) -> tuple:
        log.warning("liger_hw: %s", self.words)
        return str, (self.words,)

    def __deepcopy__(self, memo: dict) -> "PickleNote":
        return self


class NewModels:
    """`prepare(model)` for every model of these transformers classes that is made until it is reverted; see `Patch`."""

    def __init__(self, classes: set[type], prepare: Callable[[Any], None]) -> None:
        self.models: weakref.WeakSet = weakref.WeakSet()
        self.patches = [Patch(cls, "post_init", self._post_init(cls, prepare)) for cls in classes]

    def _post_init(self, cls: type, prepare: Callable[[Any], None]) -> Callable[[Any], None]:
        original = cls.post_init

        @functools.wraps(original)
        def post_init(model: Any) -> None:
            original(model)
            with PATCH_LOCK:
                if model not in self.models:  # a subclass of a patched class comes here twice
                    self.models.add(model)
                    prepare(model)

        setattr(post_init, PATCH_MARK, ("new models", ""))
        return post_init

    def apply(self) -> None:
        for patch in self.patches:
            patch.apply()

    def revert(self) -> bool:
        self.patches = [patch for patch in self.patches if not patch.revert()]
        for model in list(self.models):
            revert(model)
        self.models.clear()
        return not self.patches


@dataclass
class PatchReport:
    """What `apply_liger_kernel_to_<family>` did: rows for reading, `revert()` for undoing; `str(report)` is a table.

    As a context manager it reverts at the end: `with apply_liger_kernel_to_mistral(): ...`. A report takes back only
    what its own call changed: after a second, idempotent call the first report still undoes everything.
    """

    family: str
    target: str
    rows: list[PatchRow] = field(default_factory=list)
    patches: list[Patch | NewModels | PickleNote] = field(default_factory=list, repr=False)

    @property
    def patched(self) -> list[PatchRow]:
        """The rows that this call changed."""
        return [row for row in self.rows if row.state == PATCHED]

    def change(self, row: PatchRow, patch: Patch) -> None:
        """Apply one patch and note it."""
        patch.apply()
        self.patches.append(patch)
        self.rows.append(row)

    def revert(self) -> None:
        """Put back every original, newest first. Doing it twice does nothing more.

        A place that somebody else has changed since is left as it is, with a warning, and tried again by the next call.
        """
        with PATCH_LOCK:
            self.patches = [patch for patch in reversed(self.patches) if not patch.revert()][::-1]

    def __enter__(self) -> "PatchReport":
        return self

    def __exit__(self, *_: Any) -> None:
        self.revert()

    def summary(self) -> str:
        """One line: family, target, kernels with counts, and what keeps its own code."""
        done = Counter(row.kernel for row in self.patched)
        kept = [row for row in self.rows if row.state != PATCHED]
        text = ", ".join(f"{kernel} x{n}" if n > 1 else kernel for kernel, n in done.items()) or "nothing new"
        others = "; ".join(sorted({f"{row.part}: {row.state}" for row in kept}))
        return f"{self.family} ({self.target}): {text}" + (f" [{others}]" if others else "")

    def __str__(self) -> str:
        sources = {kernel: config_source(kernel) for kernel in {row.kernel for row in self.rows}}
        groups = Counter((r.part, r.where, r.kernel, r.state, r.variant) for r in self.rows)
        table = [("part", "where", "kernel", "state", "configuration")]
        for (part, where, kernel, state, variant), n in groups.items():
            source = sources[kernel] if state in (PATCHED, ALREADY) else "-"
            words = f"{kernel} ({variant})" if variant else kernel
            table.append((part, f"{where} x{n}" if n > 1 else where, words, state, source))
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        others = sorted(_launched_ops() - set(sources))
        if others:  # by the kernels above, or by other code of this process
            lines.append("also launched: " + "; ".join(f"{kernel} ({config_source(kernel)})" for kernel in others))
        return "\n".join([f"{self.family}: {self.target}", *lines])


def _launched_ops() -> set[str]:
    from .. import registry

    return {plan.tunable.op for plan in registry.plans()}


def config_source(kernel: str) -> str:
    """Where the launch configurations of an op have come from so far in this process, per variant."""
    import torch

    from .. import registry

    found: dict[str, set[str]] = {}
    for plan in registry.plans():
        if plan.tunable.op == kernel:
            found.setdefault(plan.tunable.variant, set()).add(plan.layer)
    if found:
        return ", ".join(f"{variant}: {'/'.join(sorted(layers))}" for variant, layers in found.items())
    if not torch.accelerator.is_available() and not registry.interpreting():
        return "torch reference (no accelerator)"
    return "resolved at the first launch"
