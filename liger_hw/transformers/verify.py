"""Does a patched model compute what it did unpatched? Checked on tiny models; see `liger-hw models`.

`check_step` compares the loss and the gradients of one training step, and makes sure that `revert()` gives every
forward back.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import torch

from ..runtime.operator import Function
from ..text import first_line
from .report import ALREADY, PATCHED, SLOTS, PatchReport
from .tiny import tiny_model

VERIFIED, WRONG, NOT_BUILT = "verified", "differs", "cannot be built"
NOT_REVERTED = "revert() did not give every forward back"


def causal_lms() -> dict[str, str]:
    """`config.model_type` -> class name, of every causal LM that this transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def forwards(model: Any) -> dict[str, Any]:
    """(module name, slot) -> what a patch may replace there, for comparing before and after."""
    functions = {}
    for name, module in model.named_modules():
        for slot in SLOTS:
            forward = getattr(module, slot, None)
            functions[name, slot] = getattr(forward, "__func__", forward), slot in vars(module)
    return functions


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Counts the calls of each op's Function, by the op's name, while it is open."""
    calls: Counter = Counter()
    original = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        calls[cls.__module__.rpartition(".")[2]] += 1
        return original.__func__(cls, *args, **kwargs)

    Function.apply = classmethod(apply)
    try:
        yield calls
    finally:
        Function.apply = original


# -- one step --------------------------------------------------------------------------------------------------------

TOKENS = 12
LOSS_RTOL, GRAD_RTOL, GRAD_ATOL = 1e-5, 2e-3, 2e-5
"""Tolerances of one step in fp32; the gradients' absolute one is relative to the largest entry of each gradient."""


@dataclass
class Row:
    """One family, after `check_step`.

    outcome: verified, differs, or cannot be built; patched: kernel -> places; left: reason -> places of what keeps its
    own code; calls: kernel -> calls in one step
    loss_error, grad_error: largest relative ones
    """

    family: str
    model_class: str
    outcome: str = NOT_BUILT
    reason: str = ""
    patched: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    loss_error: float = 0.0
    grad_error: float = 0.0

    def note(self, report: PatchReport, calls: Counter) -> None:
        """Fill in what was patched and called."""
        done = [r for r in report.rows if r.state in (PATCHED, ALREADY)]
        kept = [f"{r.where}: {r.state.removeprefix('left alone: ')}" for r in report.rows if r.left_alone]
        self.patched = dict(Counter(f"{r.kernel} ({r.variant})" if r.variant else r.kernel for r in done))
        self.left, self.calls = dict(Counter(kept)), dict(calls)


def check_step(
    family: str, class_name: str, apply: Any = None, classes: bool = False, seed: int = 0, device: str = "cpu"
) -> Row:
    """Build a tiny model, take a step, patch, take it again, revert, take it once more, and compare.

    apply: the patch function, default `patch`; classes: patch the classes, which then holds for the tiny model too,
    instead of the model itself
    """
    from .apply import patch

    row = Row(family, class_name)
    try:
        model, loss = tiny_training(class_name, seed, device)
        expected, expected_grads = step(model, loss, seed)
    except Exception as error:
        row.reason = first_line(error)
        return row
    before = forwards(model)
    with counted() as calls:
        if apply is None:
            report = patch(type(model) if classes else model)
        else:
            report = apply() if classes else apply(model=model)
        try:
            actual, grads = step(model, loss, seed)
        finally:
            report.revert()
    if forwards(model) != before:
        row.outcome, row.reason = WRONG, NOT_REVERTED
        return row
    again, again_grads = step(model, loss, seed)
    row.note(report, calls)
    row.loss_error = _relative(actual, expected)
    row.grad_error, worst = _worst(grads, expected_grads)
    noise = max(_relative(again, expected), _worst(again_grads, expected_grads)[0])
    if noise > GRAD_RTOL:
        row.outcome, row.reason = WRONG, f"the unpatched model itself does not repeat its step ({noise:.1e})"
    elif row.loss_error > LOSS_RTOL or row.grad_error > GRAD_RTOL:
        errors = f"loss differs by {row.loss_error:.1e}, gradient of {worst} by {row.grad_error:.1e}"
        row.outcome, row.reason = WRONG, errors
    else:
        row.outcome = VERIFIED
    return row


