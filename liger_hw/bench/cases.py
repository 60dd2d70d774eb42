"""What is measured: an op at problem sizes, in a dtype.

cases(["rms_norm"])                             its workloads
cases(["rms_norm"], ["many"])                   at least 40 shapes, from one row to 131072, odd widths included
cases(["jsd"], ["workloads", "4096x131072@fp32"])
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Iterator, Sequence

import torch

from .. import registry
from ..registry import Op
from . import chunked
from .inputs import Inputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """quick: only graph-replayed times; no eager loop, host time, memory or accuracy"""

    op: Op
    label: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    quick: bool = False

    def __str__(self) -> str:
        dtype = "" if self.dtype is torch.bfloat16 else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{self.op.name} {'x'.join(map(str, self.sizes))}{dtype}"


def cases(ops: Sequence[str], sizes: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """The cases to run: each op at its workloads, or at `sizes`; every op when `ops` is empty.

    A size is the name of a workload; numbers, as `8192x4096`; `workloads`, all of an op's; `losses` (`LOSSES`, with the
    chunked losses, which no other empty list of `ops` has); `table`, an op's workloads and `BESIDE` (at least three sizes,
    GEMM-bound ops first, which take longest); or `many` (`MANY`, only timed). Of the last three, the first shape of every
    op comes before the second of any. `@fp32` after a size is its dtype.
    Raises `ValueError` for an unknown op, and for a size no op of `ops` can take.
    """
    table = [chunked.OPS.get(name) or registry.get_op(name) for name in ops] if ops else [*registry.ops().values()]
    if "losses" in sizes and not ops:
        table += chunked.OPS.values()
    found: list[tuple[int, Case]] = []
    used = set()
    for op in table:
        dims = op.tunables[0].dims
        for text in sizes or ["workloads"]:
            word, _, wanted = text.partition("@")
            if wanted and wanted not in DTYPES:
                raise ValueError(f"size {text!r}: unknown dtype {wanted!r}; known: {', '.join(DTYPES)}")
            kind = DTYPES.get(wanted, dtype)
            parts = word.split("x")
            numbers = tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
            if word == "workloads":
                found += [(0, Case(op, name, shape, kind)) for name, shape in op.workloads.items()]
            elif word == "table":
                shapes = [
                    *op.workloads.items(),
                    *(("x".join(map(str, shape)), shape) for shape in BESIDE.get(op.name, ())),
                ]
                wide = torch.float32 if op.name in DIVERGENCES else kind
                early = -100 if "hidden" in dims else 0
                found += [(early + place, Case(op, name, shape, wide)) for place, (name, shape) in enumerate(shapes)]
            elif word == "many" and op.name in MANY:
                found += [(place, Case(op, "many", shape, kind, True)) for place, shape in enumerate(MANY[op.name])]
            elif word == "losses" and op.name in LOSSES:
                found += [(place, Case(op, "losses", *shape)) for place, shape in enumerate(LOSSES[op.name])]
            elif word in op.workloads:
                found.append((0, Case(op, word, op.workloads[word], kind)))
            elif len(numbers) == len(dims) and min(numbers) > 0:
                found.append((0, Case(op, word, numbers, kind)))
            else:
                continue
            used.add(text)
    if missing := [text for text in sizes if text not in used]:
        takes = "; ".join(f"{op.name}: {' x '.join(op.tunables[0].dims)} or {', '.join(op.workloads)}" for op in table)
        raise ValueError(f"no op takes size {missing[0]!r} ({takes})")
    return [case for _, case in sorted(found, key=lambda pair: pair[0])]


# -- what a case's arms are called with ------------------------------------------------------------------------------

ROW_DIMS = frozenset({"n_rows", "n_tokens", "rows", "tokens", "batch", "seq", "seq_len", "n_seq", "bsz", "bt"})
"""Names of problem sizes (`Tunable.dims`) that may shrink without changing what is computed for one row."""


def make_inputs(case: Case, sizes: tuple[int, ...], device: torch.device, seed: int) -> Inputs:
    """One set of the op's own sample; keywords at their default are left out, since a peer may not know them."""
    generator = torch.Generator(device).manual_seed(seed)
    sample = case.op.sample(sizes, case.dtype, device, generator)
    known = inspect.signature(case.op.function).parameters
    kwargs = {name: value for name, value in sample.kwargs.items() if value is not known[name].default}
    return Inputs(sample.args, kwargs, seed=1000 + seed, moved=sample.moved)


