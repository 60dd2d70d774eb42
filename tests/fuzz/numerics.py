"""Random sizes, dtypes, options and layouts of every op, forward and backward, against fp64.

On a CPU the kernels run in Triton's interpreter; FUZZ_DEVICE=cuda takes a GPU. There an attempt has several numbers of
rows, since compiling takes most of its time.
"""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Callable, Mapping

import torch
from harness import changed, make, misaligned, padded, real_sizes, small_sizes, verify

from liger_hw import registry

SECONDS = 120
DEVICE = os.environ.get("FUZZ_DEVICE") or "cpu"
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
MOST, MOST_OF_TWO = (1 << 12, 1 << 12) if DEVICE == "cpu" else (1 << 25, 1 << 22)
SHAPES = 1 if DEVICE == "cpu" else 6
if DEVICE != "cpu":  # several such processes share a GPU
    torch.cuda.set_per_process_memory_fraction(0.1)
    # cuBLAS may round between the parts of a split product, in one of the compared results only
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def attempt(chance: random.Random, folder: Path) -> str:
    op = chance.choice(list(registry.ops().values()))
    options, dtype = chance.choice(op.options), chance.choice(DTYPES)
    sizes, seed = draw_sizes(chance, op), chance.randrange(2**31)
    layout = chance.choice([None, None, misaligned, padded])
    more = [(chance.randint(1, 2 * sizes[0] + 1), *sizes[1:]) for _ in range(SHAPES - 1)]
    outcomes = [one(op, each, dtype, options, layout, seed) for each in (sizes, *more)]
    if DEVICE == "cpu":
        return outcomes[0]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in sorted(set(outcomes)))


def one(op: registry.Op, sizes: tuple, dtype: torch.dtype, options: Mapping, layout: Callable | None, seed: int) -> str:
    said = f"{op.name} {sizes} {dtype} {options} {layout and layout.__name__} seed {seed}"
    try:
        sample = make(op, sizes, dtype, DEVICE, seed, options)
        if layout:
            sample = changed(sample, lambda t: layout(t) if t.dim() else t)
    except torch.OutOfMemoryError:
        return _out_of_memory()
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError, TypeError):
        return "no such sizes"
    try:
        verify(op, sample, seed)
    except (ValueError, TypeError) as error:
        if str(error).startswith("liger_"):
            return "refused"
        raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
    except AssertionError as error:
        raise AssertionError(f"{said}: {error}") from error
    except torch.OutOfMemoryError:
        return _out_of_memory()
    except Exception as error:
        raise AssertionError(f"{said}: {type(error).__name__}: {str(error)[:400]}") from error
    return "right"


def _out_of_memory() -> str:
    torch.cuda.empty_cache()
    return "out of memory"


def draw_sizes(chance: random.Random, op: registry.Op) -> tuple[int, ...]:
    """Sizes near those that tests and models use, odd ones and powers of two among them."""
    base = list(chance.choice(small_sizes(op)) if DEVICE == "cpu" or chance.random() < 0.4 else real_sizes(op))
    for place, size in enumerate(base):
        if chance.random() < 0.6:
            near = [1, 2, 3, 7, size + 1, size - 1, 2 * size, size // 2, chance.randint(1, 2 * size + 1)]
            base[place] = max(1, chance.choice(near))
    while math.prod(base) > MOST or math.prod(sorted(base)[-2:]) > MOST_OF_TWO:
        base[base.index(max(base))] //= 2
    return tuple(base)
