"""Every option of every loss is tried: most by the option sets that the shared tests run, the others here."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from harness import few_sizes, make, verify

from liger_hw import registry
from liger_hw.kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_hw.kernels.losses.cross_entropy import liger_cross_entropy
from liger_hw.kernels.losses.kl_div import liger_kl_div

LOSSES = [name for name in registry.ops() if name.endswith(("cross_entropy", "jsd", "kl_div", "tvd"))]
SAMPLED = {
    "weighted": ("weight", "ce_weight"),
    "biased": ("bias",),
    "labelled": ("shift_labels",),
    "select": ("selected_token_ids",),
}
"""A sample's own option -> the argument that it makes."""
ELSEWHERE = {
    "ignore_index": "test_another_ignore_index",
    "size_average": "test_torchs_old_names_of_reductions",
    "reduce": "test_torchs_old_names_of_reductions",
    "chunk_mem_const": "test_a_multiple_of_the_budget_makes_larger_chunks",
    "compact": "test_losses_compaction",
    "tp_group": "test_losses_vocab_parallel",
}
"""Arguments that no option set has, and what tries them."""
UNLABELLED = ("jsd", "tvd", "fused_linear_jsd", "fused_linear_kl_div")
"""Losses that take labels only when asked to."""


@pytest.mark.cpu
@pytest.mark.parametrize("name", LOSSES)
def test_every_option_is_tried(name):
    op = registry.get_op(name)
    keywords = {p.name for p in inspect.signature(op.function).parameters.values() if p.default is not p.empty}
    tried = {option for options in op.options for option in options}
    tried |= {argument for option in tried & SAMPLED.keys() for argument in SAMPLED[option]}
    assert keywords - tried <= ELSEWHERE.keys()


@pytest.mark.parametrize("ignored", [2, 1 << 40])
@pytest.mark.parametrize("name", [n for n in LOSSES if n != "kl_div"])
def test_another_ignore_index(lane, name, ignored, seed):
    """A class of the vocabulary, and a number outside of it."""
    op = registry.get_op(name)
    options = next(o for o in op.options if "labelled" in o or name not in UNLABELLED)
    options = {k: v for k, v in options.items() if k not in ("ignore_index", "ignored")}
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed, options)
    bound = inspect.signature(op.function).bind(*sample.args, **sample.kwargs)
    label = "target" if bound.arguments.get("shift_labels") is None else "shift_labels"
    labels = bound.arguments[label].clone()
    labels[labels == 2] = 3
    labels[:2] = -100
    bound.arguments[label], bound.arguments["ignore_index"] = labels.masked_fill(labels == -100, ignored), ignored
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    again = registry.Sample((), arguments, sample.reduction, sample.grad_reduction)
    again.args = tuple(arguments.pop(p) for p in list(arguments)[: len(sample.args)])
    verify(op, again, seed)


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size_average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
def test_torchs_old_names_of_reductions(generator, size_average, reduce):
    """size_average and reduce mean what they mean in torch; kl_div's defaults of both are True, as Liger's."""
    x = torch.randn(5, 7, generator=generator).requires_grad_()
    target = torch.tensor([1, 0, 6, 3, 2])
    old = {"size_average": size_average, "reduce": reduce}
    torch.testing.assert_close(liger_cross_entropy(x, target, **old), F.cross_entropy(x, target, **old))
    given = {k: v for k, v in old.items() if v is not None}
    log_q = x.log_softmax(-1)
    p = torch.randn(5, 7, generator=generator).softmax(-1)
    expected = F.kl_div(log_q, p, size_average=given.get("size_average", True), reduce=given.get("reduce", True))
    torch.testing.assert_close(liger_kl_div(log_q, p, **given), expected)


@pytest.mark.lanes("interpret", "gpu")
def test_a_multiple_of_the_budget_makes_larger_chunks(lane, generator, monkeypatch, set_env):
    """chunk_mem_const: twice the memory, half the chunks, the same results."""
    from liger_hw.kernels.heads import linear_head
    from liger_hw.kernels.heads.linear_head import sweep

    heights = []

    def seen(chunks, *args, **kwargs):
        heights.append(chunks.rows)
        return sweep(chunks, *args, **kwargs)

    monkeypatch.setattr("liger_hw.kernels.heads.fused_linear_cross_entropy.sweep", seen)
    monkeypatch.setattr(linear_head, "MIN_ROWS", 8)
    monkeypatch.setattr(linear_head, "STEP", 8)
    set_env("LIGER_HW_LOSS_MEMORY_MIB", 1)
    x, weight = torch.randn(256, 16, generator=generator), torch.randn(3000, 16, generator=generator)
    target = torch.randint(3000, (256,), generator=generator).to(lane.device)
    found = []
    for scale in (1, 2):
        leaves = [t.to(lane.device, copy=True).requires_grad_() for t in (x, weight)]
        loss = liger_fused_linear_cross_entropy(*leaves, target, chunk_mem_const=scale)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    assert heights[1] >= 2 * heights[0] >= 16
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
