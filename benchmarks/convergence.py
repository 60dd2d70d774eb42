"""Does a patched model learn what it did unpatched? Tiny models of families, trained 32 steps on real text.

    python benchmarks/convergence.py llama helium                                         two families, here
    python benchmarks/convergence.py --device cuda --dtype bfloat16 --json > rows.jsonl   every named family

A patched and an unpatched model are trained from the same weights; every loss, the parameters and the log-probabilities
are compared, and `revert()` must give every forward back. `models_page.py` makes docs/convergence.md of the rows. Ends
with 1 when a family differs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from families import NOT_BUILT, NOT_REVERTED, VERIFIED, WRONG, causal_lms, counted, forwards

import liger_hw.transformers
from liger_hw import env
from liger_hw.cli.arguments import usable_device
from liger_hw.text import first_line, fold, json_text
from liger_hw.transformers.models import specs
from liger_hw.transformers.tiny import tiny_model

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
            with liger_hw.patch(whole) if apply is None else apply(model=whole):
                found = _train(model, seed, steps)
    except Exception as error:
        return {**row, "outcome": WRONG, "reason": f"patched, it fails: {first_line(error)}"[:200]}
    if forwards(model) != before or not calls:
        return {**row, "outcome": WRONG, "reason": NOT_REVERTED if calls else "no kernel ran"}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names as in config.model_type (default: those with a function)")
    parser.add_argument("--device", default="cpu", help="where (default cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", action="store_true", help="one JSON object a family, for models_page.py")
    arguments = parser.parse_args()
    usable_device(arguments.device)
    os.environ.setdefault("LIGER_HW_CPU_REFERENCE", "1")  # on a CPU, what is compared is what the kernels compute
    env.clear()
    differs = False
    for name in arguments.families or specs():
        spec = specs().get(name)
        class_name = spec.models[0] if spec else causal_lms()[name]
        apply = getattr(liger_hw.transformers, spec.function_name) if spec else None
        row = check_training(name, class_name, apply, device=arguments.device, dtype=arguments.dtype)
        differs |= row["outcome"] == WRONG
        text = f"{name:<26} {row['outcome']}: {row['reason']}"
        print(json_text({**row, "converge": True}) if arguments.json else fold(text, " " * 27), flush=True)
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
