"""Fused linear cross entropy with ignored rows left out of its products: the same results, by fewer of them."""

from __future__ import annotations

import pytest
import torch
from harness import make, run, verify

from liger_hw import CountedRows
from liger_hw.kernels.heads.fused_linear_cross_entropy import OP, liger_fused_linear_cross_entropy
from liger_hw.kernels.heads.linear_head import sweep

SIZES = (40, 9, 37)
OPTIONS = [
    {},
    {"biased": True, "weighted": True, "label_smoothing": 0.1, "return_predicted_tokens": True},
    {"reduction": "sum", "lse_square_scale": 1e-3, "return_z_loss": True, "return_token_accuracy": True},
    {"reduction": "none", "biased": True, "return_token_accuracy": True, "return_predicted_tokens": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_same_results(lane, dtype, options, seed):
    verify(OP, make(OP, SIZES, dtype, lane.device, seed, {**options, "ignored": 0.6, "compact": True}), seed)


@pytest.mark.lanes("interpret")
def test_fewer_rows_are_multiplied(lane, seed, monkeypatch):
    rows = []
    monkeypatch.setattr(
        "liger_hw.kernels.heads.fused_linear_cross_entropy.sweep",
        lambda chunks, *a, **k: (rows.append(sum(e - s for s, e in chunks.bounds)), sweep(chunks, *a, **k))[1],
    )
    sample = make(OP, SIZES, torch.float32, lane.device, seed, {"ignored": 0.6, "compact": True})
    target = sample.args[2]
    run(OP.function, sample, seed)
    assert rows == [int((target != -100).sum())] and rows[0] < SIZES[0]


def test_a_count_made_earlier_of_other_labels(lane, seed):
    """Counted from labels of which the loss ignores a few more, as a patched model does; never from too few."""
    sample = make(OP, SIZES, torch.float32, lane.device, seed, {"ignored": 0.5})
    x, weight, target = sample.args[:3]
    counted = CountedRows(target)
    fewer = target.clone()
    fewer[:7] = -100
    found = liger_fused_linear_cross_entropy(x, weight, fewer, compact=counted)
    torch.testing.assert_close(found, liger_fused_linear_cross_entropy(x, weight, fewer))
    if lane.name == "interpret":
        with pytest.raises(RuntimeError, match="fewer rows are ignored than in the labels"):
            liger_fused_linear_cross_entropy(x, weight, target, compact=CountedRows(fewer))


def test_another_ignore_index_is_not_compacted(lane, seed):
    sample = make(OP, SIZES, torch.float32, lane.device, seed, {"ignored": 0.0})
    x, weight, target = sample.args[:3]
    counted = CountedRows(torch.full_like(target, -100))  # of -100, where the loss ignores 3
    found = liger_fused_linear_cross_entropy(x, weight, target, ignore_index=3, compact=counted)
    torch.testing.assert_close(found, liger_fused_linear_cross_entropy(x, weight, target, ignore_index=3))


@pytest.mark.gpu
def test_inside_a_captured_graph_every_row_is_computed(gpu, seed):
    sample = make(OP, SIZES, torch.bfloat16, gpu, seed, {"ignored": 0.6})
    expected = run(OP.function, sample, seed)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(OP.function, sample, grads=expected.incoming)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    sample.kwargs["compact"] = True
    with torch.cuda.graph(graph):
        captured = run(OP.function, sample, grads=expected.incoming)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured.bits(), expected.bits(), rtol=0, atol=0)


def test_compact_must_be_a_count(lane, seed):
    sample = make(OP, SIZES, torch.float32, lane.device, seed)
    with pytest.raises(ValueError, match="compact must be a bool or a CountedRows"):
        liger_fused_linear_cross_entropy(*sample.args[:3], compact=17)