def with_few_rows(case: Case, most: int) -> tuple[int, ...]:
    """The case's sizes with every row-like one at most `most`; the columns, which kernels are compiled for, stay."""
    dims = case.op.tunables[0].dims
    rows = [name in ROW_DIMS for name in dims]
    if not any(rows):
        rows[0] = True
    return tuple(min(size, most) if row else size for size, row in zip(case.sizes, rows))


# -- the table --------------------------------------------------------------------------------------------------------

DIVERGENCES = frozenset({"kl_div", "jsd", "tvd"})
"""In fp32, as their callers hold log-probabilities."""

BESIDE: dict[str, tuple[tuple[int, ...], ...]] = {
    "rms_norm": ((16384, 1024), (2048, 65536)),
    "layer_norm": ((2048, 65536),),
    "cross_entropy": ((8192, 131072),),
    "fused_linear_cross_entropy": ((8192, 4096, 131072), (1024, 4096, 131072)),
    **dict.fromkeys(DIVERGENCES, ((4096, 131072),)),
    "llama4_rope": ((1, 8192, 40, 8, 128),),
    "vision_rope": ((64, 257, 16, 16, 64),),
    "qwen2vl_mrope": ((4, 4096, 16, 2, 128),),
    "interleaved_rope": ((4, 4096, 48, 8, 128),),
    "qk_norm_rope": ((4, 4096, 16, 8, 128),),
    "embedding": ((16384, 32768, 4096),),
    "multi_token_attention": ((8, 512, 32),),
}
"""Sizes beside an op's workloads that the table compares: wider, narrower, or a third."""

# -- the losses ------------------------------------------------------------------------------------------------------

_BF16, _FP32 = torch.bfloat16, torch.float32
LOSSES: dict[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]] = {
    "fused_linear_cross_entropy": (
        *(((8192, 4096, 131072), _BF16), ((8192, 4096, 32768), _BF16), ((1024, 4096, 131072), _BF16)),
    ),
    "fused_linear_scaled_cross_entropy": (((8192, 4096, 131072), _BF16),),
    "fused_linear_jsd": (((4096, 4096, 128256), _BF16),),
    "fused_linear_kl_div": (((4096, 4096, 128256), _BF16),),
    "cross_entropy": (((8192, 131072), _BF16), ((8192, 32768), _BF16)),
    **dict.fromkeys(("kl_div", "jsd", "tvd"), (((4096, 131072), _FP32),)),
    "fused_ce_tvd": (((4096, 131072), _BF16),),
    "vocab_parallel_cross_entropy": (((8192, 32768), _BF16),),
    **dict.fromkeys(chunked.OPS, (((8, 1024, 4096, 131072), _BF16),)),
    **dict.fromkeys(("jsd_distillation", "cosine_distillation"), (((4, 1024, 4096, 131072), _BF16),)),
}
"""The problem sizes, with their dtype, at which docs/losses.md compares every loss with its peers."""

# -- many shapes -----------------------------------------------------------------------------------------------------

ROWS = (
    *((1, 512), (131072, 4096), (4096, 4096), (1000, 4095), (65536, 128), (2048, 32768), (16, 4096), (16384, 8191)),
    *((128, 512), (8192, 5120), (512, 2048), (32768, 1024), (1, 4096), (8192, 2047), (4096, 12288), (1024, 3072)),
    *((7, 4097), (131072, 1024), (257, 777), (16384, 4096), (512, 8192), (2048, 6144), (65536, 512), (128, 4096)),
    *((1, 12289), (8192, 3584), (32, 8192), (4096, 1024), (32768, 2880), (1024, 16384), (131072, 64), (512, 1000)),
    *((16, 1024), (3000, 2560), (16384, 1536), (4096, 2304), (8192, 7168), (2048, 4096), (128, 14336), (65536, 2048)),
    *((8192, 640), (4096, 8192)),
)
"""(n_rows, n_cols) from a decode step's to 131072 rows; the order mixes small and large, so that a run cut short has both."""

