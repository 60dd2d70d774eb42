"""Predicts memory and time of a training step from the levels of its layers, and chooses the best mix that fits.

Bytes are counted from the model's shape: tensors that backward needs, parameters, gradients, optimizer state, chunks of
the loss head, and temporaries at the peak. Time is in FLOPs of a matrix product; a byte moved takes as long as
`flops_per_byte` of them. Seconds are an H200's. docs/activations.md compares predictions with measurements.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Sequence

from ..autotune import models
from .levels import CHECKPOINTED, LAST, LEVELS, in_words, level_of_each

if TYPE_CHECKING:
    import torch


GEMM_RATE, BANDWIDTH = 665e12, 4.25e12
"""Measured on an H200: bf16 FLOPs per second of a step's matrix products, and bytes per second of a large copy."""
FLOPS_PER_BYTE = GEMM_RATE / BANDWIDTH
FLASH_RATE, MASKED_RATE = (0.9, 0.8), (0.216, 0.238)
"""FLOPs per second of attention's forward and backward, relative to GEMM_RATE: flash, and memory-efficient with a mask.
Causal attention's FLOPs are counted."""
STARTUP_TOKENS, L2_TOKENS = (660, 1000), 1 << 16
"""Start-up makes flash attention 1 + STARTUP_TOKENS / seq times as long, forward and backward. Its forward takes 10%
longer for each doubling beyond L2_TOKENS, because fewer keys and values hit the L2 cache."""
FLOAT8_TIME = 0.66
"""Time of linears in FP8, with quantisation, relative to bf16: three models at 8192 tokens on an H200."""
FP32_PRODUCT_TIME = 2.3
"""Time of adapters' fp32 products without TF32, relative to moving the wide operand: ranks 8 to 32 on an H200."""
TILE_OVERHEAD, PADDED_ROWS = 258, 32
"""Start and end of a tile of the experts' products take as long as TILE_OVERHEAD columns of its inner dimension
(docs/moe.md). An expert's last tile has on average PADDED_ROWS rows of padding."""
ADAM_RATE = 178e9
"""Most parameters per second that torch's fused AdamW updates on an H200."""
EAGER_TIME = (1.6, 0.82)
"""Time of eager attention's forward and backward, relative to the time that their bytes take at BANDWIDTH."""
EAGER_MARGIN = 0.02
"""Share of a budget left free with eager attention, whose large temporaries differ between transformers' versions."""
HOST_BYTE_TIME = 78
"""Time to copy a byte to or from pinned host memory (55 GB/s), relative to BANDWIDTH."""
LINK_BYTE_TIME = 28
"""Time to exchange a byte between devices over NVLink (150 GB/s with the copies around it), relative to BANDWIDTH."""
TILE_ROWS = 8192
"""As in kernels/pointwise/tiled_mlp.py."""
SEQUENCE_STEP, LONGEST_SEQUENCE = 1024, 1 << 28
"""`longest` tries multiples of SEQUENCE_STEP tokens per device, up to LONGEST_SEQUENCE tokens."""
WORKSPACE = 100 << 20
"""Bytes of matrix multiplication workspaces and small tensors."""
ATTENTIONS = ("eager", "masked", "flash")
ADAPTERS = ("fp32", "autocast", "model")
"""Dtype of LoRA adapters: fp32 in a bf16 model, as PEFT loads them; fp32 under autocast, which casts each linear's
input to fp32 and back; the model's dtype (`autocast_adapter_dtype=False`)."""
FP32_ADAPTERS = ADAPTERS[:2]
STATE_BYTES = {"adamw": 2.0, "adam": 2.0, "sgd": 0.0, "momentum": 1.0, "adafactor": 0.01, "adamw8bit": 0.5}
"""Bytes of optimizer state for each byte of trainable parameters."""


@dataclass(frozen=True)
class Engine:
    """What an engine shards besides optimizer state, and the memory that it needs besides the shards.

    parameters, gradients: whether they are sharded; keeps_gradients: whether their memory lasts from step to step
    master: whether bf16 parameters have a sharded fp32 copy; optimizer state is fp32 then
    buffers: bytes for communication; gathered: most parameters held whole at a time; 0: the embedding, the head and
    one decoder layer
    passes: how often a step sends each parameter; link: bytes per second, counting only time that is not hidden
    projections: whether level mlp can recompute projections; ZeRO-3's hooks on them prevent it
    """

    parameters: bool = True
    gradients: bool = True
    master: bool = False
    keeps_gradients: bool = False
    buffers: int = 0
    gathered: int = 0
    passes: int = 3
    link: float = 1.0
    projections: bool = True


_BUCKET = 5 * 10**8 * 2
ENGINES = {
    "fsdp2": Engine(link=395e9),
    "zero1": Engine(False, False, True, buffers=2 * _BUCKET, passes=2, link=190e9),
    "zero2": Engine(False, True, True, buffers=2 * _BUCKET, passes=2, link=190e9),
    "zero3": Engine(master=True, keeps_gradients=True, buffers=_BUCKET, gathered=10**9, link=190e9, projections=False),
}
"""FSDP2 with mixed precision, as accelerate configures it; DeepSpeed's defaults. Links are fitted to 2 and 4 H200s."""
UNCOUNTED_SHARE = 0.02
"""The planner leaves out biases and some norms: at most this share of the parameters outside experts."""
MOST_LAYERS = 1024
"""Limits the time that `Planner.best` takes."""


