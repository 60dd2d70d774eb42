"""Do a patched and an unpatched model learn alike? A tiny model of a family on real text, 32 steps, in fp32 or bf16.

The text is Python's own documentation (pydoc_data.topics), byte by byte, so it needs no download. Both arms start from
the same weights and see the same batches; the unpatched one runs on a model whose revert was verified. A vision encoder
on its own, which has no words, is given the text as an image and names its bytes (`Reader`).
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, Iterator

import torch

from .tiny import tiny_model
from .verify import NOT_BUILT, VERIFIED, WRONG, counted, forwards

STEPS, BATCH, TOKENS, LEARNING_RATE, TOP = 32, 4, 48, 3e-3, 10
TOLERANCES = 1e-4, 5e-3, 1e-2
"""For losses, relative; for parameters (each moved by up to STEPS * LEARNING_RATE = 0.1) and log-probabilities, absolute.
Rounding differs between the arms from the first step on, and training carries it further. They are for fp32. In bf16
32 steps carry it beyond anything that could be named, so the control alone is the measure, and for a loss one last bit."""
CONTROLS = {"float32": 1, "bfloat16": 3}
"""How many runs with other last bits, of which the furthest counts."""
_BYTES = 256


def text() -> torch.Tensor:
    """Token ids of the text: its bytes, and the sizes of a model's vocabulary are at least 256."""
    from pydoc_data import topics

    words = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8).long()


def batches(seed: int) -> Iterator[torch.Tensor]:
    """Endless batches int64 [BATCH, TOKENS] of pieces of the text."""
    ids, source = text(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - TOKENS, (BATCH,), generator=source)
        yield torch.stack([ids[s : s + TOKENS] for s in starts])


