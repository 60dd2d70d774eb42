"""Does a patched model compute, and learn, what it did unpatched? Checked on tiny models; see `liger-hw models`.

`check_step` compares the loss and the gradients of one training step. `check_training` trains a patched and an
unpatched model on real text from the same weights and compares every loss, the parameters and the log-probabilities.
Both make sure that `revert()` gives every forward back.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import Counter
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import torch

from ..text import first_line
from . import functional
from .report import ALREADY, PATCHED, PatchReport
from .tiny import tiny_model

VERIFIED, WRONG, NOT_BUILT = "verified", "differs", "cannot be built"
_NOT_REVERTED = "revert() did not give every forward back"


def causal_lms() -> dict[str, str]:
    """`config.model_type` -> class name, of every causal LM that this transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


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


# -- one step --------------------------------------------------------------------------------------------------------

TOKENS = 12
LOSS_RTOL, GRAD_RTOL, GRAD_ATOL = 1e-5, 2e-3, 2e-5
"""Tolerances of one step in fp32; the gradients' absolute one is relative to the largest entry of each gradient."""


@dataclass
class Row:
    """One family, after `check_step`.

    outcome: verified, differs, or cannot be built; patched: kernel -> places; left: reason -> places of what keeps its
    own code; calls: kernel -> calls in one step
    norms, loss, fused: whether a norm kernel, a loss kernel, the fused linear loss ran
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

    def note(self, report: PatchReport, calls: Counter) -> None:
        """Fill in what was patched and called."""
        done = [r for r in report.rows if r.state in (PATCHED, ALREADY)]
        kept = [f"{r.where}: {r.state.removeprefix('left alone: ')}" for r in report.rows if r not in done]
        self.patched = dict(Counter(f"{r.kernel} ({r.variant})" if r.variant else r.kernel for r in done))
        self.left, self.calls = dict(Counter(kept)), dict(calls)
        self.norms = bool(calls["rms_norm"] + calls["layer_norm"])
        self.fused = bool(calls["fused_linear_cross_entropy"])
        self.loss = self.fused or bool(calls["cross_entropy"])


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
        expected, wanted = step(model, loss, seed)
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
            found, grads = step(model, loss, seed)
        finally:
            report.revert()
    if forwards(model) != before:
        row.outcome, row.reason = WRONG, _NOT_REVERTED
        return row
    again, again_grads = step(model, loss, seed)
    row.note(report, calls)
    row.loss_error = _relative(found, expected)
    row.grad_error, worst = _worst(grads, wanted)
    noise = max(_relative(again, expected), _worst(again_grads, wanted)[0])
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


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs() / expected.abs().clamp(min=1e-9))


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


# -- training --------------------------------------------------------------------------------------------------------

STEPS, BATCH, LENGTH, LEARNING_RATE, TOP = 32, 4, 48, 3e-3, 10
TOLERANCES = 1e-4, 5e-3, 1e-2
"""In fp32, for losses (relative), parameters, each moved by at most STEPS * LEARNING_RATE, and log-probabilities
(absolute). Rounding differs between the arms from the first step on, and training carries it further. In bf16 it is
carried beyond any tolerance, so the controls alone are the measure, and for a loss one last bit."""
CONTROLS = {"float32": 1, "bfloat16": 3}
"""How many runs with other last bits, of which the furthest counts."""
_BYTES = 256


def check_training(
    family: str,
    class_name: str,
    apply: Any = None,
    seed: int = 0,
    steps: int = STEPS,
    device: str = "cpu",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Train a patched and an unpatched tiny model of a class on text, and compare them.

    apply: the patch function, called with `model=`; default `patch`
    dtype: of parameters, activations and AdamW's state

    The text is Python's own documentation, byte by byte, so it needs no download. A vision encoder on its own, which
    has no words, is given the text as images (`Reader`). Where the arms differ by more than the tolerances, controls
    are trained: unpatched, from weights that differ in their last bit. A family whose control is as far away cannot be
    judged by these steps (routers choose other experts), and is verified if the patched arm is nowhere more than twice
    as far from the unpatched one as the control is.
    """
    import transformers

    from .apply import patch

    row: dict[str, Any] = {"family": family, "model_class": class_name, "outcome": NOT_BUILT, "reason": ""}
    row |= {"device": device, "dtype": dtype, "torch": torch.__version__, "transformers": transformers.__version__}
    row["device_name"] = "the CPU" if device == "cpu" else torch.get_device_module(device).get_device_name()
    cls = getattr(transformers, class_name, None)

    def fresh() -> Any:
        model = tiny_model(cls, seed, **_text_sizes(cls))
        if getattr(model, "main_input_name", "") == "pixel_values" and model.get_output_embeddings() is None:
            model = Reader(model, seed)
        model = model.to(device)
        for parameter in model.parameters():  # not the buffers, which stay as their family has them
            parameter.data = parameter.data.to(getattr(torch, dtype))
        return model

    try:
        model, reference = fresh(), fresh()
        expected = _train(reference, seed, steps)
    except Exception as error:
        return {**row, "reason": first_line(error)}
    before = forwards(model)
    try:
        with counted() as calls:
            whole = model.encoder if isinstance(model, Reader) else model
            with patch(whole) if apply is None else apply(model=whole):
                found = _train(model, seed, steps)
    except Exception as error:
        return {**row, "outcome": WRONG, "reason": f"patched, it fails: {first_line(error)}"[:200]}
    if forwards(model) != before or not calls:
        return {**row, "outcome": WRONG, "reason": _NOT_REVERTED if calls else "no kernel ran"}
    errors = _differences(model, found, reference, expected, seed)
    row |= {"first": expected[0], "last": expected[-1], "calls": dict(calls), "control": None}
    row |= dict(zip(("loss_error", "parameter_error", "logprob_error"), errors))
    tolerances = TOLERANCES if dtype == "float32" else (torch.finfo(getattr(torch, dtype)).eps, 0.0, 0.0)
    good = all(error <= most for error, most in zip(errors, tolerances))
    if not good:
        controls = []
        for number in range(CONTROLS[dtype]):
            control = fresh()
            _change_last_bits(control, seed + number)
            controls.append(_differences(control, _train(control, seed, steps), reference, expected, seed))
        row["control"] = [max(column) for column in zip(*controls)]
        good = all(error <= max(most, 2 * c) for error, most, c in zip(errors, tolerances, row["control"]))
    row["outcome"] = VERIFIED if good and expected[-1] < expected[0] else WRONG
    row["reason"] = f"loss {expected[0]:.3f} -> {expected[-1]:.3f} in {steps} steps; differences: {_words(errors)}"
    if row["control"]:
        row["reason"] += f"; a control whose weights differ in the last bit: {_words(row['control'])}"
    return row


