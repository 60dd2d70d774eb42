"""Experts in a `ModuleList`, as in transformers 4: the loop is left alone with a reason, dense parts are patched."""

from __future__ import annotations

import families as verify
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import liger_hw
from liger_hw.transformers.tiny import tiny_model

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 11, 16, 24, 5, 2
LEFT_ALONE = "left alone: its experts are modules in a list, as in transformers 4"


class ExpertMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
        self.out = nn.Linear(INNER, HIDDEN)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.out(self.act(self.two(x)) * self.one(x))


class Block(nn.Module):
    """A router, a loop over experts and a shared expert in one forward; returns the router's logits too."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([ExpertMLP() for _ in range(EXPERTS)])
        self.shared = ExpertMLP()

    def forward(self, rows):
        logits = self.router(rows)
        share, chosen = torch.topk(logits.softmax(-1), TOP_K, dim=-1)
        total = torch.zeros_like(rows)
        hits = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            choice, token = torch.where(hits[number])
            total.index_add_(0, token, self.experts[number](rows[token]) * share[token, choice, None])
        return total + self.shared(rows), logits


def test_the_loop_stays_and_each_expert_s_gate_is_replaced():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    expected, _ = block(x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    with verify.counted() as calls, liger_hw.patch(block, fused_linear_cross_entropy=False) as report:
        found, _ = block(x)
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
    (row,) = [row for row in report.rows if row.part == "experts"]
    assert row.where == "Block.forward" and row.state.startswith(LEFT_ALONE)
    assert calls["swiglu"] == EXPERTS + 1 and not calls["fused_moe"]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)


def test_the_keyword_experts():
    report = liger_hw.patch(Block(), experts=False, fused_linear_cross_entropy=False)
    assert {row.part for row in report.rows} == {"swiglu"}


# -- transformers 4 --------------------------------------------------------------------------------------------------

FAMILIES = [
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM"),
    *("FlexOlmoForCausalLM", "Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration", "HunYuanMoEV1ForCausalLM"),
    *("LongcatFlashForCausalLM", "MiniMaxForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "PhimoeForCausalLM"),
    *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"),
]
needs_4 = pytest.mark.skipif(
    not transformers.__version__.startswith("4."), reason="transformers 5 has batched experts; lane transformers4"
)


@needs_4
@pytest.mark.parametrize("scope", ["model", "class"])
@pytest.mark.parametrize("name", FAMILIES)
def test_dense_parts_of_every_family_of_transformers_4(name, scope):
    row = verify.check_step(name, name, classes=scope == "class")
    assert row.outcome == verify.VERIFIED, row.reason
    assert row.calls.get("fused_linear_cross_entropy") and not row.calls.get("fused_moe")
    assert row.calls.keys() & {"rms_norm", "layer_norm"} or (name, scope) == (
        "PhimoeForCausalLM",
        "class",
    )  # torch's LayerNorm: in new models
    assert any(LEFT_ALONE.removeprefix("left alone: ") in reason for reason in row.left), row.left


@needs_4
@pytest.mark.parametrize(
    ("name", "experts"),
    [("GptOssForCausalLM", "GptOssExperts"), ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeTextExperts")],
)
def test_the_report_names_routing_weights_of_every_expert(name, experts):
    """It said "Class values must be smaller than num_classes", from inside the model's own one_hot."""
    report = liger_hw.patch(tiny_model(getattr(transformers, name)), fused_linear_cross_entropy=False)
    rows = [row for row in report.rows if row.where.startswith(experts) and row.kernel == "fused_moe"]
    assert rows
    for row in rows:
        assert "its routing weights are [tokens, experts], as in transformers 4" in row.state, str(report)
