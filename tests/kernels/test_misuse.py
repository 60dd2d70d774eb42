"""Common mistakes: the error names the argument and says what to do."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from harness import few_sizes, make

from liger_hw import registry
from liger_hw.chunked_loss import LigerFusedLinearDPOLoss
from liger_hw.runtime import checks
from liger_hw.transformers import LigerFusedLinearCrossEntropyLoss, LigerGroupNorm, LigerMHC, LigerRMSNorm
from liger_hw.transformers.functional import (
    liger_attn_res,
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
    liger_fused_linear_jsd,
    liger_fused_linear_log_probs,
    liger_fused_neighborhood_attention,
    liger_group_norm,
    liger_kl_div,
    liger_layer_norm,
    liger_mhc_coeffs,
    liger_modulated_rms_norm,
    liger_multi_token_attention,
    liger_rms_norm,
)

X, WEIGHT, TARGET = torch.randn(6, 4), torch.randn(10, 4), torch.zeros(6, dtype=torch.int64)


def test_batched_logits_must_be_flattened():
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


@pytest.mark.parametrize("name", sorted(registry.ops()))
def test_a_flag_or_text_in_the_place_of_a_number_or_a_flag_is_named(name):
    """`unsqueeze_dim=True` is no axis. Text, as from a configuration file ("0.1", "no"), is neither converted nor taken
    for True."""
    op = registry.get_op(name)
    sample = make(op, few_sizes(op), torch.float32, "cpu", 0)
    bound = inspect.signature(op.function).bind(*sample.args, **sample.kwargs)
    bound.apply_defaults()
    for scalar, value in bound.arguments.items():
        if type(value) not in (bool, int, float) and scalar not in ("softcap", "rotary_dim") or scalar == "in_place":
            continue
        for bad in (True, "1", 1j) if type(value) in (int, float) else ("1",):
            with pytest.raises((TypeError, ValueError), match=f"^liger_{name}: .*{scalar.removeprefix('jsd_')}.*must"):
                op.function(**{**bound.arguments, scalar: bad})


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


def test_an_argument_without_effect_warns_once(monkeypatch):
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
def test_several_numbers_for_one_are_refused(several):
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


def test_attention_residuals_name_a_block_that_does_not_fit():
    weights = torch.ones(4), torch.ones(4)
    with pytest.raises(
        ValueError, match=r"^liger_attn_res: the blocks in V must have one shape, got \[\(6, 4\), \(5, 4"
    ):
        liger_attn_res([X, X[:5]], *weights)
    with pytest.raises(TypeError, match=r"^liger_attn_res: V\[1\] must be a tensor, got list"):
        liger_attn_res([X, X.tolist()], *weights)
    with pytest.raises(ValueError, match=r"^liger_attn_res: V\[1\] is on meta but V\[0\] is on cpu"):
        liger_attn_res([X, X.to("meta")], *weights)


@pytest.mark.parametrize("bad", [{"hc": 2.7}, {"hc": 17}, {"hc": 0}, {"tmax": 1.9}, {"c": "4"}])
def test_hyper_connections_refuse_sizes_when_they_are_made(bad):
    with pytest.raises((TypeError, ValueError), match=f"^LigerMHC: {next(iter(bad))} must be"):
        LigerMHC(torch.nn.Identity(), **{"hc": 2, "c": 4, **bad})


def test_hyper_connections_refuse_no_columns():
    x, phi, b, one = torch.ones(3, 2, 0), torch.ones(0, 8), torch.ones(8), torch.ones(1)
    with pytest.raises(ValueError, match="^liger_mhc_coeffs: x must have columns"):
        liger_mhc_coeffs(x, phi, b, one, one, one, allow_fp32=True)


@pytest.mark.lanes("cpu", "interpret", "gpu")
@pytest.mark.parametrize("dilation", [7, 8, 10**9])
def test_a_dilation_past_the_sequence_leaves_each_token_alone(lane, dilation):
    q, k, v = (torch.randn(1, 2, 7, 16, device=lane.device, requires_grad=True) for _ in range(3))
    out = liger_fused_neighborhood_attention(q, k, v, 3, dilation)
    torch.testing.assert_close(out, v)
    out.sum().backward()
    torch.testing.assert_close(v.grad, torch.ones_like(v))
    assert not q.grad.any() and not k.grad.any()
