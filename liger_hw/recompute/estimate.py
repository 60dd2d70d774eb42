"""Tokens per second and peak bytes of a training step with Hugging Face's code, with Liger and with liger_hw.

For liger_hw the planner predicts them. Any device is assumed to reach the share of its data sheet that an H200 does.
`ARMS` has the additional costs of Hugging Face and Liger, fitted to six models on one H200. A test requires estimates
within 10% for these models, two models timed later, and a whole model on several devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..autotune.models import Model
from .levels import DEFAULT, level_of_each
from .planner import BANDWIDTH, GEMM_RATE, Assumptions, Planner

GEMM_SHARE = GEMM_RATE / 989e12
"""Share of the data sheet's dense bf16 rate that a step reaches on an H200."""
COPY_SHARE = BANDWIDTH / 4.8e12
"""Share of the data sheet's bandwidth that a large copy reaches on an H200."""
LORA_SHARE = 0.005
"""Trained share of the parameters under LoRA: about rank 16 on all linears of an 8B model."""


@dataclass(frozen=True)
class Arm:
    """One of the compared codes, and its costs.

    small: bytes that norms, gates and rotary embeddings move, relative to fused kernels; experts: time of a layer's
    experts, relative to fused_moe
    logit, chunk: bytes moved beyond the planner's count, for each logit, and in each of Liger's chunks for each element
    of the head's weight; kept_logit: bytes at the peak for each logit, beyond the planner's count
    fused_loss: as in `Assumptions`; level: of its layers
    """

    name: str
    small: float
    logit: float
    chunk: float
    experts: float
    kept_logit: int
    fused_loss: bool
    level: Any = "keep"


ARMS = (
    Arm("Hugging Face", 5.7, 60.0, 0.0, 1.13, 3, False),
    Arm("+ Liger 0.8.5", 1.5, 0.0, 5.2, 1.7, 0, True),
    Arm("+ liger_hw", 1.0, 0.0, 0.0, 1.0, 0, True, DEFAULT),
)

GPUS = {
    "a100": (312, 79),
    "h100": (989, 79),
    "h200": (989, 139),
    "b200": (2250, 178),
    "rtx4090": (165, 23),
    "rtx5090": (209, 31),
    "mi300x": (1307, 191),
    "mi325x": (1307, 255),
    "mi355x": (2517, 287),
    "max1550": (839, 127),
}
"""Device -> (dense bf16 TFLOP/s of its data sheet, GiB that a program can allocate). Only `h200` was measured."""


@dataclass(frozen=True)
class Estimate:
    """An arm's tokens per second and peak bytes on one device."""

    arm: str
    tokens_per_second: float
    peak: int


def estimates(
    model: Model,
    batch: int,
    seq: int,
    tflops: float,
    bandwidth: float,
    *,
    lora: bool = False,
    gpus: int = 1,
    engine: str = "fsdp2",
) -> list[Estimate]:
    """An estimate for each of `ARMS`. Raises `ValueError` for what the planner does not model.

    tflops, bandwidth: the device's dense bf16 rate and GB/s, from its data sheet
    lora: adapters on every linear layer; gpus: devices over which `engine` of `planner.ENGINES` shards the state
    """
    flops, rate = tflops * 1e12 * GEMM_SHARE, bandwidth * 1e9 * COPY_SHARE
    assumptions = Assumptions(
        4 if trains_in_fp32(gpus, engine, lora) else 2,
        trainable=LORA_SHARE if lora else 1.0,
        shards=gpus,
        engine=engine,
        flops_per_byte=flops / rate,
    )
    rows = []
    for arm in ARMS:
        planner = Planner(model, batch, seq, replace(assumptions, fused_loss=arm.fused_loss))
        if not arm.fused_loss:
            planner.layer.kept["keep"] += _more_kept(planner)
        levels = level_of_each(arm.level, model.layers)
        logits = planner.tokens * model.vocab
        peak = planner.predict(levels).peak + logits * arm.kept_logit
        moved = arm.logit * logits + arm.chunk * planner.head_parameters * _chunks(planner)
        slower = (arm.experts - 1) * sum(planner.expert_times()) + (arm.small - 1) * 3 * planner.layer.small
        seconds = (planner.step_time(levels) + model.layers * slower) / flops + moved / rate
        rows.append(Estimate(arm.name, planner.tokens / seconds, int(peak)))
    return rows


def trains_in_fp32(gpus: int, engine: str, lora: bool) -> bool:
    """Whether parameters are fp32: under FSDP2 and bf16 autocast accelerate keeps trained ones so."""
    return gpus > 1 and engine == "fsdp2" and not lora


def _chunks(planner: Planner) -> int:
    """Number of chunks of Liger's fused loss, whose rows are a power of two."""
    rows = -(-planner.tokens // -(-planner.model.vocab // planner.model.hidden))
    return -(-planner.tokens // (1 << (rows - 1).bit_length()))


def _more_kept(planner: Planner) -> int:
    """Bytes that a transformers layer keeps beyond fused kernels: the gate's activation, and of each norm the input in
    fp32 and the normalised input."""
    m, tokens = planner.model, planner.tokens
    normed = m.hidden * (4 if m.sandwich else 2) + ((m.heads + m.kv_heads) * m.head_dim if m.qk_norm else 0)
    return tokens * (2 * planner.wide + 6 * normed)
