"""What is trained against what: one context manager an arm, inside which Mistral's classes are as that arm has them."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator

from ...transformers.rebind import PREFIX
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
                # PREFIX: what patches of single models leave in the module; nothing of Hugging Face's own uses it
                if not name.startswith(PREFIX) and (origin := _kernel_package(value)):
                    return f"{place.__name__}.{name} comes from {origin}"
        return ""

    def changes(self) -> list[str]:
        """Names that are not what they were, and functions and classes that are new."""
        found = []
        for place, saved in zip(self.places, self.saved):
            now = vars(place)
            found += [f"{place.__name__}.{name}" for name in saved if now.get(name, _MISSING) is not saved[name]]
            found += [f"{place.__name__}.{name}" for name in now if name not in saved and callable(now[name])]
        return found

    def restore(self) -> None:
        for place, saved in zip(self.places, self.saved):
            for name in [name for name in vars(place) if name not in saved and callable(vars(place)[name])]:
                delattr(place, name)
            for name, value in saved.items():
                if vars(place).get(name, _MISSING) is not value:
                    setattr(place, name, value)


_MISSING = object()


def _kernel_package(value: Any) -> str:
    """Name of the liger module a function or class was written in, whatever it calls itself; else an empty string."""
    written = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None) or ""
    return written if written.split(".")[0] in ("liger_hw", "liger_kernel") else ""


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