@dataclass(frozen=True)
class Assumptions:
    """What a prediction assumes.

    dtype_bytes, compute_bytes: itemsize of parameters, of activations; optimizer: a name in `STATE_BYTES`
    trainable: trained share of the parameters; below 1 for LoRA adapters on every linear layer
    adapters: one of `ADAPTERS`; in a sharded or fp32 model adapters always have the activations' dtype
    fused_loss: whether the loss is computed in chunks, without keeping logits; float8: whether linears are in FP8
    flops_per_byte: FLOPs of a GEMM in the time in which the device moves a byte
    shards: devices over which `engine`, a name in `ENGINES`, shards the model's state
    sequence: devices that share a sequence's tokens and attention equally (Ulysses, context parallel)
    in_backward: each parameter is updated in backward and its gradient freed at once
    attention: `eager` (scores in memory), `masked` (memory-efficient, with a mask), `flash`, or "" for transformers'
    default: eager if scores are softcapped, masked if the sequence is at least as long as the window, else flash
    """

    dtype_bytes: int = 2
    compute_bytes: int = 2
    optimizer: str = "adamw"
    trainable: float = 1.0
    adapters: str = "fp32"
    shards: int = 1
    engine: str = "fsdp2"
    sequence: int = 1
    fused_loss: bool = True
    in_backward: bool = False
    attention: str = ""
    float8: bool = False
    flops_per_byte: float = FLOPS_PER_BYTE

    def __post_init__(self) -> None:
        choices = {"attention": ("", *ATTENTIONS), "adapters": ADAPTERS, "optimizer": STATE_BYTES, "engine": ENGINES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                names = ", ".join(filter(None, known))
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {names}")

    @property
    def adapters_in(self) -> str:
        """One of `ADAPTERS`, or "" if all parameters train."""
        if self.trainable == 1:
            return ""
        return "model" if self.dtype_bytes > 2 or self.shards > 1 else self.adapters

    @property
    def trained_bytes(self) -> int:
        """Itemsize of the trained parameters."""
        return 4 if self.adapters_in in FP32_ADAPTERS else self.dtype_bytes

    def __str__(self) -> str:
        dtypes = {2: "bf16/fp16", 4: "fp32"}
        parts = [
            f"parameters in {dtypes[self.dtype_bytes]}, activations in {dtypes[self.compute_bytes]}",
            f"{self.optimizer} in the parameters' dtype, fused",
            "gradients freed in backward" if self.in_backward else "gradients freed after each step",
            "fused linear cross entropy" if self.fused_loss else "logits kept",
        ]
        parts += ["linears in FP8"] if self.float8 else []
        if self.trainable < 1:
            kinds = dict(zip(ADAPTERS, ("fp32 without autocast", "fp32 under autocast", "the activations' dtype")))
            parts.append(f"{self.trainable:.1%} of the parameters train, as adapters in {kinds[self.adapters_in]}")
        parts += [f"sharded over {self.shards} devices by {self.engine}"] if self.shards > 1 else []
        parts += [f"each sequence split over {self.sequence} devices"] if self.sequence > 1 else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Layer:
    """A decoder layer's memory and time for one batch. Times are in FLOPs of a GEMM.

    kept, transient: level -> bytes kept for the layer's backward, further bytes while its backward runs
    extra: level -> time of recomputation; time: forward and backward at `keep`
    small: time of norms, gate and rotary embeddings in forward
    growing: name -> bytes that grow with the sequence in backward, at `tiled` and `offload`
    """

    kept: dict[str, int]
    transient: dict[str, int]
    extra: dict[str, float]
    time: float
    small: float
    parameters: int
    growing: dict[str, int]


@dataclass(frozen=True)
class Prediction:
    """A step with `levels`, after the first. peak: bytes; speed: relative to keep; seconds: on an H200; host: pinned
    bytes of the host"""

    levels: tuple[str, ...]
    peak: int
    speed: float
    seconds: float
    host: int = 0

    def __str__(self) -> str:
        host = f" and {self.host / 2**30:.1f} of the host" if self.host else ""
        return f"{in_words(self.levels)}: {self.peak / 2**30:.1f} GiB{host}, {100 * self.speed:.1f}% of keep's speed"


class Planner:
    """Predictions for a model of autotune.models, a batch and a sequence length. Raises `ValueError` for what is not
    modelled. If the model has experts, every layer must have them, and none that all tokens share."""

    def __init__(self, model: models.Model, batch: int, seq: int, assumptions: Assumptions = Assumptions()) -> None:
        if model.layers > MOST_LAYERS:
            raise ValueError(f"{model.name}: {model.layers} layers; the planner takes at most {MOST_LAYERS}")
        if model.experts and not model.top_k:
            raise ValueError(f"{model.name}: the config does not say how many of {model.experts} experts a token takes")
        if model.experts and assumptions.float8:
            raise ValueError(f"{model.name}: the planner does not model experts in bf16 with liger_hw.float8")
        if model.heads % (devices := assumptions.sequence):
            raise ValueError(f"{model.name}: {devices} devices cannot share its {model.heads} heads evenly (Ulysses)")
        self.model, self.batch, self.seq, self.assumptions = model, batch, seq, assumptions
        self.engine = ENGINES[assumptions.engine] if assumptions.shards > 1 else Engine()
        self.tokens = -(-batch * seq // assumptions.sequence)
        self.q, self.kv = model.heads * model.head_dim, model.kv_heads * model.head_dim  # widths of q, of k and v
        width = model.expert_width if model.experts and model.expert_width else model.intermediate
        self.wide = width * (model.top_k if model.experts else 1)  # columns of the gate's output for each token
        self.mlp_parameters = 3 * model.hidden * width * max(1, model.experts)
        self.projects_again = self.engine.projections and not model.experts  # whether level mlp differs from cheap
        self.layer = self._layer()
        self.head = self._head()

    # -- one layer ---------------------------------------------------------------------------------------------------

    def _layer(self) -> Layer:
        m, assumed, tokens = self.model, self.assumptions, self.tokens
        unit = tokens * assumed.compute_bytes
        autocast = assumed.dtype_bytes > assumed.compute_bytes and assumed.shards == 1  # an engine gathers in bf16
        stream = tokens * (assumed.dtype_bytes if autocast else assumed.compute_bytes)  # fp32 under autocast
        q, kv, wide = self.q, self.kv, self.wide
        capped = assumed.compute_bytes if m.softcap else 0
        linear = m.hidden * (2 * q + 2 * kv + m.experts) + self.mlp_parameters  # includes the experts' router
        norms = 2 * m.hidden * (2 if m.sandwich else 1) + (2 * m.head_dim if m.qk_norm else 0)
        parameters = linear + norms

        blocks = 1 if m.parallel else 2
        normed = unit * m.hidden * (5 if autocast else blocks)  # autocast's copies are of q, k, v, gate and up each
        gated, float8 = 0 if m.experts else unit * wide, 0  # experts recompute their gate at every level
        adapted, copies, of_mlp = assumed.adapters_in, 0, 0
        copy = 4 if adapted == "fp32" else assumed.compute_bytes
        if adapted in FP32_ADAPTERS:  # each adapter keeps a copy of its input, which has no recipe
            of_mlp = 0 if m.experts else tokens * copy * (2 * m.hidden + wide)
            copies = of_mlp + tokens * copy * (3 * m.hidden + q)
            normed, gated = unit * m.hidden if m.experts else 0, 0
        elif assumed.float8 and not adapted:  # linears keep FP8 instead of their inputs, at every level
            normed, gated, float8 = 0, 0, tokens * (2 * m.hidden + q + wide)
        rotated = unit * (q + kv) if m.qk_norm else 0  # inputs of the norms of q and k
        residuals = stream * blocks * m.hidden + (unit * 2 * m.hidden if m.sandwich else 0)
        scores = 4 + capped + (assumed.compute_bytes if assumed.compute_bytes < 4 else 0)  # softmax in fp32, its cast
        attention = {
            "eager": unit * 4 * q + self._scores * scores,  # k and v for every head, scores as tanh
            "masked": unit * 5 * q,  # memory-efficient: k and v for every head, its output in two layouts
            "flash": unit * ((3 if m.heads_first else 2) * q + 2 * kv),  # q, k, v and the output
        }
        if m.fused_qkv and (kv == q or self.attention == "flash"):
            residuals += unit * (q + kv)  # v, if it is not repeated for every head, holds the memory of all three
        statistics = tokens * 4 * (2 + m.heads)  # rstd of two norms, log-sum-exp of attention
        statistics += tokens * (4 * m.experts + 32 * m.top_k)  # the router's softmax and choices, rows of experts
        keep = residuals + normed + gated + 2 * unit * wide + float8 + rotated + attention[self.attention] + statistics
        keep += copies
        if autocast and not assumed.float8:
            keep += linear * assumed.compute_bytes  # autocast's copies of the weights
        copied = m.qk_norm and kv < q and self.attention != "flash"  # k for every head has no recipe
        if adapted:  # each adapter's inner output is kept
            keep += int((4 if m.experts else 7) * tokens * copy * self._adapters(linear)[0])
        cheap = keep - normed - gated - rotated + (unit * kv if copied else 0)
        kept = {"keep": keep, "cheap": cheap, "mlp": cheap - 2 * unit * wide if self.projects_again else cheap}
        kept |= {"full": stream * m.hidden, "tiled": stream * m.hidden, "offload": 0}

        without_mlp = keep - kept["full"] - gated - 2 * unit * wide - of_mlp
        if m.experts:
            growing = {"what a layer keeps": keep - kept["full"], "gradients of experts": self._experts(unit, False)}
        else:
            done = 0 if m.parallel else unit * m.hidden * (1 if copies else 2)  # the second norm's input and output
            growing = self._growing(without_mlp - done, unit, stream)

        # The peak is in the down projection's backward: gradients of its input, output and weight. If adapters train,
        # also what they add to the output of the gate's or up projection.
        gradients = unit * (wide + (wide + m.hidden if adapted else 0)) + stream * m.hidden
        gradients += int(assumed.trainable * m.hidden * wide * assumed.dtype_bytes)
        again = {"cheap": unit * wide, "mlp": unit * (3 * wide + m.hidden) if self.projects_again else unit * wide}
        if m.experts:
            gradients = stream * m.hidden + self._experts(unit, assumed.trainable == 1)
            again = dict.fromkeys(again, unit * m.hidden)
        transient = {
            "keep": gradients,
            "cheap": gradients + again["cheap"],
            "mlp": gradients + again["mlp"],
            "full": gradients + keep - kept["full"],
            "tiled": self._tiled(without_mlp, unit, stream, growing, of_mlp // tokens),
        }
        if m.experts:  # experts do not run in tiles
            transient["tiled"] = transient["full"]
        # inputs of this layer and of the one whose backward is next, which is being copied to the device
        transient["offload"] = transient["tiled"] + 2 * kept["full"]
        if self.attention == "eager":
            # The peak may be in the softmax's backward: fp32 output, both gradients and their product, and the tanh;
            # the layer's input, q and k; gradients of the residual stream, of v, and of the weights after attention.
            scores = self._scores * (16 + capped) + stream * 2 * m.hidden + unit * 3 * q + statistics
            scores += int(assumed.trainable * m.hidden * (3 * wide + q) * assumed.dtype_bytes)
            for level in kept:
                norms = unit * m.hidden + rotated if level not in ("cheap", "mlp") else 0  # their outputs
                transient[level] = max(transient[level], scores + norms - kept[level])
        return Layer(kept, transient, *self._times(linear), parameters, growing)

    def _experts(self, unit: int, train: bool) -> int:
        """Peak bytes of the experts' backward. train: whether the experts have gradients"""
        m, weights = self.model, self.mlp_parameters * self.assumptions.dtype_bytes * train
        steps = (
            3 * unit * self.wide,  # gradients of the gate's inputs and output
            unit * (2 * self.wide + (m.top_k + 1) * m.hidden)
            + 2 * weights // 3,  # input gradient, by expert and summed
            unit * (self.wide + m.hidden) + weights,  # the recomputed gate for the down projections' gradients
        )
        return max(steps)

    def _growing(self, of_attention: int, unit: int, stream: int) -> dict[str, int]:
        """`Layer.growing`, for the peak in attention's backward. of_attention: bytes kept for it, without the layer's
        input; unit, stream: bytes of a column of activations, of the residual stream"""
        q, kv = self.q, self.kv
        grouped = 2 * unit * q if kv < q else 0  # gradients of k and v for every head
        return {
            "norm output, q, k, v and attention's output": of_attention,
            "their gradients and the residual stream's": unit * (2 * q + 2 * kv) + stream * self.model.hidden,
            "temporaries of attention's backward": self.tokens * 4 * q + grouped,  # q's gradient in fp32
        }

    def _tiled(self, without_mlp: int, unit: int, stream: int, growing: dict[str, int], copies: int) -> int:
        """Peak bytes of a layer's backward with the MLP in tiles, without the layer's input: in a tile or in attention.

        without_mlp: bytes kept for backward, without the MLP's wide tensors and the layer's input
        copies: bytes that the MLP's adapters keep for each row
        """
        m, assumed = self.model, self.assumptions
        weights = int(assumed.trainable * 3 * m.hidden * m.intermediate)
        rows = min(TILE_ROWS, self.tokens)
        tile = rows * (assumed.compute_bytes * (4 * m.intermediate + 2 * m.hidden) + copies)
        tile += weights * max(4, assumed.dtype_bytes)  # gradients, summed in fp32
        in_tile = without_mlp + (stream + unit) * m.hidden + tile
        return max(in_tile, sum(growing.values()) + weights * assumed.dtype_bytes)

    @property
    def attention(self) -> str:
        """One of `ATTENTIONS`: as assumed, or transformers' default for the model."""
        windowed = 0 < self.model.window <= self.seq
        return self.assumptions.attention or ("eager" if self.model.softcap else "masked" if windowed else "flash")

    @property
    def _scores(self) -> int:
        return self.batch * self.model.heads * self.seq**2

    @property
    def _masks(self) -> int:
        """Bytes of eager attention's masks, which checkpointed layers hold until backward. Gemma 2 and 3 have two."""
        kinds = 2 if self.model.window and self.model.sandwich else 1
        return kinds * self.batch * self.seq**2 * self.assumptions.compute_bytes if self.attention == "eager" else 0

    def _adapters(self, linear: int) -> tuple[float, int, int]:
        """(rank of a layer's adapters, summed input and output widths of the linears with one). Experts have none."""
        m, q, kv = self.model, self.q, self.kv
        ins, outs = 5 * m.hidden + q + self.wide, 2 * (m.hidden + kv + self.wide) + q
        if m.experts:
            ins, outs = 3 * m.hidden + q, m.hidden + 2 * kv + q
        whole = linear + self.head_parameters * (1 if m.tied else 2) / m.layers
        return self.assumptions.trainable * whole / (ins + outs), ins, outs

    def _adapter_times(self, ins: int, outs: int) -> tuple[float, float]:
        """Times of adapters' forward and backward. ins, outs: summed input and output widths of their linears"""
        kind, c, products = self.assumptions.adapters_in, self.assumptions.compute_bytes, 0.0
        # bytes moved for a token: forward reads the input, writes the output, scales it and adds it to the linear's
        forward, backward = (c * ins + 6 * c * outs, 5 * c * ins + 4 * c * outs) if kind else (0, 0)
        if kind == "autocast":  # inputs and their gradients are cast to fp32 and back
            forward, backward = forward + (8 + 2 * c) * ins, backward + (8 + 2 * c) * ins
        elif kind == "fp32":  # casts, scaling and addition in fp32, and the products
            forward, backward = (4 + c) * ins + (20 + 2 * c) * outs, (4 + 4 * c) * ins + (16 + 2 * c) * outs
            products = FP32_PRODUCT_TIME * 4 * (ins + outs)
        byte_time = self.tokens * self.assumptions.flops_per_byte
        return (forward + products) * byte_time, (backward + 2 * products) * byte_time

    def expert_times(self) -> tuple[float, float]:
        """Times of the experts' forward and backward in a layer: products in tiles, and sums over a token's experts."""
        m, c, assumed = self.model, TILE_OVERHEAD, self.assumptions
        if not m.experts:
            return 0.0, 0.0
        width, rows = self.wide / m.top_k, self.tokens * m.top_k / m.experts
        products, padded = 2 * self.tokens * 3 * m.hidden * self.wide, 1 + PADDED_ROWS / rows
        sums = self.tokens * (m.top_k + 1) * m.hidden * assumed.compute_bytes * assumed.flops_per_byte
        forward = padded * (1 + c * (2 / m.hidden + 1 / width) / 3)
        backward = padded * (1 + c * (1 / m.hidden + 1 / width) / 3) + assumed.trainable * (1 + c / rows)
        return products * forward + sums, products * backward + sums

    def _times(self, linear: int) -> tuple[dict[str, float], float, float]:
        """`extra`, `time` and `small` of the Layer. linear: parameters of its linear layers"""
        m, tokens, assumed = self.model, self.tokens, self.assumptions
        q, kv, wide = self.q, self.kv, self.wide
        rate, devices = FLOAT8_TIME if assumed.float8 else 1.0, assumed.sequence

        def moved(columns: float) -> float:
            return tokens * columns * assumed.compute_bytes * assumed.flops_per_byte

        experts = bool(m.experts)
        gemm = 2 * tokens * (linear - (self.mlp_parameters if experts else 0)) * rate
        experts_forward, experts_backward = self.expert_times()
        forward_scores, backward_scores = self._attention_times()
        norm, gate, rotation = 4 * m.hidden, 3 * wide, 2 * (q + kv)
        small = moved(norm * (2 if m.sandwich else 1) + gate + rotation * (2 if m.qk_norm else 1) + 6 * m.hidden)
        again = 0 if assumed.adapters_in in FP32_ADAPTERS else norm + (0 if experts else gate)
        cheap = moved(again + (2 * rotation if m.qk_norm else 0))
        exchange = moved((2 * q + 2 * kv) * LINK_BYTE_TIME * (devices - 1) / devices)  # Ulysses: q, k, v and the output
        copy = moved(m.hidden * HOST_BYTE_TIME)
        tiles = -(-tokens // TILE_ROWS) if tokens > TILE_ROWS and not experts else 0
        weights = 3 * m.hidden * wide * assumed.trainable
        sums = tiles * weights * 8 * assumed.flops_per_byte  # gradients in fp32, which each tile reads and writes
        adapters_forward, adapters_backward = self._adapter_times(*self._adapters(linear)[1:])
        of_gate, _ = self._adapter_times(2 * m.hidden, 2 * wide)
        forward = gemm + experts_forward + forward_scores + small + exchange + adapters_forward
        backward = gemm * (1 + assumed.trainable) + experts_backward + backward_scores + 2 * small + exchange
        backward += adapters_backward
        if assumed.float8 and assumed.adapters_in:  # with adapters each linear quantises its input itself
            forward += tokens * 3 * (3 * m.hidden + wide) * assumed.flops_per_byte
        # recomputation skips the down projection, but not the experts'
        full = forward - (0 if experts else 2 * tokens * m.hidden * wide * rate)
        exposed = max(0.0, copy - forward) + max(0.0, copy - backward - forward)
        extra = {
            "keep": 0.0,
            "cheap": cheap,
            "mlp": cheap + self.projects_again * (4 * tokens * m.hidden * wide * rate + of_gate),
            "full": full,
            "tiled": forward + sums,
            "offload": forward + sums + exposed,
        }
        return extra, forward + backward, small

    def _attention_times(self) -> tuple[float, float]:
        """Times of attention's forward and backward, without its projections."""
        padded = 1 << (self.model.head_dim - 1).bit_length()  # kernels round head_dim up to a power of two
        products = 2 * self.tokens * self.seq * self.q * padded / self.model.head_dim  # causal: half of 4 FLOPs
        if self.attention != "eager":
            if self.attention == "masked":
                return products / MASKED_RATE[0], 2.5 * products / MASKED_RATE[1]
            missed = 0.1 * max(0.0, math.log2(self.seq / L2_TOKENS))
            forward, backward = 1 + STARTUP_TOKENS[0] / self.seq + missed, 1 + STARTUP_TOKENS[1] / self.seq
            return products / FLASH_RATE[0] * forward, 2.5 * products / FLASH_RATE[1] * backward
        # Bytes moved for a score: two products, scale, mask, softcap (tanh, two factors), softmax in fp32 with casts.
        c, capped = self.assumptions.compute_bytes, self.model.softcap
        casts = 2 * (4 + c) if c < 4 else 0
        forward, backward = 6 * c + 6 * c * capped + casts + 8, 6 * c + 7 * c * capped + casts + 24
        byte_time = self._scores * self.assumptions.flops_per_byte
        return 2 * products + EAGER_TIME[0] * forward * byte_time, 4 * products + EAGER_TIME[1] * backward * byte_time

    # -- a step ------------------------------------------------------------------------------------------------------

    @property
    def head_parameters(self) -> int:
        return self.model.vocab * self.model.hidden

    def predict(self, levels: Sequence[str]) -> Prediction:
        """The Prediction of a step with these levels, first layer first."""
        levels = tuple(levels)
        if len(levels) != self.model.layers:
            raise ValueError(f"{self.model.name} has {self.model.layers} layers, got {len(levels)} levels")
        assumed, layer, engine = self.assumptions, self.layer, self.engine
        size, parameters, shards = assumed.dtype_bytes, self.parameters, assumed.shards
        trained, master = parameters * assumed.trainable, 4 if engine.master and size < 4 else 0
        weights = parameters * size / (shards if engine.parameters else 1) + trained * master / shards
        state = trained * STATE_BYTES[assumed.optimizer] * (master or assumed.trained_bytes) / shards
        gradients = 0 if assumed.in_backward else trained * assumed.trained_bytes / (shards if engine.gradients else 1)
        resident = weights + engine.buffers + (gradients if engine.keeps_gradients else 0)
        peak = max(self._peak(levels, resident + state), weights + gradients + state)
        time = self.step_time(levels)
        speed = self.step_time(("keep",) * len(levels)) / time
        host = levels.count("offload") * layer.kept["full"]
        return Prediction(levels, int(peak) + WORKSPACE, speed, time / GEMM_RATE, host)

    @property
    def parameters(self) -> int:
        return self.model.layers * self.layer.parameters + self.head_parameters * (1 if self.model.tied else 2)

    def _peak(self, levels: tuple[str, ...], resident: float) -> float:
        """The peak bytes from the loss to the end of backward."""
        assumed, layer, m, engine = self.assumptions, self.layer, self.model, self.engine
        size = assumed.trained_bytes / (assumed.shards if engine.gradients else 1) * assumed.trainable
        size = 0 if assumed.in_backward or engine.keeps_gradients else size
        stream = self.tokens * m.hidden * assumed.compute_bytes
        head = self.head_parameters * (assumed.trainable == 1)
        head_grad, last_grad, gathered = head * size, 0 if m.tied else head * size, 0
        if assumed.shards > 1 and engine.gathered:
            resident += min(engine.gathered, self.parameters) * assumed.compute_bytes
        elif assumed.shards > 1 and engine.parameters:  # the root's parameters and gradients stay whole
            whole = self.parameters - m.layers * layer.parameters
            resident += whole * assumed.compute_bytes
            head_grad, last_grad = head * assumed.compute_bytes, whole * assumed.compute_bytes * (head > 0)
            gathered = layer.parameters * assumed.compute_bytes
        masks = self._masks if {*CHECKPOINTED} & {*levels} else 0
        alive = resident + masks + sum(layer.kept[level] for level in levels)
        most = alive + 2 * stream + self.head  # the last norm's input and output
        alive += head_grad
        for index, level in reversed([*enumerate(levels)]):
            no_copy = stream if level == "offload" and not index else 0  # the first layer's backward copies no input
            most = max(most, alive + layer.transient[level] + gathered - no_copy)
            alive += layer.parameters * size - layer.kept[level]
        return max(most, alive + last_grad)

    def _head(self) -> int:
        """Bytes of the loss head: one chunk's logits and the gradients, or all logits with softmax's copies."""
        m, assumed = self.model, self.assumptions
        if not assumed.fused_loss:
            return self.tokens * m.vocab * (2 * assumed.compute_bytes + 4)
        from ..kernels.heads.linear_head import plan_chunks

        trains = assumed.trainable == 1
        chunks = plan_chunks(self.tokens, m.hidden, m.vocab, assumed.compute_bytes, gradients=trains, with_targets=True)
        weight = m.vocab * m.hidden * (4 if chunks.wide else assumed.compute_bytes) if trains else 0
        return chunks.rows * m.vocab * assumed.compute_bytes + weight + self.tokens * m.hidden * assumed.compute_bytes

    def _rest(self) -> float:
        """Time outside the decoder layers: the loss head and the optimizer."""
        assumed = self.assumptions
        size = max(assumed.trained_bytes, 4 * self.engine.master)
        least = BANDWIDTH / ADAM_RATE if assumed.optimizer in ("adamw", "adam") else 0  # bytes in Adam's compute time
        update = max(size * (3 + 2 * STATE_BYTES[assumed.optimizer]), least) * self.parameters * assumed.trainable
        sent = self.parameters * assumed.compute_bytes * self.engine.passes * (assumed.shards > 1)
        logits = 2 * self.tokens * self.model.vocab * assumed.compute_bytes  # read, and their gradient written
        moved = update / assumed.shards + logits + sent * BANDWIDTH / self.engine.link
        return (4 + 2 * assumed.trainable) * self.tokens * self.head_parameters + moved * assumed.flops_per_byte

    def step_time(self, levels: Sequence[str]) -> float:
        """Time of a step with these levels, in FLOPs of a GEMM."""
        # no computation hides backward's first copy from the host
        first_copy = ("offload" in levels) * self.layer.kept["full"] * HOST_BYTE_TIME * self.assumptions.flops_per_byte
        return sum(self.layer.time + self.layer.extra[level] for level in levels) + first_copy + self._rest()

    def float8_gain(self) -> float:
        """Speed of a step at `keep` in FP8, relative to bf16."""
        both = (replace(self.assumptions, float8=on) for on in (False, True))
        planners = (Planner(self.model, self.batch, self.seq, assumed) for assumed in both)
        plain, float8 = (planner.step_time(["keep"] * self.model.layers) for planner in planners)
        return plain / float8

    # -- choosing ----------------------------------------------------------------------------------------------------

    def pure(self) -> list[Prediction]:
        """The prediction for each of `LEVELS`."""
        return [self.predict(level_of_each(level, self.model.layers)) for level in LEVELS]

    def best(self, budget: int, host: float = math.inf) -> Prediction:
        """The fastest mix whose peak is at most `budget` bytes, with at most `host` bytes of host memory.

        A mix has two levels, since each further level of `LEVELS` costs more time for a byte saved. The first layers
        get the level that keeps less: their backward runs last, when gradients fill the memory. With eager attention
        EAGER_MARGIN stays free if any mix leaves it. Raises `ValueError` if no mix fits.
        """
        count = self.model.layers
        useful = {"mlp": self.projects_again, "tiled": not self.model.experts}  # else as cheap, as full
        levels = [level for level in LEVELS if useful.get(level, True)]
        pairs = [(low, high) for i, high in enumerate(levels) for low in levels[i + 1 :]]
        mixes = [(low,) * n + (high,) * (count - n) for low, high in pairs for n in range(count + 1)]
        mixes += [(*mix[:-1], LAST[mix[-1]]) for mix in mixes if mix[-1] in LAST]
        # in a fixed order, so that all ranks choose the same among equally good mixes
        predictions = [one for mix in dict.fromkeys(mixes) if (one := self.predict(mix)).host <= host]
        room = budget * (1 - EAGER_MARGIN) if self.attention == "eager" else budget
        least = min(predictions, key=lambda one: (one.peak, one.host))
        fitting = [one for one in predictions if one.peak <= room] or ([least] if least.peak <= budget else [])
        if not fitting:
            raise ValueError(
                f"{self.model.name} at {self.batch} x {self.seq} needs {least.peak / 2**30:.1f} GiB even with "
                f"{in_words(least.levels)}, and {budget / 2**30:.1f} GiB are to be used; make the batch or the "
                "sequence smaller, shard the model, or train fewer of its parameters"
            )
        return max(fitting, key=lambda one: (one.speed, -one.peak, -one.host))


def longest(planner_at: Callable[[int], Planner], budget: int, host: float = math.inf) -> Planner:
    """The planner of the longest sequence for which `best` finds a mix.

    planner_at: the planner of a sequence length. Raises `ValueError` if not even `SEQUENCE_STEP` tokens a device fit.
    """
    step = SEQUENCE_STEP * planner_at(SEQUENCE_STEP).assumptions.sequence

    def too_long(steps: int) -> bool:
        try:
            planner_at(steps * step).best(budget, host)
        except ValueError:
            return True
        return False

    planner_at(step).best(budget, host)  # raises if nothing fits
    return planner_at(step * bisect.bisect(range(1, LONGEST_SEQUENCE // SEQUENCE_STEP), False, key=too_long))


def usable(device: "torch.device") -> int:
    """Bytes of a device's memory that a plan may use: 96%, which leaves room for driver and fragmentation."""
    import torch

    if device.type == "cpu":
        raise ValueError("activations='fit' plans for an accelerator's memory and the model is on the CPU; name a size")
    return int(0.96 * torch.get_device_module(device).mem_get_info(device)[1])


def check_parameters(planner: Planner, counts: Sequence[int], layers: int) -> None:
    """Raise `ValueError` if a model's number of parameters is not the planner's.

    counts: the number with and without adapters; layers: number of decoder layers counted, 0 for the whole model
    """
    planned = layers * planner.layer.parameters or planner.parameters
    count = min(counts, key=lambda one: abs(one - planned))
    experts = (layers or planner.model.layers) * planner.mlp_parameters if planner.model.experts else 0
    if abs(planned - count) > UNCOUNTED_SHARE * (planned - experts):
        raise ValueError(
            f"{planner.model.name}: the planner knows decoders whose layers are like Llama's, Qwen3's, Gemma's or "
            f"Mixtral's, which of these sizes have {planned:,} parameters, and this model has {count:,}; name a level "
            "(cheap, mlp, full), or one for each layer, instead"
        )


def model_named(name: str) -> models.Model:
    """The Model of a name. Raises `ValueError` for one that the planner does not model."""
    model = models.find(name)
    Planner(model, 1, 1)  # before a model of a billion layers is built to count its parameters
    if (source := models.on_meta(name)) is not None:
        config = source.config.to_dict()  # includes the family's defaults
        model = models.with_layers_of(models.from_config(config, model.name), source)
        check_parameters(Planner(model, 1, 1), [sum(p.numel() for p in source.parameters())], 0)
    return model


def of_module(
    source: "torch.nn.Module", config: Any, batch: int, seq: int, compute_bytes: int | None = None
) -> Planner:
    """A Planner for a live transformers model, or one of its layers: shape from the config, the rest from `source`.

    Raises `ValueError` for a model without a config, or sharded by FSDP1 or tensor parallelism, or not modelled.
    """
    import torch

    if config is None:
        raise ValueError("activations: planning reads a transformers config, and this model has none; name a level")
    parameters = list(source.parameters())
    engine, shards = _sharding(source, parameters)
    shape = models.with_layers_of(models.from_config(config.to_dict(), type(source).__name__), source)
    count = [getattr(p, "ds_numel", p.numel()) for p in parameters]  # under ZeRO-3 a parameter is empty
    trained = sum(n for n, p in zip(count, parameters) if p.requires_grad) / max(1, sum(count))
    size = max(((n, p.element_size()) for n, p in zip(count, parameters) if p.element_size() > 1), default=(0, 2))[1]
    wider = any(p.requires_grad and p.element_size() > size for p in parameters)
    kind = parameters[0].device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    implementation = str(getattr(config.get_text_config(), "_attn_implementation", None) or "")
    attention = implementation if implementation == "eager" else ""
    if implementation == "sdpa":
        attention = "masked" if 0 < shape.window <= seq else "flash"  # transformers passes no softcap to sdpa
    elif "flash" in implementation or "flex" in implementation:
        attention = "flash"
    elif attention and any(name.endswith("sinks") for name, _ in source.named_parameters()):
        raise ValueError(f"{shape.name}: the planner does not know eager attention with sinks; choose flex_attention")
    facts = {"dtype_bytes": size, "compute_bytes": compute_bytes or size, "shards": shards, "engine": engine}
    facts["adapters"] = "model" if not wider else "autocast" if autocast else "fp32"
    facts["float8"] = any(hasattr(module, "float8") for module in source.modules())
    planner = Planner(shape, batch, seq, Assumptions(**facts, trainable=trained, attention=attention))
    counts = sum(count), round(sum(count) * (1 - trained))
    check_parameters(planner, counts, 0 if hasattr(source, "get_input_embeddings") else 1)
    return planner


def _sharding(source: "torch.nn.Module", parameters: "list[torch.nn.Parameter]") -> tuple[str, int]:
    """(engine of `ENGINES` that shards a live model's state, number of devices)"""
    from ..distributed.owners import FSDP2, ZERO3, fsdp2_shards, sharded_by

    owner = sharded_by(source)
    if owner == FSDP2:
        return "fsdp2", fsdp2_shards(source)
    if owner == ZERO3:
        return "zero3", next(p.ds_process_group.size() for p in parameters if hasattr(p, "ds_process_group"))
    if owner:
        words = f"'fit' and sizes count the bytes of FSDP2 and ZeRO, and this model is sharded by {owner}"
        raise ValueError(f"activations: {words}; name a level (cheap, mlp, full), or one for each layer")
    for p in parameters:
        if (optimizer := getattr(p, "_zero_optimizer", None)) is not None:  # DeepSpeed's, at stage 1 or 2
            return "zero2" if optimizer.partition_gradients else "zero1", p._dp_group.size()
    return "fsdp2", 1