def batches(seed: int) -> Iterator[torch.Tensor]:
    """Endless batches int64 [BATCH, LENGTH] of the text's bytes."""
    from pydoc_data import topics

    words = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8).long()
    source = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=source)
        yield torch.stack([ids[s : s + LENGTH] for s in starts])


def _train(model: Any, seed: int, steps: int) -> list[float]:
    """AdamW on `steps` batches; the loss of every step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    torch.manual_seed(seed)
    losses = []
    device = next(model.parameters()).device
    for ids in itertools.islice(batches(seed), steps):
        ids = ids.to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
    return torch.stack(losses).tolist()


def _differences(
    model: Any, found: list[float], reference: Any, expected: list[float], seed: int
) -> tuple[float, float, float]:
    """The largest differences of losses (relative), of parameters, and of log-probabilities on a new batch.

    Of bf16 models the means: a router that sends one token elsewhere moves that token's by any amount.
    """
    batch = next(itertools.islice(batches(seed), len(expected), None))
    pairs = list(zip(model.parameters(), reference.parameters()))
    moved = torch.cat([(a.detach().float() - b.detach().float()).abs().flatten() for a, b in pairs])
    losses = torch.tensor([abs(a - b) / b for a, b in zip(found, expected)])
    every = (losses, moved, _logprob_differences(model, reference, batch))
    in_fp32 = all(p.dtype is torch.float32 for p in model.parameters())
    return tuple(float(each.max() if in_fp32 else each.mean()) for each in every)


@torch.no_grad()
def _logprob_differences(model: Any, reference: Any, ids: torch.Tensor) -> torch.Tensor:
    """Differences of the log-probabilities of the reference's most likely tokens, at every position."""
    ids = ids.to(next(model.parameters()).device)
    wanted = reference.eval()(input_ids=ids).logits.float().log_softmax(-1)
    best = wanted.topk(TOP, dim=-1).indices
    found = model.eval()(input_ids=ids).logits.float().log_softmax(-1)
    return (found.gather(-1, best) - wanted.gather(-1, best)).abs()


@torch.no_grad()
def _change_last_bits(model: Any, seed: int) -> None:
    source = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        change = torch.randint(-1, 2, parameter.shape, generator=source) * torch.finfo(parameter.dtype).eps
        parameter.mul_((1 + change).to(parameter.device, parameter.dtype))


def _text_sizes(cls: type) -> dict[str, Any]:
    """A vocabulary with room for every byte, in the configuration that holds it."""
    nested = getattr(cls.config_class, "sub_configs", None) or {}
    holder = nested.get("text_config", cls.config_class)
    names = [n for n in ("vocab_size", "vocab_size_per_layer_input") if hasattr(holder, n) or n == "vocab_size"]
    sizes = dict.fromkeys(names, _BYTES)
    return {"text_config": sizes} if "text_config" in nested else sizes


def _words(errors: tuple[float, ...]) -> str:
    losses, parameters, logprobs = errors
    return f"loss {losses:.1e} (relative), parameters {parameters:.1e}, top-{TOP} log-probabilities {logprobs:.1e}"


class Reader(torch.nn.Module):
    """A vision encoder with a head that names a byte in each patch: pixels are the bits of the text's bytes."""

    def __init__(self, encoder: torch.nn.Module, seed: int) -> None:
        super().__init__()
        config = encoder.config
        torch.manual_seed(seed)
        self.encoder, self.head = encoder, torch.nn.Linear(config.hidden_size, _BYTES)
        self.side = config.image_size // config.patch_size
        self.patch, self.channels = config.patch_size, config.num_channels

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        """input_ids: int64 [batch, tokens], tokens a multiple of an image's patches. Has `logits` and `loss`."""
        bits = input_ids.unsqueeze(-1) >> torch.arange(8, device=input_ids.device) & 1
        bits = bits.reshape(-1, self.side, self.side, 8)
        area = self.patch * self.patch
        patches = bits.repeat(1, 1, 1, -(-area // 8))[..., :area].reshape(*bits.shape[:3], self.patch, self.patch)
        image = patches.transpose(2, 3).flatten(3).flatten(1, 2).unsqueeze(1)  # images x 1 x pixels x pixels
        pixels = image.expand(-1, self.channels, -1, -1).to(self.head.weight.dtype) - 0.5
        seen = self.encoder(pixel_values=pixels).last_hidden_state
        logits = self.head(seen.reshape(*input_ids.shape, -1))
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), input_ids.flatten())
        return SimpleNamespace(logits=logits, loss=loss)
