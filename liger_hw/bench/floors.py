"""Lower bound of a case's time: its bytes at the measured copy rate, or its matrix products as torch runs them."""

from __future__ import annotations

import math
from typing import Callable

from .cases import Case, make_inputs, with_few_rows
from .inputs import Inputs, tensors_in
from .timing import Chain, Meter, Product


def floor_words(vocab: int) -> int:
    """The size of a vocabulary rounded down to a multiple of 8: cuBLAS takes 6 times as long for 50257 words as for
    50256, so a head that splits off the last word would reach 500% of a floor with all words."""
    return vocab - vocab % 8 or vocab


def linear_head(*sizes: int) -> tuple[list[Product], list[Product]]:
    """Products of an output head. sizes: tokens (or batch and length), hidden, vocab"""
    *rows, hidden, vocab = sizes
    vocab = floor_words(vocab)
    logits = (math.prod(rows), vocab, hidden, "nt")
    return [logits], [logits, (math.prod(rows), hidden, vocab, "nn"), (vocab, hidden, math.prod(rows), "tn")]


def two_heads(*sizes: int) -> tuple[list[Product], list[Product]]:
    """Products of a head, and of a teacher's or reference model's head, which has no gradient."""
    forward, both = linear_head(*sizes)
    return 2 * forward, [*forward, *both]


def experts(n_tokens: int, hidden: int, inner: int, n_experts: int, top_k: int) -> tuple[list[Product], list[Product]]:
    """Products of all experts, counted as one dense layer with all their rows."""
    rows = n_tokens * top_k
    forward = [(rows, 2 * inner, hidden, "nt"), (rows, hidden, inner, "nt")]
    down = [(rows, inner, hidden, "nn"), (hidden, inner, rows, "tn")]
    return forward, [*forward, *down, (rows, hidden, 2 * inner, "nn"), (2 * inner, hidden, rows, "tn")]


PRODUCTS: dict[str, Callable[..., tuple[list[Product], list[Product]]]] = {
    "fused_linear_cross_entropy": linear_head,
    "fused_linear_kl_div": linear_head,
    "fused_linear_jsd": two_heads,
    "fused_moe": experts,
    "fused_linear_log_probs": linear_head,
}
"""GEMM-bound op -> function from its problem sizes to its matrix products: (forward, forward and backward)."""


def floors_of(case: Case, inputs: Inputs, meter: Meter, copy_rate: float) -> tuple[dict[str, float], str]:
    """({mode: milliseconds}, "copy" or "gemm").

    Products are timed briefly here; `ops.bench` times them again, interleaved with the arms.
    """
    if case.op.name in PRODUCTS:
        chains = (Chain(meter, products, case.dtype) for products in PRODUCTS[case.op.name](*case.sizes))
        forward, both = (chain.cost_ms() for chain in chains)
        return {"fwd": forward, "full": both, "bwd": both - forward}, "gemm"
    few = with_few_rows(case, 1)
    one = make_inputs(case, few, meter.device, 0)
    outputs = tensors_in(case.op.reference(*one.args, **one.kwargs))
    scale = math.prod(case.sizes) // math.prod(few)
    written = sum(out.numel() * out.element_size() for out in outputs if out.dim()) * scale
    read = sum(tensor.numel() * tensor.element_size() for tensor in inputs.tensors)
    ms = 1e-6 / copy_rate
    return {
        "fwd": (read + written) * ms,
        "full": inputs.moved * ms,
        "bwd": (inputs.moved - read - written) * ms,
    }, "copy"
