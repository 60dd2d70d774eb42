"""One arm's training: the text, the model from a seed, the loop, and what was measured. Nothing in here knows liger_hw.

Every arm sees the same windows of text in the same order, starts from the same weights (checked, see `Run.start`) and
takes the same optimizer steps, so that two arms may differ only by what was patched in before the model was built.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from .. import UsageError

if TYPE_CHECKING:
    import torch
LR_WARMUP = 10
"""Steps of linear warm-up. Without it a big model's first steps spike, and a spike multiplies rounding: on an H200 with
`7b-16l` at 1e-4, both patched arms were 0.003 from Hugging Face at step 7, and liger-kernel 0.1 and liger_hw 0.2 at the
spike of step 8."""


@dataclass(frozen=True)
class Size:
    """A model and batch. `vocab` 256 reads text byte by byte; 32768 reads it in pairs of bytes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 256
    batch: int = 8
    seq: int = 128
    steps: int = 80
    learning_rate: float = 1e-3
    checkpointing: bool = False


SIZES = {
    "tiny": Size(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=160, batch=2, seq=48, steps=12),
    "small": Size(hidden=192, layers=4, heads=6, kv_heads=2, intermediate=512),
    # Mistral-7B's layers, sixteen of them: the shape in which the field publishes its end-to-end figures.
    "7b-16l": Size(
        hidden=4096,
        layers=16,
        heads=32,
        kv_heads=8,
        intermediate=14336,
        vocab=32768,
        batch=4,
        seq=4096,
        steps=30,
        learning_rate=3e-5,
        checkpointing=True,
    ),
}


@dataclass
class Run:
    """One arm trained once. Times are seconds a step without the warm-up steps; memory is bytes, None if unknown.

    start: fingerprint of the initial weights; grad_norms: gradient norm of each parameter at the first step
    """

    losses: list[float]
    grad_norms: dict[str, float]
    start: float
    step_seconds: list[float]
    tokens_per_step: int
    peak_memory: int | None

    @property
    def tokens_per_second(self) -> float:
        """0 where every step was warm-up."""
        return self.tokens_per_step / statistics.median(self.step_seconds) if self.step_seconds else 0.0


def read_text(path: str | None) -> bytes:
    """The training text: a file, or Python's own documentation as every interpreter carries it (about 470 kB).

    Raises `UsageError` when it cannot be read.
    """
    if path is not None:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read --text {path}: {error.strerror}") from None
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError("demo: this Python carries no pydoc_data.topics; give a text with --text FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def to_tokens(text: bytes, vocab: int) -> "torch.Tensor":
    """Bytes as token ids. For a vocabulary of 32768: pairs of bytes, 7 bits of the first and 8 of the second.

    English text is ASCII, so a pair is one token and back again; the ids spread over the vocabulary as words do.
    """
    import torch

    if not text:
        raise UsageError("demo: the text is empty; name a file with some kilobytes of text with --text")
    bytes_ = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    if vocab == 256:
        return bytes_
    pairs = bytes_[: bytes_.numel() // 2 * 2].view(-1, 2)
    return (pairs[:, 0] & 0x7F) << 8 | pairs[:, 1]


def build_model(size: Size, seed: int, dtype: "torch.dtype", device: "torch.device", attention: str) -> Any:
    """A `MistralForCausalLM` with random weights drawn from `seed`, made on the device itself."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=max(4096, size.seq),
        sliding_window=None,
        use_cache=False,
        attn_implementation=attention,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = MistralForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train()
    if size.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def train(
    size: Size,
    text: "torch.Tensor",
    *,
    seed: int,
    dtype: "torch.dtype",
    device: "torch.device",
    attention: str = "sdpa",
    on_step: Callable[[int, Callable[[], float]], None] = lambda step, loss: None,
) -> Run:
    """Train `size.steps` steps and return what was seen. `text` holds token ids on `device`.

    `on_step(step, loss)` is called after each step; calling `loss()` reads the step's loss, which waits for the device.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(text.numel() - size.seq, (size.steps, size.batch), generator=generator).to(device)
    columns = torch.arange(size.seq, device=device)
    memory = _PeakMemory(device)
    model = build_model(size, seed, dtype, device, attention)
    parameters = dict(model.named_parameters())
    start = float(sum(p.detach().sum(dtype=torch.float64).abs() for p in parameters.values()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, fused=True)
    losses = torch.zeros(size.steps, dtype=torch.float32, device=device)
    clock = _Clock(device)
    grad_norms: dict[str, float] = {}
    warmup = min(5, max(1, size.steps // 4))
    try:
        for step in range(size.steps):
            if step >= warmup:
                clock.mark()
            tokens = text[rows[step, :, None] + columns]
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            losses[step] = loss.detach()
            if step == 0:
                grad_norms = _norms(parameters)
            for group in optimizer.param_groups:
                group["lr"] = size.learning_rate * min(1.0, (step + 1) / LR_WARMUP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            on_step(step, losses[step].item)
        clock.mark()
        return Run(
            losses=losses.tolist(),
            grad_norms=grad_norms,
            start=start,
            step_seconds=clock.intervals(),
            tokens_per_step=size.batch * size.seq,
            peak_memory=memory.read(),
        )
    finally:
        optimizer.zero_grad(set_to_none=True)
        del model, optimizer, parameters


def _norms(parameters: dict[str, Any]) -> dict[str, float]:
    import torch

    named = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not named:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in named.values()])
    return dict(zip(named, norms.tolist()))


class _Clock:
    """Marks in the device's own time, read only at the end, so that timing a step does not wait for it."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self.module = None if device.type == "cpu" else torch.get_device_module(device)
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.module is None:
            self.marks.append(time.perf_counter())
            return
        event = self.module.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def intervals(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:]))
        if self.module is None:
            return [after - before for before, after in pairs]
        self.module.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


class _PeakMemory:
    """Peak memory from here to `read()`: the device allocator's, or on Linux the process's resident set.

    On a device without what is held already: an earlier arm's libraries keep some megabytes that are not this arm's.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch

        gc.collect()
        self.module = None if device.type == "cpu" else torch.get_device_module(device)
        if self.module is not None:
            self.module.synchronize()
            self.module.empty_cache()
            self.module.reset_peak_memory_stats()
            self.held = self.module.memory_allocated()
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # hand the last arm's memory back, or this arm inherits its peak
        self.resettable = False
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
            self.resettable = True

    def read(self) -> int | None:
        if self.module is not None:
            return self.module.max_memory_allocated() - self.held
        if not self.resettable:
            return None  # ru_maxrss cannot fall, so it would charge an arm with an earlier arm's peak
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else None
