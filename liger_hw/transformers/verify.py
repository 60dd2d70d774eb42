"""Does a patched family compute what it computed before? Tiny models, one training step, forward and backward, in fp32.

`check(model_type)` is what `liger-hw models` prints a row of, and what the tests run on a sample of families. The
unpatched arm runs on the same model, after `revert()` was verified to have given every forward back.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Iterator

import torch

from . import functional
from .report import ALREADY, PATCHED, PatchReport
from .tiny import tiny_model

TOKENS = 12
LOSS_RTOL, GRAD_RTOL, GRAD_ATOL = 1e-5, 2e-3, 2e-5
"""Tolerances of one step in fp32; the gradients' absolute one is relative to the largest entry of each gradient."""

VERIFIED, WRONG, NOT_BUILT = "verified", "differs", "cannot be built"


@dataclass
class Row:
    """One family of the table.

    outcome: verified, differs, or cannot be built; patched: kernel -> places; left: reason -> places; calls: kernel ->
    calls in one step; norms, loss, fused: whether a norm kernel, a loss kernel, the fused linear loss ran
    loss_error, grad_error: largest relative ones
    """

    family: str
    model_class: str
    outcome: str = NOT_BUILT
    reason: str = ""
    patched: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    norms: bool = False
    loss: bool = False
    fused: bool = False
    loss_error: float = 0.0
    grad_error: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def causal_lms() -> dict[str, str]:
    """`config.model_type` -> class name, of every causal LM that this transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def check(
    family: str, class_name: str, apply: Any = None, classes: bool = False, seed: int = 0, device: str = "cpu"
) -> Row:
    """Build, patch, compare, revert, compare again.

    apply: the patch function, default `patch`; classes: patch the classes, which then holds for the tiny model too,
    instead of the model itself
    """
    row = Row(family, class_name)
    try:
        model, loss = tiny_training(class_name, seed, device)
        expected, wanted = step(model, loss, seed)
    except Exception as error:
        row.reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        return row
    before = forwards(model)
    with counted() as calls:
        report = _patch(apply, model, classes)
        try:
            found, grads = step(model, loss, seed)
        finally:
            report.revert()
    if forwards(model) != before:
        row.outcome, row.reason = WRONG, "revert() did not give every forward back"
        return row
    again, again_grads = step(model, loss, seed)
    _fill(row, report, calls)
    row.loss_error = float((found - expected).abs() / expected.abs().clamp(min=1e-9))
    row.grad_error, worst = _worst(grads, wanted)
    noise = max(float((again - expected).abs() / expected.abs().clamp(min=1e-9)), _worst(again_grads, wanted)[0])
    if noise > GRAD_RTOL:
        row.outcome, row.reason = WRONG, f"the unpatched model itself does not repeat its step ({noise:.1e})"
    elif row.loss_error > LOSS_RTOL or row.grad_error > GRAD_RTOL:
        row.outcome, row.reason = (
            WRONG,
            f"loss differs by {row.loss_error:.1e}, gradient of {worst} by {row.grad_error:.1e}",
        )
    else:
        row.outcome = VERIFIED
    return row


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
    from transformers import PreTrainedModel

    found: list[Any] = []
    for module in model.modules():
        sees = isinstance(module, PreTrainedModel) and getattr(module, "main_input_name", "") == "pixel_values"
        if sees and module.get_output_embeddings() is None and not hasattr(module, "language_model"):
            if not any(module in list(tower.modules()) for tower in found):
                found.append(module)
    return found


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
    found = getattr(outputs, "last_hidden_state", None)
    return found if found is not None else outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def step(model: Any, loss: Callable[[], torch.Tensor], seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients) of one forward and backward, with the same random numbers every time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    value = loss()
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def forwards(model: Any) -> dict[str, Any]:
    """Module name -> what its forward and gate are, for comparing before and after."""
    found = {}
    for name, module in model.named_modules():
        for slot in ("forward", "_apply_gate"):
            held = getattr(module, slot, None)
            found[name, slot] = getattr(held, "__func__", held), slot in vars(module)
    return found


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Counts the kernels' calls by patches made while it is open; it changes liger_hw's own table of functions only."""
    calls: Counter = Counter()
    names = [name for name in functional.__all__ if name.startswith("liger_")]
    originals = {name: getattr(functional, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name.removeprefix("liger_")] += 1
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(functional, name, counting(name))
        yield calls
    finally:
        for name in names:
            setattr(functional, name, originals[name])


def _patch(apply: Any, model: Any, classes: bool) -> PatchReport:
    from .apply import patch

    if apply is None:
        return patch(type(model) if classes else model)
    return apply() if classes else apply(model=model)


def _fill(row: Row, report: PatchReport, calls: Counter) -> None:
    done = [r for r in report.rows if r.state in (PATCHED, ALREADY)]
    row.patched = dict(Counter(f"{r.kernel} ({r.variant})" if r.variant else r.kernel for r in done))
    row.left = dict(Counter(f"{r.where}: {r.state.removeprefix('left alone: ')}" for r in report.rows if r not in done))
    row.calls = dict(calls)
    row.norms = bool(calls["rms_norm"] + calls["layer_norm"])
    row.fused = bool(calls["fused_linear_cross_entropy"])
    row.loss = row.fused or bool(calls["cross_entropy"])


def _worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(largest error of a gradient relative to its largest entry, parameter); infinite for a missing gradient."""
    if found.keys() != wanted.keys():
        return float("inf"), sorted(found.keys() ^ wanted.keys())[0]
    worst, where = 0.0, ""
    for name, gradient in wanted.items():
        scale = gradient.abs().max()
        error = float((found[name] - gradient).abs().max() / (scale + GRAD_ATOL))
        if not error <= worst:
            worst, where = error, name
    return worst, where
