"""Does a patched family compute what it computed before? Tiny models, one training step, forward and backward, in fp32.

`check(model_type)` is what `liger-hw models` prints a row of, and what the tests run on a sample of families. The
unpatched arm runs on the same model, after `revert()` was verified to have given every forward back.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Iterator

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

    outcome: verified, differs, or cannot be built; patched: kernel -> places; left: reason -> places
    fused: whether the fused linear cross-entropy consumed the hidden states; loss_error, grad_error: largest relative
    """

    family: str
    model_class: str
    outcome: str = NOT_BUILT
    reason: str = ""
    patched: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
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


def check(family: str, class_name: str, apply: Any = None, seed: int = 0) -> Row:
    """Build, patch, compare. apply: the patch function, default `patch`; it is called with `model=` or the model."""
    row = Row(family, class_name)
    try:
        model, inputs = tiny_training(class_name, seed)
        expected, wanted = step(model, inputs, seed)
    except Exception as error:
        row.reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return row
    before = forwards(model)
    report = _patch(apply, model)
    with counted() as calls:
        found, grads = step(model, inputs, seed)
    report.revert()
    if forwards(model) != before:
        row.outcome, row.reason = WRONG, "revert() did not give every forward back"
        return row
    again, again_grads = step(model, inputs, seed)
    _fill(row, report, calls)
    row.loss_error = float((found - expected).abs() / expected.abs().clamp(min=1e-9))
    row.grad_error, worst = _worst(grads, wanted)
    noise = max(float((again - expected).abs() / expected.abs().clamp(min=1e-9)), _worst(again_grads, wanted)[0])
    if noise > GRAD_RTOL:
        row.outcome, row.reason = WRONG, f"the unpatched model itself does not repeat its step ({noise:.1e})"
    elif row.loss_error > LOSS_RTOL or row.grad_error > GRAD_RTOL:
        row.outcome, row.reason = WRONG, f"loss differs by {row.loss_error:.1e}, gradient of {worst} by {row.grad_error:.1e}"
    else:
        row.outcome = VERIFIED
    return row


def tiny_training(class_name: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """A tiny model of a class of transformers, and one batch of random tokens with labels, some of them ignored."""
    import transformers

    model = tiny_model(getattr(transformers, class_name), seed)
    head = model.get_output_embeddings()
    size = getattr(model.config.get_text_config(), "vocab_size", None) or head.out_features
    source = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(5, min(size, 100), (2, TOKENS), generator=source)
    labels = ids.clone()
    labels[0, :3] = -100
    return model, {"input_ids": ids, "labels": labels}


def step(model: Any, inputs: dict[str, Any], seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients) of one forward and backward, with the same random numbers every time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


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
    """Counts calls of the two losses that patched forwards look up while it is open."""
    calls: Counter = Counter()
    names = ("liger_fused_linear_cross_entropy", "liger_cross_entropy")
    originals = {name: getattr(functional, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(functional, name, counting(name))
        yield calls
    finally:
        for name in names:
            setattr(functional, name, originals[name])


def _patch(apply: Any, model: Any) -> PatchReport:
    from .apply import patch

    return patch(model) if apply is None else apply(model=model)


def _fill(row: Row, report: PatchReport, calls: Counter) -> None:
    done = [r for r in report.rows if r.state in (PATCHED, ALREADY)]
    row.patched = dict(Counter(f"{r.kernel} ({r.variant})" if r.variant else r.kernel for r in done))
    row.left = dict(Counter(f"{r.where}: {r.state.removeprefix('left alone: ')}" for r in report.rows if r not in done))
    kernels = {r.kernel for r in done}
    row.norms = bool(kernels & {"rms_norm", "layer_norm"})
    row.loss = bool(kernels & {"fused_linear_cross_entropy", "cross_entropy"}) and bool(calls)
    row.fused = bool(calls["liger_fused_linear_cross_entropy"])


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
