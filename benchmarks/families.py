"""What every causal LM family of the installed transformers gets from a patch, checked on tiny models.

    python benchmarks/families.py                     every family; a line each
    python benchmarks/families.py llama helium        some
    python benchmarks/families.py --named --json      those with a function of their own; one JSON object a line

Builds a family's model tiny, from its configuration class, with random weights; patches it; compares loss and gradients
with the reverted model. Families with a function of their own are checked through it, on their classes, and through
`patch`. Ends with 1 when one differs. `models_page.py` makes docs/models.md of the JSON. `liger-hw check MODEL` says
for one model, without running it, what a patch would change.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from liger_hw import env
from liger_hw import transformers as public
from liger_hw.cli.arguments import usable_device
from liger_hw.runtime.operator import Function
from liger_hw.text import StatusLine, first_line, fold
from liger_hw.transformers.apply import patch
from liger_hw.transformers.models import specs
from liger_hw.transformers.report import ALREADY, PATCHED, SLOTS, PatchReport
from liger_hw.transformers.tiny import tiny_model

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


# -- every family ----------------------------------------------------------------------------------------------------


def jobs_of(classes: dict[str, str], families: Sequence[str], named: bool) -> Iterator[tuple[str, str, bool]]:
    """(family, class, whether through its function) of every check, in order: through functions of their own first.

    Raises `ValueError` for a family that transformers does not have.
    """
    functions = {name: spec.models[0] for name, spec in specs().items()}
    for name in families:
        if name not in {**classes, **functions}:
            raise ValueError(f"transformers has no causal LM family {name!r}; `--named` lists those with a function")
    for checks, through_function in ((functions, True), ({} if named else classes, False)):
        for name, class_name in checks.items():
            if not families or name in families:
                yield name, class_name, through_function


def _line(row: dict[str, Any]) -> str:
    kind = "function" if row["named"] else "patch()"
    if row["outcome"] != VERIFIED:
        return f"{row['family']:<26} {kind:<8} {row['outcome']}: {row['reason']}"
    done = ", ".join(f"{kernel} x{n}" for kernel, n in row["patched"].items())
    left = f"; left alone: {len(row['left'])} kinds" if row["left"] else ""
    return f"{row['family']:<26} {kind:<8} verified: {done}{left}"


_NORMS, _LOSSES = {"rms_norm", "layer_norm"}, {"cross_entropy", "fused_linear_cross_entropy"}


def summary(rows: list[dict[str, Any]]) -> str:
    """How many rows of `--json` are verified."""
    verified = [row for row in rows if row["outcome"] == VERIFIED]
    others = [row for row in rows if not row["named"]]
    calls = [row["calls"].keys() for row in others if row["outcome"] == VERIFIED]
    both = sum(bool(kernels & _NORMS and kernels & _LOSSES) for kernels in calls)
    named = [row for row in rows if row["named"]]
    return (
        f"{len(verified)} of {len(rows)} verified; {both} of {len(others)} causal LM families with norms and loss on "
        f"kernels; {sum(row['outcome'] == VERIFIED for row in named)} of {len(named)} functions"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("families", nargs="*", help="names as in config.model_type (default: all)")
    add("--named", action="store_true", help="only the families with a function of their own")
    add("--device", default="cpu", help="where (default cpu)")
    add("--json", action="store_true", help="one JSON object a family, for machines")
    options = parser.parse_args(words)
    usable_device(options.device)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("LIGER_HW_CPU_REFERENCE", "1")  # on a CPU, what is compared is what the kernels compute
    env.clear()
    jobs, rows, screen = list(jobs_of(causal_lms(), options.families, options.named)), [], StatusLine()
    for number, (family, class_name, named) in enumerate(jobs):
        screen.progress(number, len(jobs), family)
        function = getattr(public, specs()[family].function_name) if named else None
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            try:
                row = check_step(family, class_name, function, classes=named, device=options.device)
            except Exception as error:
                row = Row(family, class_name, outcome=WRONG, reason=first_line(error))
        rows.append({**asdict(row), "named": named})
        screen.end()
        print(json.dumps(rows[-1]) if options.json else fold(_line(rows[-1]), " " * 36), flush=True)
    if not options.json:
        print(fold(summary(rows)))
    return 1 if any(row["outcome"] == WRONG for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
