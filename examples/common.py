"""What the examples share: a tiny model, text that every Python carries, and a table of two measured arms."""

from __future__ import annotations

import argparse
import gc
import time
from pydoc_data.topics import topics
from typing import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 256


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """--steps, --batch, --seq, --hidden, --layers and --device, with small defaults that a CPU can do."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"steps": 10, "batch": 4, "seq": 128, "hidden": 128, "layers": 2, **defaults}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    parser.add_argument("--device", type=torch.device, default=found)
    return parser.parse_args()


def tiny_llama(options: argparse.Namespace, seed: int = 0) -> LlamaForCausalLM:
    """A byte-level Llama with random weights from `seed`, bf16 on a GPU and fp32 on a CPU."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.seq,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=False,
    )
    dtype = torch.float32 if options.device.type == "cpu" else torch.bfloat16
    return LlamaForCausalLM(config).to(options.device, dtype)


def text() -> bytes:
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def windows(count: int, length: int) -> torch.Tensor:
    """[count, length] token ids: the text's first bytes, window by window."""
    tokens = torch.frombuffer(bytearray(text()[: count * length]), dtype=torch.uint8).long()
    return tokens.view(count, length)


def compare(
    train: Callable[[argparse.Namespace, bool], list[float]], options: argparse.Namespace, ranks: int = 1
) -> None:
    """Run `train(options, patch)` unpatched and patched, and print both side by side.

    `train` returns the loss of each step. Raises `AssertionError` when the two are not one and the same training.
    """
    device, tokens = options.device, ranks * options.steps * options.batch * options.seq
    module = None if device.type == "cpu" else torch.get_device_module(device)
    losses, lines = {}, [f"{'arm':<12}{'last loss':>10}{'tokens/s':>12}{'peak MiB':>10}"]
    for patch in (False, True):
        gc.collect()
        if module is not None:
            module.synchronize()
            module.reset_peak_memory_stats()
        start = time.perf_counter()
        losses[patch] = train(options, patch)
        if module is not None:
            module.synchronize()
        rate = tokens / (time.perf_counter() - start)
        peak = "-" if module is None else f"{module.max_memory_allocated() / 2**20:,.0f}"
        lines.append(f"{'liger_hw' if patch else 'unpatched':<12}{losses[patch][-1]:>10.4f}{rate:>12,.0f}{peak:>10}")
    furthest = max(abs(a - b) for a, b in zip(losses[False], losses[True], strict=True))
    print(*lines, f"largest loss difference over {options.steps} steps: {furthest:.2g}", sep="\n")
    assert furthest < 0.05, "the patched model did not train as the unpatched one"
