"""Mistakes that people make with the losses: the message says what the arguments look like and what to do."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import few_sizes, make

from liger_hw import registry
from liger_hw.chunked_loss import LigerFusedLinearDPOLoss
from liger_hw.runtime import checks
from liger_hw.transformers import LigerFusedLinearCrossEntropyLoss, LigerGroupNorm, LigerRMSNorm
from liger_hw.transformers.functional import (
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
    liger_fused_linear_jsd,
    liger_fused_linear_log_probs,
    liger_group_norm,
    liger_kl_div,
    liger_layer_norm,
    liger_modulated_rms_norm,
    liger_multi_token_attention,
    liger_rms_norm,
)

pytestmark = pytest.mark.cpu

X, WEIGHT, TARGET = torch.randn(6, 4), torch.randn(10, 4), torch.zeros(6, dtype=torch.int64)


def test_logits_of_a_batch_are_told_to_flatten():
    logits, labels = torch.randn(2, 3, 10), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"got \(2, 3, 10\); flatten .*: input.flatten\(0, -2\), target.flatten\(\)"):
        liger_cross_entropy(logits, labels)
    with pytest.raises(ValueError, match=r"flatten it: target.flatten\(\)"):
        liger_cross_entropy(logits.flatten(0, -2), labels)
    with pytest.raises(ValueError, match=r"input.flatten\(0, -2\), target.flatten\(0, -2\)"):
        liger_kl_div(logits, logits)
    with pytest.raises(ValueError, match=r"flatten the leading dimensions: input.flatten\(0, -2\)"):
        liger_fused_linear_cross_entropy(X.view(2, 3, 4), WEIGHT, labels)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", sorted(registry.ops()))
def test_a_nested_tensor_is_named_wherever_it_stands(name, layout):
    op = registry.get_op(name)
    sample = make(op, few_sizes(op), torch.float32, "cpu", 0)
    places = [i for i, a in enumerate(sample.args) if isinstance(a, torch.Tensor) and a.dim()]
    for place in places:
        given = sample.args[place].detach()
        nested = torch.nested.nested_tensor([given[:1], given], layout=layout)
        with pytest.raises(ValueError, match=f"^liger_{name}: .* nested tensor"):
            op.function(*(nested if i == place else a for i, a in enumerate(sample.args)), **sample.kwargs)
    assert places


def test_swapped_input_and_weight_are_recognised():
    """LigerFusedLinearCrossEntropyLoss takes the weight first, its function the input."""
    with pytest.raises(ValueError, match="are input and weight, or rows and classes, swapped"):
        LigerFusedLinearCrossEntropyLoss()(X, WEIGHT, TARGET)
    with pytest.raises(ValueError, match="input and weight are swapped"):
        LigerFusedLinearCrossEntropyLoss()(X.view(2, 3, 4), WEIGHT, TARGET)
    with pytest.raises(ValueError, match="weight is transposed, pass weight.T"):
        liger_fused_linear_cross_entropy(X, WEIGHT.T, TARGET)
    with pytest.raises(ValueError, match=r"got \(6, 4\); X and W are swapped"):
        liger_rms_norm(torch.ones(4), X, 1e-6)
    with pytest.raises(ValueError, match=r"got \(6, 4\); X and W are swapped"):
        liger_layer_norm(torch.ones(4), X, None, 1e-6)
    pairs, ids = X.view(2, 3, 4), TARGET.view(2, 3)
    with pytest.raises(ValueError, match="_input and lin_weight are swapped"):
        LigerFusedLinearDPOLoss(use_ref_model=False)(pairs, WEIGHT, ids)


def test_an_argument_that_changes_nothing_is_said_once(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    with pytest.warns(UserWarning, match="LigerFusedLinearDPOLoss: chunk_size is accepted and changes nothing"):
        LigerFusedLinearDPOLoss(chunk_size=4)
    with pytest.warns(UserWarning, match="LigerRMSNorm: row_mode"):
        LigerRMSNorm(4, row_mode=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LigerFusedLinearDPOLoss(chunk_size=4)
        LigerFusedLinearDPOLoss()
        LigerRMSNorm(4, row_mode=True)


@pytest.mark.parametrize("how", [{}, {"padding": 1, "dilation": 3}, {"padding": (1, 0)}])
def test_a_kernel_larger_than_the_scores_is_refused_by_name(how):
    with pytest.raises(ValueError, match=r"liger_multi_token_attention: a kernel of \(3, 3\) spans"):
        liger_multi_token_attention(torch.randn(1, 2, 2, 2), torch.randn(2, 2, 3, 3), **how)
    assert liger_multi_token_attention(torch.randn(1, 2, 2, 2), torch.randn(2, 2, 3, 3), padding=1).shape[2:] == (2, 2)


def test_modulated_rms_norm_refuses_a_scalar():
    with pytest.raises(ValueError, match=r"^liger_modulated_rms_norm: X must be \[..., n\], got \(\)"):
        liger_modulated_rms_norm(torch.tensor(1.0), None, torch.ones(4), None)


@pytest.mark.parametrize("several", [torch.ones(6), torch.ones(6).numpy()], ids=["tensor", "array"])
def test_several_numbers_where_one_is_wanted_are_named(several):
    """A temperature for each row, smoothing for each class."""
    with pytest.raises(TypeError, match=r"^liger_fused_linear_log_probs: temperature must be one number, .* \(6,\)"):
        liger_fused_linear_log_probs(X, WEIGHT, TARGET, temperature=several)
    with pytest.raises(TypeError, match=r"^liger_cross_entropy: label_smoothing must be one number, .* \(6,\)"):
        liger_cross_entropy(X, TARGET, label_smoothing=several)


def test_an_infinite_temperature_is_refused():
    with pytest.raises(ValueError, match="^liger_fused_linear_jsd: temperature must be positive and finite, got inf"):
        liger_fused_linear_jsd(X, WEIGHT, X, WEIGHT, temperature=float("inf"))


def test_a_tensor_of_one_element_is_a_number():
    one = torch.ones(1)
    assert torch.equal(liger_cross_entropy(X, TARGET, softcap=one), liger_cross_entropy(X, TARGET, softcap=1.0))


def test_group_norm_refuses_a_count_that_is_no_integer():
    """channels / 4 is a float."""
    with pytest.raises(TypeError, match="^liger_group_norm: num_groups must be an integer, got 2.0"):
        liger_group_norm(torch.randn(2, 8, 4), None, None, 8, 8 / 4, 1e-6)
    with pytest.raises(TypeError, match="^LigerGroupNorm: num_channels must be an integer, got 8.0"):
        LigerGroupNorm(8.0, 4)
    with pytest.raises(TypeError, match="^LigerGroupNorm: eps must be a number, got str"):
        LigerGroupNorm(8, 4, "1e-5")
