"""What the examples share: a tiny model, text that every Python carries, and a table of two measured arms."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Callable

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

BYTES = 256


def arguments(description: str, lr: float = 1e-3, **defaults: int) -> argparse.Namespace:
    """--steps, --batch, --seq, --hidden, --layers, --vocab, --rounds, --lr, --json and --device; small defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = {"steps": 10, "batch": 4, "seq": 128, "hidden": 128, "layers": 2, "vocab": BYTES, "rounds": 1}
    for name, value in {**small, **defaults}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--device", type=torch.device, default=found)
    return parser.parse_args()


def tiny_llama(options: argparse.Namespace, seed: int = 0) -> LlamaForCausalLM:
    """A byte-level Llama with random weights from `seed`, bf16 on a GPU and fp32 on a CPU."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=max(BYTES, options.vocab),
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(4, options.hidden // 128),
        num_key_value_heads=max(2, options.hidden // 512),
        max_position_embeddings=options.seq,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=False,
    )
    dtype = torch.float32 if options.device.type == "cpu" else torch.bfloat16
    with options.device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)  # the rotary frequencies stay fp32


def text() -> bytes:
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def windows(count: int, length: int) -> torch.Tensor:
    """[count, length] token ids: the text window by window, from its start again where it ends."""
    words = text()
    words *= -(-count * length // len(words))
    tokens = torch.frombuffer(bytearray(words[: count * length]), dtype=torch.uint8).long()
    return tokens.view(count, length)


class Steps:
    """Called after every optimizer step: waits for the device and notes the time."""

    def __init__(self, device: torch.device) -> None:
        self.module = None if device.type == "cpu" else torch.get_device_module(device)
        self.times = [self._now()]

    def __call__(self) -> None:
        self.times.append(self._now())

    def _now(self) -> float:
        if self.module is not None:
            self.module.synchronize()
        return time.perf_counter()

    def seconds(self) -> list[float]:
        """Of each step but the first, which builds the model and compiles, and a quarter of the others to warm up."""
        every = [after - before for before, after in zip(self.times[1:], self.times[2:])]
        return every[len(every) // 4 :]


class Timed(transformers.TrainerCallback):
    """Calls a `Steps` after every step of a transformers or TRL trainer."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps()


Train = Callable[[argparse.Namespace, bool, Steps], list[float]]


def compare(train: Train, options: argparse.Namespace, tokens: int = 0, main: bool = True) -> None:
    """Run `train(options, patch, steps)` unpatched and patched, in turn, and print both side by side.

    `train` calls `steps()` after each optimizer step and returns the loss of each. tokens: that a step trains on, if
    not batch x seq. main: whether this process prints and writes. Raises `AssertionError` when the two are not one
    training.
    """
    device, tokens = options.device, tokens or options.batch * options.seq
    module = None if device.type == "cpu" else torch.get_device_module(device)
    arms: dict[str, dict[str, Any]] = {}
    for patch in (False, True) * options.rounds:
        gc.collect()
        if module is not None:
            module.empty_cache()
            module.reset_peak_memory_stats()
        steps = Steps(device)
        losses = train(options, patch, steps)
        arm = arms.setdefault("liger_hw" if patch else "unpatched", {"losses": losses, "seconds": [], "peak_mib": None})
        arm["seconds"] += steps.seconds()
        arm.setdefault("first_step_seconds", steps.times[1] - steps.times[0])
        if module is not None:
            arm["peak_mib"] = max(arm["peak_mib"] or 0.0, module.max_memory_allocated() / 2**20)
    for arm in arms.values():
        arm["tokens_per_second"] = tokens / statistics.median(arm["seconds"])
    pairs = zip(arms["unpatched"]["losses"], arms["liger_hw"]["losses"], strict=True)
    furthest = max(abs(a - b) for a, b in pairs)
    if main:
        _report(options, tokens, arms, furthest)
    limit = 1e-3 if device.type == "cpu" else 0.05  # fp32, bf16
    assert furthest < limit, f"the patched model did not train as the unpatched one: {furthest} apart"


def _report(options: argparse.Namespace, tokens: int, arms: dict[str, dict[str, Any]], furthest: float) -> None:
    print(f"{'arm':<12}{'last loss':>10}{'tokens/s':>12}{'peak MiB':>10}{'first step s':>14}")
    for name, arm in arms.items():
        peak = "-" if arm["peak_mib"] is None else f"{arm['peak_mib']:,.0f}"
        rate, first = f"{arm['tokens_per_second']:,.0f}", f"{arm['first_step_seconds']:.1f}"
        print(f"{name:<12}{arm['losses'][-1]:>10.4f}{rate:>12}{peak:>10}{first:>14}")
    print(f"largest loss difference over {options.steps} steps: {furthest:.2g}")
    if options.json is not None:
        device = options.device
        name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
        found = {
            "example": Path(sys.argv[0]).stem,
            "tokens": tokens,
            "options": {k: str(v) if k in ("device", "json") else v for k, v in vars(options).items() if k != "json"},
            "machine": {"device": name, "torch": torch.__version__, "transformers": transformers.__version__},
            "arms": arms,
            "largest_loss_difference": furthest,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