_HEADS = ((32, 8, 128), (8, 4, 256), (28, 4, 128), (16, 16, 64), (40, 8, 128), (5, 1, 96))
_TOKENS = ((1, 1), (1, 8192), (1, 512), (4, 4096), (1, 17), (2, 2048), (32, 1), (1, 1000))
_VISION = ((16, 16, 80), (16, 16, 72), (16, 16, 64), (12, 12, 64), (16, 16, 88), (5, 5, 48))
_IMAGES = ((1, 1), (16, 1024), (1, 577), (16, 577), (1, 64), (4, 4096), (64, 257), (1, 1500))
_PICTURES = ((1, 64), (16, 1024), (4, 4096), (1, 49), (32, 256), (2, 16384), (3, 197))


def _modulated() -> Iterator[tuple[int, int, int]]:
    for n_rows, n_cols in ROWS:
        yield next(n for n in (32, 8, 5, 3, 1) if n_rows % n == 0), n_rows, n_cols


def _rotary(heads: tuple, tokens: tuple, long: tuple) -> tuple[tuple[int, ...], ...]:
    """Five counts of heads at each of eight counts of tokens, and 131072 tokens of few heads."""
    turns = [(*t, *heads[(i + j) % len(heads)]) for i in range(5) for j, t in enumerate(tokens)]
    return (*turns[:8], (1, 131072, *long), *turns[8:])


MANY: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(("rms_norm", "fused_add_rms_norm", "layer_norm", "poly_norm", "dyt", "softmax", "sparsemax"), ROWS),
    **dict.fromkeys(("swiglu", "fused_gate_up_swiglu", "geglu", "relu_squared"), ROWS),
    "modulated_rms_norm": tuple(_modulated()),
    "group_norm": (
        *((batch, 32, spatial, channels) for channels in (320, 64, 1280, 512, 128) for batch, spatial in _PICTURES),
        *(
            (8, groups, 1024, channels)
            for groups, channels in ((1, 512), (8, 96), (16, 400), (4, 20), (2, 66), (3, 33))
        ),
    ),
    "rope": _rotary(_HEADS, _TOKENS, (8, 2, 128)),
    "qk_norm_rope": _rotary(_HEADS, _TOKENS, (8, 2, 128)),
    "qwen2vl_mrope": _rotary(_HEADS, _TOKENS, (8, 2, 128)),
    "interleaved_rope": _rotary(_HEADS, _TOKENS, (8, 2, 128)),
    "llama4_rope": _rotary(_VISION, _IMAGES, (5, 1, 128)),
    "vision_rope": _rotary(_VISION, _IMAGES, (4, 4, 80)),
    "embedding": tuple(
        (n_tokens, vocab, n_cols)
        for vocab, n_cols in ((32000, 4096), (50257, 768), (128256, 2048), (151936, 1024), (32000, 1023))
        for n_tokens in (1, 4096, 17, 16384, 512, 131072, 1000, 32768)
    ),
    "multi_token_attention": tuple(
        (batch, seq_len, channels)
        for channels in (32, 8, 5)
        for batch, seq_len in ((1, 64), (4, 1024), (1, 511), (2, 256), (1, 2048), (4, 128), (1, 1000), (8, 512))
    )
    + tuple(
        (1, seq_len, 16)
        for seq_len in (1, 17, 64, 100, 128, 256, 333, 512, 768, 1024, 1025, 1536, 1792, 2048, 2500, 3000)
    ),
}
"""At least 40 problem sizes of each memory-bound op, in its `dims`."""
