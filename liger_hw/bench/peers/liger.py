"""liger-kernel as a peer: the function of the op's name in this file, or else `liger_<op>` of Liger's functional API.

Liger 0.8.5 has two implementations of rope, JSD and its fused linear loss. Each call chooses CuTe DSL on an NVIDIA GPU
if `cutlass.cute` can be imported, else Triton. `chosen` records the choice.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from importlib import metadata
from typing import Any, Callable, Iterator

import torch

from .common import Absent


@contextlib.contextmanager
def chosen() -> Iterator[set[str]]:
    """Yields the set of implementations that Liger chooses in the block, such as `nvidia-cutedsl`; default `triton`."""
    names: set[str] = set()
    try:
        dispatch = importlib.import_module("liger_kernel.backends.dispatch")
    except ImportError:  # Liger is not installed, or before 0.8.5, which added the choice
        yield names
        names.add("triton")
        return
    resolve = dispatch.resolve_impl

    def noting(*args: Any, **kwargs: Any) -> Any:
        implementation = resolve(*args, **kwargs)
        names.add(implementation.impl_name)
        return implementation

    dispatch.resolve_impl = noting
    try:
        yield names
    finally:
        dispatch.resolve_impl = resolve
        if not names:
            names.add("triton")


def environment() -> dict[str, Any] | None:
    """Facts on which Liger's choice of an implementation depends; None if Liger is not installed."""
    try:
        version = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return None
    cute = importlib.util.find_spec("cutlass") is not None and importlib.util.find_spec("cutlass.cute") is not None
    return {"version": version, "cutlass.cute": cute, "LIGER_KERNEL_IMPL": os.environ.get("LIGER_KERNEL_IMPL")}


def functional(name: str) -> Callable[..., Any]:
    """`liger_<name>` of Liger's functional API. Raises `Absent`."""
    try:
        return _from("transformers.functional", f"liger_{name}")
    except AttributeError:
        raise Absent(f"liger-kernel has no liger_{name}") from None


@functools.cache
def _from(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.{module}"), name)


def swiglu(a, b, *multipliers):
    return _from("transformers.functional", "liger_swiglu")(a, b)


def geglu(a, b, approximate):
    return _from("transformers.functional", "liger_geglu")(a, b)


def fused_ce_tvd(student_logits, teacher_logits, target):
    return _from("transformers", "LigerFusedCETVDLoss")(-100)(student_logits, teacher_logits, target)


def fused_linear_log_probs(input, weight, target, bias):
    """Minus Liger's scaled cross entropy, at temperature 1."""
    function = _from("ops.fused_linear_scaled_cross_entropy", "LigerFusedLinearScaledCrossEntropyFunction")
    result = function.apply(input, weight, target, 1.0, -100, 1, False, None)
    return (-result[0], *result[1:]) if isinstance(result, tuple) else -result


def fused_moe(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
    function = _from("ops", "LigerFusedMoEFunction")
    return function.apply(x, gate_up_proj, down_proj, top_k_index.to(torch.int32), top_k_weights)


def vocab_parallel_cross_entropy(logits, target):
    loss = _from("transformers", "LigerVocabParallelCrossEntropy")(-100, 0.0, "none")
    return loss(logits[:, None], target[:, None], None)[:, 0]


def rope(q, k, cos, sin, shared_halves):  # which Liger always assumes
    return _from("transformers.functional", "liger_rope")(q, k, cos, sin)


def qwen2vl_mrope(q, k, cos, sin, mrope_section, shared_halves):
    return _from("transformers.functional", "liger_qwen2vl_mrope")(q, k, cos, sin, mrope_section)


def llama4_rope(xq, xk, freqs_cis):
    return _from("transformers.llama4_rope", "liger_llama4_text_rotary_pos_emb")(xq, xk, freqs_cis)


def vision_rope(q, k, cos, sin, shared_halves):
    return _from("transformers.rope", "liger_rotary_pos_emb_vision")(q, k, cos, sin)


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *how, shared_halves):
    """Liger's norm, then its rope, as Liger's patch calls them."""
    norm = _from("transformers.functional", "liger_rms_norm")
    return rope(norm(q, q_weight, *how), norm(k, k_weight, *how), cos, sin, shared_halves)


def embedding(weight, indices):
    return _from("ops.experimental.embedding", "LigerEmbeddingFunction").apply(weight, indices)