def step(model: Any, loss: Callable[[], torch.Tensor], seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients) of one forward and backward, with the same random numbers every time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    value = loss()
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).abs() / expected.abs().clamp(min=1e-9))


def _worst(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(largest error of a gradient relative to its largest entry, parameter); infinite for a missing gradient."""
    if result.keys() != expected.keys():
        return float("inf"), sorted(result.keys() ^ expected.keys())[0]
    worst, where = 0.0, ""
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        error = float((result[name] - gradient).abs().max() / (scale + GRAD_ATOL))
        if not error <= worst:
            worst, where = error, name
    return worst, where


def tiny_training(class_name: str, seed: int, device: str = "cpu") -> tuple[Any, Callable[[], torch.Tensor]]:
    """A tiny model of a class of transformers, and its loss on one batch: random tokens, some labels ignored, plus the
    mean square of what its vision towers make of random pixels."""
    import transformers

    model = tiny_model(getattr(transformers, class_name), seed).to(device)
    towers = [tower for tower in map(_tower_input, _towers(model)) if tower is not None]
    head = model.get_output_embeddings()
    inputs: dict[str, Any] = {}
    if head is not None:
        size = getattr(model.config.get_text_config(), "vocab_size", None) or head.out_features
        source = torch.Generator().manual_seed(seed + 1)
        ids = torch.randint(5, min(size, 100), (2, TOKENS), generator=source)
        inputs = {"input_ids": ids, "labels": ids.clone()}
        inputs["labels"][0, :3] = -100
        if "attention_mask" in inspect.signature(model.forward).parameters:
            inputs["attention_mask"] = torch.ones_like(ids)
        inputs = {name: value.to(device) for name, value in inputs.items()}
    if not inputs and not towers:
        raise ValueError("it has no output head, and no vision tower that takes plain images")

    def loss() -> torch.Tensor:
        total = model(**inputs).loss if inputs else torch.zeros((), device=device)
        for tower, pixels in towers:
            total = total + _first_tensor(tower(**pixels)).square().mean()
        return total

    return model, loss


def _towers(model: Any) -> list[Any]:
    """The vision towers of a model, outermost ones only."""
    from transformers import PreTrainedModel

    towers: list[Any] = []
    for module in model.modules():
        sees = isinstance(module, PreTrainedModel) and getattr(module, "main_input_name", "") == "pixel_values"
        if sees and module.get_output_embeddings() is None and not hasattr(module, "language_model"):
            if not any(module in list(tower.modules()) for tower in towers):
                towers.append(module)
    return towers


def _tower_input(tower: Any) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """(tower, pixels it takes), or None when it takes neither one small image nor the patches of one."""
    config, source = tower.config, torch.Generator().manual_seed(3)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    size, patch = getattr(config, "image_size", 16), getattr(config, "patch_size", 4)
    size, patch = (v[0] if isinstance(v, (list, tuple)) else v for v in (size, patch))
    area = channels * patch * patch * (getattr(config, "temporal_patch_size", None) or 1)
    flat, grid = torch.randn(16, area, generator=source), torch.tensor([[1, 4, 4]])
    for pixels in (
        {"pixel_values": torch.randn(1, channels, size, size, generator=source)},
        {"hidden_states": flat, "grid_thw": grid},
        {"pixel_values": flat, "grid_thw": grid},
    ):
        pixels = {name: value.to(tower.device) for name, value in pixels.items()}
        try:
            with torch.no_grad():
                if _first_tensor(tower(**pixels)).isfinite().all():
                    return tower, pixels
        except Exception:  # it takes something else
            continue
    return None


def _first_tensor(outputs: Any) -> torch.Tensor:
    tensor = getattr(outputs, "last_hidden_state", None)
    return tensor if tensor is not None else outputs if isinstance(outputs, torch.Tensor) else outputs[0]
