"""liger-kernel as a peer: its functional API by the op's name; `ELSEWHERE` has the ops with another place or signature.

Liger 0.8.5 has two implementations of rope, JSD and the loss of its fused head, and chooses one in each call: CuTe DSL
on NVIDIA GPUs where `cutlass.cute` can be imported, else Triton. `chosen` and `environment` say what ran.
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

from ...registry import Op
from .common import Absent, only


@contextlib.contextmanager
def chosen() -> Iterator[set[str]]:
    """The implementations that Liger chooses in a block, such as `nvidia-cutedsl`; `triton` where it has no choice."""
    names: set[str] = set()
    try:
        dispatch = importlib.import_module("liger_kernel.backends.dispatch")
    except ImportError:  # before 0.8.5 there is only Triton, or Liger is not installed
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
    """What decides which implementation Liger chooses here; None where it is not installed."""
    try:
        version = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return None
    cute = importlib.util.find_spec("cutlass") is not None and importlib.util.find_spec("cutlass.cute") is not None
    return {"version": version, "cutlass.cute": cute, "LIGER_KERNEL_IMPL": os.environ.get("LIGER_KERNEL_IMPL")}


def build(op: Op) -> Callable[..., Any]:
    if op.name in ELSEWHERE:
        return ELSEWHERE[op.name]
    functional = importlib.import_module("liger_kernel.transformers.functional")
    function = getattr(functional, f"liger_{op.name}", None)
    if function is None:
        raise Absent(f"liger-kernel has no liger_{op.name}")
    narrower = {"swiglu": _swiglu, "geglu": _geglu}.get(op.name)
    return functools.partial(narrower, function) if narrower else function


def _swiglu(function, a, b, gate_multiplier=1.0, down_multiplier=1.0):
    options = {"gate_multiplier": gate_multiplier, "down_multiplier": down_multiplier}
    only({"gate_multiplier": 1.0, "down_multiplier": 1.0}, **options)
    return function(a, b)


def _geglu(function, a, b, approximate="tanh"):
    only({"approximate": "tanh"}, approximate=approximate)
    return function(a, b)


def _fused_ce_tvd(student_logits, teacher_logits, target, ignore_index=-100):
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedCETVDLoss(ignore_index)
    return loss(student_logits, teacher_logits, target)


def _linear_log_probs(
    input,
    weight,
    target,
    bias=None,
    temperature=1.0,
    softcap=None,
    ignore_index=-100,
    return_entropy=False,
    return_top1=False,
    selected_token_ids=None,
    **more,
):
    """Minus Liger's scaled cross entropy."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    only({}, bias=bias, softcap=softcap, **{name: value for name, value in more.items() if value})
    options = temperature, ignore_index, 1, return_entropy, selected_token_ids
    result = module.LigerFusedLinearScaledCrossEntropyFunction.apply(input, weight, target, *options)
    only({"return_top1": False}, return_top1=return_top1)
    return (-result[0], *result[1:]) if isinstance(result, tuple) else -result


def _fused_moe(x, gate_up_proj, down_proj, top_k_index, top_k_weights, **more):
    only({}, **more)
    function = importlib.import_module("liger_kernel.ops").LigerFusedMoEFunction
    return function.apply(x, gate_up_proj, down_proj, top_k_index.to(torch.int32), top_k_weights)


def _vocab_parallel(logits, target, tp_group=None, ignore_index=-100, label_smoothing=0.0, *rest, **more):
    module = importlib.import_module("liger_kernel.transformers")
    loss = module.LigerVocabParallelCrossEntropy(ignore_index, label_smoothing, "none", *rest, **more)
    return loss(logits[:, None], target[:, None], tp_group)[:, 0]


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False):
    only({}, rotary_dim=rotary_dim)  # Liger always assumes that cos and sin have equal halves
    function = importlib.import_module("liger_kernel.transformers.functional").liger_rope
    return function(q, k, cos, sin, position_ids, unsqueeze_dim)


def _mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1, shared_halves=False):
    function = importlib.import_module("liger_kernel.transformers.functional").liger_qwen2vl_mrope
    return function(q, k, cos, sin, mrope_section, unsqueeze_dim)


def _llama4(xq, xk, freqs_cis):
    module = importlib.import_module("liger_kernel.transformers.llama4_rope")
    return module.liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis)


def _vision(q, k, cos, sin, shared_halves=False):
    return importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb_vision(q, k, cos, sin)


def _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", **more):
    """Liger's norm, then its rope, as Liger's patch calls them."""
    only({"shared_halves": True}, **{name: value for name, value in more.items() if value})
    module = importlib.import_module("liger_kernel.transformers.functional")
    q, k = (module.liger_rms_norm(x, w, eps, offset, casting_mode) for x, w in ((q, q_weight), (k, k_weight)))
    return module.liger_rope(q, k, cos, sin)


def _embedding(weight, indices, padding_idx=None):
    module = importlib.import_module("liger_kernel.ops.experimental.embedding")
    return module.LigerEmbeddingFunction.apply(weight, indices)


ELSEWHERE: dict[str, Callable[..., Any]] = {
    "rope": _rope,
    "qwen2vl_mrope": _mrope,
    "llama4_rope": _llama4,
    "vision_rope": _vision,
    "qk_norm_rope": _qk_norm_rope,
    "embedding": _embedding,
    "fused_ce_tvd": _fused_ce_tvd,
    "fused_linear_log_probs": _linear_log_probs,
    "fused_moe": _fused_moe,
    "vocab_parallel_cross_entropy": _vocab_parallel,
}