def check(
    family: str,
    class_name: str,
    apply: Any = None,
    seed: int = 0,
    steps: int = STEPS,
    device: str = "cpu",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Train both arms and compare every loss, all parameters, and the top log-probabilities on a new batch.

    apply: the patch function, called with `model=`; default `patch`; dtype: of parameters, activations and AdamW's state

    Where the arms end further apart than the tolerances, controls are trained: unpatched, from weights that differ in
    their last bit. A family whose control is as far away is not told apart by 32 steps (routers choose other experts),
    and is verified if the patched arm is nowhere more than twice as far from the unpatched one as the control is.
    """
    import transformers

    from .apply import patch

    row: dict[str, Any] = {"family": family, "model_class": class_name, "outcome": NOT_BUILT, "reason": ""}
    row |= {"device": device, "dtype": dtype, "torch": torch.__version__, "transformers": transformers.__version__}
    row["device_name"] = "the CPU" if device == "cpu" else torch.get_device_module(device).get_device_name()
    cls = getattr(transformers, class_name, None)

    def fresh() -> Any:
        model = tiny_model(cls, seed, **_sizes(cls))
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
        row["reason"] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        return row
    before = forwards(model)
    try:
        with counted() as calls:
            whole = model.encoder if isinstance(model, Reader) else model
            with patch(whole) if apply is None else apply(model=whole):
                found = _train(model, seed, steps)
    except Exception as error:
        row |= {"outcome": WRONG, "reason": f"patched, it fails: {type(error).__name__}: {error}".splitlines()[0][:200]}
        return row
    if forwards(model) != before or not calls:
        row |= {"outcome": WRONG, "reason": "revert() did not give every forward back" if calls else "no kernel ran"}
        return row
    row |= {"first": expected[0], "last": expected[-1], "calls": dict(calls), "control": None}
    apart = _apart(model, found, reference, expected, seed)
    row |= dict(zip(("loss_error", "parameter_error", "logprob_error"), apart))
    tolerances = TOLERANCES if dtype == "float32" else (torch.finfo(getattr(torch, dtype)).eps, 0.0, 0.0)
    good = all(a <= most for a, most in zip(apart, tolerances))
    if not good:
        controls = []
        for number in range(CONTROLS[dtype]):
            control = fresh()
            _change_last_bits(control, seed + number)
            controls.append(_apart(control, _train(control, seed, steps), reference, expected, seed))
        row["control"] = [max(column) for column in zip(*controls)]
        good = all(a <= max(most, 2 * c) for a, most, c in zip(apart, tolerances, row["control"]))
    row["outcome"] = VERIFIED if good and expected[-1] < expected[0] else WRONG
    row["reason"] = f"loss {expected[0]:.3f} -> {expected[-1]:.3f} in {steps} steps; apart: {_words(apart)}"
    if row["control"]:
        row["reason"] += f"; a control whose weights differ in the last bit: {_words(row['control'])}"
    return row


class Reader(torch.nn.Module):
    """A vision encoder with a head that names a byte in each patch: pixels are the bits of the text's bytes."""

    def __init__(self, encoder: torch.nn.Module, seed: int) -> None:
        super().__init__()
        config = encoder.config
        torch.manual_seed(seed)
        self.encoder, self.head = encoder, torch.nn.Linear(config.hidden_size, _BYTES)
        self.side, self.patch, self.channels = (
            config.image_size // config.patch_size,
            config.patch_size,
            config.num_channels,
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        """input_ids: int64 [batch, tokens], tokens a multiple of an image's patches. Has `logits` and `loss`."""
        bits = (input_ids.unsqueeze(-1) >> torch.arange(8, device=input_ids.device) & 1).reshape(
            -1, self.side, self.side, 8
        )
        area = self.patch * self.patch
        patches = bits.repeat(1, 1, 1, -(-area // 8))[..., :area].reshape(*bits.shape[:3], self.patch, self.patch)
        image = patches.transpose(2, 3).flatten(3).flatten(1, 2).unsqueeze(1)  # images x 1 x pixels x pixels
        pixels = image.expand(-1, self.channels, -1, -1).to(self.head.weight.dtype) - 0.5
        seen = self.encoder(pixel_values=pixels).last_hidden_state
        logits = self.head(seen.reshape(*input_ids.shape, -1))
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), input_ids.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def _words(apart: tuple[float, float, float]) -> str:
    return f"loss {apart[0]:.1e} (relative), parameters {apart[1]:.1e}, top-{TOP} log-probabilities {apart[2]:.1e}"


def _apart(model: Any, found: list[float], reference: Any, expected: list[float], seed: int) -> tuple[float, ...]:
    """Differences of losses (relative), of parameters, and of top log-probabilities on a new batch: the largest of each.

    Of bf16 models the means: a router that sends one token elsewhere moves that token's by any amount.
    """
    batch = next(itertools.islice(batches(seed), len(expected), None))
    pairs = list(zip(model.parameters(), reference.parameters()))
    moved = torch.cat([(a.detach().float() - b.detach().float()).abs().flatten() for a, b in pairs])
    losses = torch.tensor([abs(a - b) / b for a, b in zip(found, expected)])
    every = (losses, moved, _logprob_differences(model, reference, batch))
    whole = all(p.dtype is torch.float32 for p in model.parameters())
    return tuple(float(each.max() if whole else each.mean()) for each in every)


@torch.no_grad()
def _change_last_bits(model: Any, seed: int) -> None:
    source = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        change = torch.randint(-1, 2, parameter.shape, generator=source) * torch.finfo(parameter.dtype).eps
        parameter.mul_((1 + change).to(parameter.device, parameter.dtype))


def _sizes(cls: type) -> dict[str, Any]:
    """A vocabulary with room for every byte, in the configuration that holds it."""
    nested = getattr(cls.config_class, "sub_configs", None) or {}
    holder = nested.get("text_config", cls.config_class)
    names = [n for n in ("vocab_size", "vocab_size_per_layer_input") if hasattr(holder, n) or n == "vocab_size"]
    sizes = dict.fromkeys(names, _BYTES)
    return {"text_config": sizes} if "text_config" in nested else sizes


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


@torch.no_grad()
def _logprob_differences(model: Any, reference: Any, ids: torch.Tensor) -> torch.Tensor:
    """Differences of the log-probabilities of the reference's most likely tokens, at every position."""
    ids = ids.to(next(model.parameters()).device)
    wanted = reference.eval()(input_ids=ids).logits.float().log_softmax(-1)
    best = wanted.topk(TOP, dim=-1).indices
    found = model.eval()(input_ids=ids).logits.float().log_softmax(-1)
    return (found.gather(-1, best) - wanted.gather(-1, best)).abs()
