"""What is trained against what: one context manager an arm, inside which Mistral's classes are as that arm has them."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator

from .. import UsageError

if TYPE_CHECKING:
    import torch


class Absent(Exception):
    """An arm that cannot run here; the message says why. The others still do."""


class Leftover(Exception):
    """Reverting a patch left something changed. The demo fails: an unpatched model must be what it was."""


@dataclass(frozen=True)
class Arm:
    """`patched(device)` yields what did the patching (a patch report, or None)."""

    name: str
    title: str
    patched: Callable[["torch.device"], Any]
    attention: str = "sdpa"


class Original:
    """Mistral's module as Hugging Face ships it: every name in it, every attribute of its classes, torch's own loss."""

    def __init__(self) -> None:
        import torch
        from transformers.models.mistral import modeling_mistral as module

        classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
        self.places = [module, torch.nn.functional, *classes]
        self.saved = [dict(vars(place)) for place in self.places]
        if foreign := self._foreign():
            raise UsageError(
                f"demo: Mistral is already patched in this process ({foreign}); the unpatched arm needs it as Hugging "
                "Face ships it. Revert the patch, or run `liger-hw demo` in a process of its own."
            )

    def _foreign(self) -> str:
        for place, saved in zip(self.places, self.saved):
            for name, value in saved.items():
                origin = getattr(value, "__module__", None) or ""
                if origin.split(".")[0] in ("liger_hw", "liger_kernel"):
                    return f"{place.__name__}.{name} comes from {origin}"
        return ""

    def changes(self) -> list[str]:
        """Names that are not what they were."""
        found = []
        for place, saved in zip(self.places, self.saved):
            now = vars(place)
            found += [f"{place.__name__}.{n}" for n in {**saved, **now} if _differs(saved, now, n)]
        return found

    def restore(self) -> None:
        for place, saved in zip(self.places, self.saved):
            for name in [n for n in {**saved, **vars(place)} if _differs(saved, vars(place), n)]:
                if name in saved:
                    setattr(place, name, saved[name])
                else:
                    delattr(place, name)


_MISSING = object()
_BOOKKEEPING = frozenset({"__warningregistry__", "__annotations_cache__", "__annotate_func__", "__static_attributes__"})


def _differs(saved: Any, now: Any, name: str) -> bool:
    return name not in _BOOKKEEPING and saved.get(name, _MISSING) is not now.get(name, _MISSING)


@contextlib.contextmanager
def _unpatched(device: "torch.device") -> Iterator[None]:
    yield None


@contextlib.contextmanager
def _liger_hw(device: "torch.device") -> Iterator[Any]:
    from ...transformers import apply_liger_kernel_to_mistral

    original = Original()
    report = apply_liger_kernel_to_mistral()
    try:
        yield report
    finally:
        report.revert()
        if left := original.changes():
            original.restore()
            raise Leftover(f"after revert() these are not what Hugging Face ships: {', '.join(left)}")


@contextlib.contextmanager
def _liger(device: "torch.device") -> Iterator[None]:
    """liger-kernel as installed. It has no way back, so what it changed is put back by hand."""
    if device.type == "cpu":
        raise Absent("liger-kernel needs a GPU")
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_mistral
    except ImportError as error:
        raise Absent(f"liger-kernel is not installed ({error}); pip install liger-kernel") from None
    original = Original()
    apply_liger_kernel_to_mistral()
    try:
        yield None
    finally:
        original.restore()


ARMS = {
    arm.name: arm
    for arm in (
        Arm("hf", "Hugging Face as shipped", _unpatched),
        Arm("hf-eager", "Hugging Face with its eager attention: what rounding alone does", _unpatched, "eager"),
        Arm("liger", "liger-kernel, if installed", _liger),
        Arm("liger_hw", "liger_hw", _liger_hw),
    )
}


def arms_named(text: str) -> list[Arm]:
    """`hf,liger_hw` -> arms. Raises `UsageError` unless there are two or more different known ones."""
    names = [name.strip().replace("_eager", "-eager") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ARMS:
            raise UsageError(f"demo: unknown arm {name!r} in --against; known: {', '.join(ARMS)}")
    if len(names) < 2 or len(set(names)) != len(names):
        raise UsageError(f"demo: --against takes two or more different arms, such as hf,liger_hw; got {text!r}")
    return [ARMS[name] for name in names]
