"""Tests that need a GPU: no host synchronisation, graph capture, streams, the fast launcher, offsets past int32."""

from __future__ import annotations

import math

import pytest
import torch
from harness import (
    Result,
    changed,
    check,
    checked_inputs,
    few_sizes,
    forward,
    make,
    misaligned,
    output_grads,
    real_sizes,
    run,
    tensors,
)

from liger_hw import registry

pytestmark = [pytest.mark.unpoisoned]
ON_GPU = pytest.mark.lanes("gpu")


def _cuda(lane) -> str:
    if torch.device(lane.device).type != "cuda":
        pytest.skip(f"torch has this check for its cuda device type only, not for {lane.device}")
    return lane.device


@ON_GPU
def test_no_host_synchronisation(lane, case, seed):
    op, options = case
    sample = make(op, few_sizes(op), torch.bfloat16, _cuda(lane), seed, options)
    grads = run(op.function, sample, seed).incoming  # compiles and fills the caches
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op.function, sample, grads=grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ON_GPU
def test_graph_capture(lane, case, seed):
    """Forward and backward captured once, replayed on new values, give what eager gives on them."""
    op, options = case
    sample = make(op, few_sizes(op), torch.bfloat16, _cuda(lane), seed, options)
    grads = output_grads(forward(op.function, sample), seed)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(op.function, sample, grads=grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(op.function, sample, grads=grads)
    other = make(op, few_sizes(op), torch.bfloat16, lane.device, seed + 1, options)
    with torch.no_grad():
        for old, new in zip(tensors((sample.args, sample.kwargs)), tensors((other.args, other.kwargs))):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(
        captured.bits(), run(op.function, sample, grads=grads).bits(), rtol=0, atol=0, equal_nan=True
    )


@ON_GPU
def test_other_stream(lane, op, seed):
    sample = make(op, few_sizes(op), torch.bfloat16, lane.device, seed)
    expected = run(op.function, sample, seed)
    module = torch.get_device_module(torch.device(lane.device).type)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        found = run(op.function, sample, grads=expected.incoming)
    stream.synchronize()
    torch.testing.assert_close(found.bits(), expected.bits(), rtol=0, atol=0, equal_nan=True)


@ON_GPU
def test_fast_launcher_gives_the_same_bits(lane, case, seed, clean_registry, monkeypatch):
    """At sizes that share a compiled kernel and sizes that must not: 1, multiples of 16, odd, misaligned pointers."""
    op, options = case

    def all_of_them():
        found = []
        for rows in (1, 2, 16, 17, 48, 2, 17):
            sizes = (rows, *few_sizes(op)[1:])
            sample = make(op, sizes, torch.bfloat16, lane.device, seed, options)
            found += run(op.function, sample, seed).bits()
            found += run(op.function, changed(sample, misaligned), seed).bits()
        return found

    fast = all_of_them()
    monkeypatch.setenv("LIGER_HW_FAST_LAUNCH", "0")
    clean_registry.reload()
    torch.testing.assert_close(fast, all_of_them(), rtol=0, atol=0, equal_nan=True)


ELEMENTS = 2**31


@pytest.mark.memory(32, fused_add_rms_norm=42, vision_rope=42, fused_moe=113)  # measured on an H200
@ON_GPU
def test_offsets_past_int32(lane, op, seed):
    """With more than 2^31 elements in a tensor, the last rows, past 32-bit offsets, are right."""
    sizes = real_sizes(op)
    if op.name == "embedding":
        pytest.skip("its first tensor is a table: test_embedding.py has large ones")
    of_one = make(op, sizes, torch.bfloat16, lane.device, seed)
    with_rows = [of_one.args[0], *(t for t in tensors(of_one.args) if sizes[0] in t.shape[:2])]
    per_row = max(t.numel() for t in with_rows) // sizes[0]
    options = next((o for o in op.options if _rows_apart(op, o, lane.device)), None)
    count = math.ceil(ELEMENTS / per_row) + 3
    if options is None:  # a mean over rows, as many as make the factor to a mean over three rows exact
        count = 3 << math.ceil(count / 3).bit_length()
    sample = make(op, (count, *sizes[1:]), torch.bfloat16, lane.device, seed, options or {})
    rows = _rows(sample, count)
    for t in checked_inputs(sample):
        t.requires_grad_(rows in t.shape[:2])
    few, last = _of_last_three(sample, run(op.function, sample, seed), rows)
    del sample
    if options is None:
        gradients = [None if g is None else g * (rows / 3) for g in last.gradients]
        last = Result(run(op.function, few, grads=last.incoming).outputs, last.incoming, last.inputs, gradients)
    check(op, few, last)


@pytest.mark.memory(64)
@pytest.mark.parametrize("name", ["rope", "interleaved_rope", "qk_norm_rope", "llama4_rope", "qwen2vl_mrope"])
@ON_GPU
def test_positions_past_a_million(lane, name, seed):
    """The last tokens of a sequence of more than 2^20 positions and 2^31 elements are right."""
    op, tokens = registry.ops()[name], 2**20 + 5
    sample = make(op, (1, tokens, 17, 1, 128), torch.bfloat16, lane.device, seed)
    for t in checked_inputs(sample):
        t.requires_grad_(tokens in t.shape)  # weights have gradients of all tokens
    few, last = _of_last_three(sample, run(op.function, sample, seed), tokens)
    del sample
    check(op, few, last)


def _of_last_three(sample: registry.Sample, result: Result, rows: int) -> tuple[registry.Sample, Result]:
    """The sample and the result of the last three of its rows."""

    def last(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or rows not in t.shape:
            return t
        return t.narrow(t.shape.index(rows), rows - 3, 3).clone()

    few = changed(sample, last)
    outputs, incoming, gradients = (list(map(last, ts)) for ts in (result.outputs, result.incoming, result.gradients))
    return few, Result(outputs, incoming, checked_inputs(few), gradients)


def _rows_apart(op, options, device) -> bool:
    """Whether every output has a row for each row of the input."""
    sizes = few_sizes(op)
    sample = make(op, sizes, torch.bfloat16, device, 0, options)
    rows = _rows(sample, sizes[0])
    return all(rows in o.shape[:2] for o in forward(op.function, sample))


def _rows(sample, count) -> int:
    """The rows of a sample of `count`, in its first or second dimension."""
    return count if count in sample.args[0].shape[:2] else sample.args[0].shape[0]


@pytest.mark.multigpu
def test_second_device(op, seed):
    """Tensors on device 1 while device 0 is current: the launch follows the tensors."""
    kind = torch.accelerator.current_accelerator().type
    sample = make(op, few_sizes(op), torch.bfloat16, f"{kind}:0", seed)
    expected = run(op.function, sample, seed)
    there = changed(sample, lambda t: t.to(f"{kind}:1"))
    found = run(op.function, there, grads=[None if g is None else g.to(f"{kind}:1") for g in expected.incoming])
    for a, b in zip(found.bits(), expected.bits()):
        assert a.device.index == 1
        torch.testing.assert_close(a.to(b.device), b, rtol=0, atol=0, equal_nan=True)
