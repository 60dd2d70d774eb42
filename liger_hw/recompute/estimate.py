"""What a training step of a model takes in seconds and bytes: as Hugging Face ships it, with Liger, and with liger_hw.

Memory is the planner's (`planner.py`). Time is a sum: matrix products at a share of the device's bf16 rate, attention
as the planner counts it, and the bytes that everything else moves, at a large copy's rate. Six models timed on one H200
gave the shares in `ARMS`; a test holds the estimate to 10% of each of them, and of two that were timed later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .levels import DEFAULT, level_of_each
from .planner import ATTENTION, ATTENTION_MASKED, Assumptions, Planner

if TYPE_CHECKING:
    from ..autotune.models import Model

GEMM_SHARE = 0.73
"""Of the data sheet's dense bf16 rate: what the products of a step reach on an H200, 720 TFLOP/s."""
COPY_SHARE = 0.885
"""Of the data sheet's bandwidth: what a large copy reaches on an H200, 4.25 TB/s."""
EAGER_BYTES = 150.0
"""Bytes that eager attention with softcapped scores moves for each score, forward and backward."""
UPDATE_BYTES = 14
"""Bytes that a fused AdamW moves for each bf16 parameter: four are read, three written."""
SHARDED_MORE = 5
"""Bytes that an engine shards of each parameter beside bf16 weights, gradients and states, since it keeps fp32 ones."""
LORA_SHARE = 0.01
"""Share of the parameters that train under LoRA."""
ENGINES = {"fsdp2": (0.87, 0), "zero3": (0.69, 6 << 30)}
"""Engine -> share of one device's speed that a device reaches over NVLink, and bytes of its buffers.

Llama-3-8B whole in Trainer, on two and four H200s.
"""


@dataclass(frozen=True)
class Arm:
    """What one way of training costs beside the matrix products.

    small: bytes that norms, gates and rotary embeddings move, over what fused kernels must move
    logit: bytes moved for each logit; experts: time of a layer's expert products over the time of dense ones
    kept_logit: bytes at the peak for each logit beside those that the planner counts
    fused_loss, level: as the planner takes them
    """

    name: str
    small: float
    logit: float
    experts: float
    kept_logit: int
    fused_loss: bool
    level: Any = "keep"


ARMS = (
    Arm("Hugging Face", 7.2, 50.0, 1.33, 3, False),
    Arm("+ Liger 0.8.5", 2.6, 100.0, 2.04, 0, True),
    Arm("+ liger_hw", 2.6, 6.0, 1.18, 0, True, DEFAULT),
)

PEAK_TFLOPS = {
    "a100": 312,
    "h100": 989,
    "h200": 989,
    "b200": 2250,
    "rtx4090": 165,
    "rtx5090": 209,
    "mi300x": 1307,
    "mi325x": 1307,
    "mi355x": 2517,
    "max1550": 839,
}
"""Device -> dense bf16 TFLOP/s of its data sheet. Only `h200` was measured."""


@dataclass(frozen=True)
class Estimate:
    """One arm: tokens a second and bytes at the peak, each of one device."""

    arm: str
    tokens_per_second: float
    peak: int


def estimates(
    model: "Model",
    batch: int,
    seq: int,
    tflops: float,
    bandwidth: float,
    *,
    lora: bool = False,
    gpus: int = 1,
    engine: str = "fsdp2",
) -> list[Estimate]:
    """One estimate an arm of `ARMS`. tflops: the device's dense bf16 rate; bandwidth: GB/s; both of its data sheet.

    lora: adapters on every linear layer; gpus: devices over which the engine of `ENGINES` shards parameters, gradients
    and states
    Raises `ValueError` for what the planner does not model.
    """
    share, buffers = ENGINES[engine] if gpus > 1 else (1.0, 0)
    rates = (tflops * 1e12 * GEMM_SHARE, bandwidth * 1e9 * COPY_SHARE)
    rows = []
    for arm in ARMS:
        planner = _planner(arm, model, batch, seq, lora, gpus)
        peak = (
            planner.predict(level_of_each(arm.level, model.layers)).peak + planner.tokens * model.vocab * arm.kept_logit
        )
        if gpus > 1:
            peak += buffers + _parameters(planner) * (2 if lora else SHARDED_MORE) // gpus
        seconds = _seconds(arm, planner, bool(model.experts), lora, gpus, *rates)
        rows.append(Estimate(arm.name, share * planner.tokens / seconds, int(peak)))
    return rows


def _planner(arm: Arm, model: "Model", batch: int, seq: int, lora: bool, gpus: int) -> Planner:
    dense, width, others = model, model.expert_width or model.intermediate, 0
    if model.experts:  # a layer as wide as the experts of one token, and the parameters of the others beside it
        top_k = max(1, model.top_k)
        others = (model.experts - top_k) * 3 * model.hidden * width
        dense = replace(model, experts=0, intermediate=top_k * width)
    trainable = LORA_SHARE if lora else 1.0
    planner = Planner(dense, batch, seq, Assumptions(fused_loss=arm.fused_loss, trainable=trainable, shards=gpus))
    kept = dict(planner.layer.kept)
    if not arm.fused_loss:
        kept["keep"] += _more_kept(planner)
    planner.layer = replace(planner.layer, parameters=planner.layer.parameters + others, kept=kept)
    return planner


def _parameters(planner: Planner) -> int:
    m = planner.model
    return m.layers * planner.layer.parameters + planner.head_parameters * (1 if m.tied else 2)


def _more_kept(planner: Planner) -> int:
    """Bytes that a layer of transformers keeps beside what fused kernels keep.

    The gate's activation, and of each norm its input in fp32 and what it multiplies with the weight.
    """
    m, tokens = planner.model, planner.tokens
    normed = m.hidden * (4 if m.sandwich else 2) + ((m.heads + m.kv_heads) * m.head_dim if m.qk_norm else 0)
    return tokens * (2 * m.intermediate + 6 * normed)


def _seconds(arm: Arm, planner: Planner, experts: bool, lora: bool, gpus: int, flops: float, rate: float) -> float:
    """Of one step. flops: of matrix products, a second; rate: bytes moved a second."""
    m, tokens, passes = planner.model, planner.tokens, 2 if lora else 3  # without the gradients of weights
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    products = passes * 2 * tokens * m.hidden * (2 * q + 2 * kv)
    wide = passes * 2 * tokens * 3 * m.hidden * m.intermediate * (arm.experts if experts else 1.0)
    norms = m.hidden * (14 if m.sandwich else 10) + 3 * m.intermediate + 2 * (q + kv) * (2 if m.qk_norm else 1)
    small = tokens * 2 * 3 * norms * arm.small
    if planner.attention == "eager":
        scores, causal = planner.batch * m.heads * planner.seq**2 * EAGER_BYTES, 0.0
    else:
        forward, backward = ATTENTION_MASKED if planner.attention == "masked" else ATTENTION
        scores, causal = 0.0, 2 * tokens * planner.seq * q * (1 / forward + 2.5 / backward)
    layer = (products + wide + causal) / flops + (small + scores) / rate
    head = passes * 2 * tokens * planner.head_parameters / flops + tokens * m.vocab * arm.logit / rate
    update = _parameters(planner) * (LORA_SHARE if lora else 1) / gpus * UPDATE_BYTES / rate
    return m.layers * layer + head + update
