"""Every class that Liger's programs call `apply` of: arguments that do not fit are refused before anything is launched.

Those of `liger_kernel.ops`, and those of `liger_kernel.chunked_loss`.
"""

from __future__ import annotations

import pytest
import torch
from harness import few_sizes, make
from torch.utils._python_dispatch import TorchDispatchMode

from liger_hw import registry
from liger_hw.chunked_loss import LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearJSDLoss
from liger_hw.chunked_loss import functional as losses
from liger_hw.compat import checked, functions
from liger_hw.compat.loss_utils import LigerForCausalLMLoss
from liger_hw.transformers.functional import liger_cross_entropy

pytestmark = pytest.mark.cpu

CLASSES = {
    "LigerAttnResFunction": "attn_res",
    "LigerCrossEntropyFunction": "cross_entropy",
    "LigerDyTFunction": "dyt",
    "LigerEmbeddingFunction": "embedding",
    "LigerFusedAddRMSNormFunction": "fused_add_rms_norm",
    "LigerFusedCETVDFunction": "fused_ce_tvd",
    "LigerFusedGateUpSiLUMulFunction": "fused_gate_up_swiglu",
    "LigerFusedLinearCrossEntropyFunction": "fused_linear_cross_entropy",
    "LigerFusedLinearJSDFunction": "fused_linear_jsd",
    "LigerFusedLinearKLDivFunction": "fused_linear_kl_div",
    "LigerFusedLinearScaledCrossEntropyFunction": "fused_linear_log_probs",
    "LigerFusedLinearScaledCrossEntropyTPFunction": "fused_linear_log_probs",
    "LigerFusedMoEFunction": "fused_moe",
    "LigerFusedNeighborhoodAttentionFunction": "fused_neighborhood_attention",
    "LigerGELUMulFunction": "geglu",
    "LigerGroupNormFunction": "group_norm",
    "LigerJSDFunction": "jsd",
    "LigerKLDivLossFunction": "kl_div",
    "LigerLayerNormFunction": "layer_norm",
    "LigerLlama4RopeFunction": "llama4_rope",
    "LigerMHCCoeffsFunction": "mhc_coeffs",
    "LigerMHCPostResFunction": "mhc_post_res",
    "LigerMHCPreFunction": "mhc_pre",
    "LigerModulatedRMSNormFunction": "modulated_rms_norm",
    "LigerMultiTokenAttentionFunction": "multi_token_attention",
    "LigerPolyNormFunction": "poly_norm",
    "LigerQwen2VLMRopeFunction": "qwen2vl_mrope",
    "LigerRMSNormFunction": "rms_norm",
    "LigerReLUSquaredFunction": "relu_squared",
    "LigerRopeFunction": "rope",
    "LigerSiLUMulFunction": "swiglu",
    "LigerSoftmaxFunction": "softmax",
    "LigerSparsemaxFunction": "sparsemax",
    "LigerTVDLossFunction": "tvd",
    "LigerVocabParallelCEFunction": "vocab_parallel_cross_entropy",
}
"""A class -> the op whose sample has its arguments."""
WITHOUT_AN_OP = {"LigerMLPFunction", "LigerTiledMLPFunction"}
"""They call modules and other ops, which check their arguments."""

CHANGES = {
    "fewer columns": lambda t: t[..., :-1] if t.dim() else t[None],
    "fewer rows": lambda t: t[:-1] if t.dim() > 1 else t[:-2],
    "one dimension more": lambda t: t[None],
    "another device": lambda t: t.to("meta"),
}

_ROWS = {"fewer rows", "one dimension more"}
_ANY = {"fewer columns", *_ROWS}
FITTING = {
    "LigerAttnResFunction": {0: _ROWS},
    "LigerCrossEntropyFunction": {0: {"fewer columns"}},  # another vocabulary, which still has every target
    "LigerDyTFunction": {0: _ROWS, 1: {"one dimension more"}},
    "LigerEmbeddingFunction": {0: {"fewer columns", "fewer rows"}, 1: _ANY},
    "LigerFusedGateUpSiLUMulFunction": {0: _ROWS},
    "LigerFusedLinearCrossEntropyFunction": {1: {"fewer rows"}},
    "LigerFusedLinearScaledCrossEntropyFunction": {1: {"fewer rows"}},
    "LigerFusedLinearScaledCrossEntropyTPFunction": {1: {"fewer rows"}},
    "LigerGroupNormFunction": {0: {"fewer columns", "fewer rows"}},
    "LigerLayerNormFunction": {0: _ROWS},
    "LigerLlama4RopeFunction": {2: {"fewer columns"}},  # part of a head turns
    "LigerMHCCoeffsFunction": {0: _ROWS, **{place: {"one dimension more"} for place in (3, 4, 5)}},
    "LigerMHCPreFunction": {0: {"fewer columns"}},
    "LigerModulatedRMSNormFunction": {0: _ROWS},
    "LigerMultiTokenAttentionFunction": {0: {"fewer rows"}, 1: {"fewer columns"}},  # another batch, another kernel size
    "LigerPolyNormFunction": {0: _ANY, 2: {"one dimension more"}},
    "LigerRMSNormFunction": {0: _ROWS},
    "LigerReLUSquaredFunction": {0: _ANY},
    "LigerSoftmaxFunction": {0: _ANY},
    "LigerSparsemaxFunction": {0: _ANY},
    "LigerVocabParallelCEFunction": {0: {"fewer columns"}},
}
"""Of each class: by an argument's place, the changes after which it fits as well."""


class _Launched(TorchDispatchMode):
    """Names of liger_hw's operators that ran; one that refuses its arguments does so before its launcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "liger_hw":
            self.names.append(str(func))
        return result


def arguments(name: str) -> tuple:
    """What `apply` takes without options."""
    op = registry.get_op(CLASSES[name])
    args = make(op, few_sizes(op), torch.float32, "cpu", 0).args
    if name == "LigerFusedLinearScaledCrossEntropyTPFunction":
        return *args[:3], None
    if name == "LigerMHCCoeffsFunction":
        return *args[:3], *(alpha.view(1) for alpha in args[3:]), True, 20, 1e-6, 0.0, 1e-6, 2.0
    return args[:3] if name == "LigerFusedLinearScaledCrossEntropyFunction" else args


def test_every_class_is_here():
    assert {*CLASSES, *WITHOUT_AN_OP} == set(functions.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_that_do_not_fit_are_refused_before_a_launch(name):
    refuses(getattr(functions, name).apply, arguments(name), FITTING.get(name, {}))


def refuses(apply, args: tuple, fitting: dict[int, set[str]]) -> None:
    """Every change of a tensor among `args`, but the fitting ones, is an error that says whose, before a launch."""
    with _Launched() as launched:
        apply(*args)
    assert launched.names
    places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    for place in places:
        for change, changed in CHANGES.items():
            alone = change == "another device" and len(places) == 1
            if alone or change in fitting.get(place, ()):
                continue
            given = *args[:place], changed(args[place]), *args[place + 1 :]
            with _Launched() as launched, pytest.raises((TypeError, ValueError), match="^liger_"):
                apply(*given)
            assert not launched.names, f"argument {place} with {change}: {launched.names}"


def _chunked_arguments() -> dict:
    """Function -> what it takes, and the changes after which it does as well."""
    x, weight, bias, ids = torch.randn(4, 6, 8), torch.randn(11, 8), torch.randn(11), torch.randint(11, (4, 6))
    policy, reference = (x, weight, ids, bias), (x + 1, weight + 1, bias + 1)
    per_token, kept, good = torch.randn(2, 4, 6), torch.ones(4, 6), torch.tensor([True, False, True, False])
    heads = x[0], weight, x[1], weight + 1, ids[0]
    return {
        "cpo": (policy, {}),
        "orpo": (policy, {}),
        "simpo": (policy, {}),
        "dpo": ((*policy, *reference), {}),
        "kto": ((x, weight, ids, good, bias, *reference), {3: {"another device"}}),  # the answers' kinds are copied
        "grpo": ((x, weight, ids, kept, torch.randn(4), bias, *per_token), {3: {"another device"}}),  # torch says it
        "jsd": (heads, {}),
        "cosine": (heads, {}),
    }


@pytest.mark.parametrize("name", _chunked_arguments())
def test_a_chunked_loss_refuses_them_too(name):
    refuses(getattr(losses, f"liger_fused_linear_{name}"), *_chunked_arguments()[name])


def test_a_short_weight_is_refused_under_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: functions.LigerRMSNormFunction.apply(x, w, 1e-6), backend="eager")
    x = torch.randn(4, 8, requires_grad=True)
    expected = r"liger_rms_norm: W must have shape \(8,\) to match X, got \(7,\)"
    with pytest.raises(RuntimeError, match=expected):  # torch's own, around the ValueError of the operator's fake
        compiled(x, torch.ones(7))


def test_results_are_those_of_liger_s_classes():
    """What Liger's give that the functions here do not: four results of a cross entropy, None where not asked for."""
    logits, target = arguments("LigerCrossEntropyFunction")
    loss, *others = functions.LigerCrossEntropyFunction.apply(logits, target, None)
    assert others == [None] * 3
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))
    _, z_loss, accuracy, top = functions.LigerCrossEntropyFunction.apply(
        logits, target, None, -100, 1e-4, 0.0, "mean", None, True, True, True
    )
    assert z_loss > 0 and 0 <= accuracy <= 1 and torch.equal(top[target >= 0], logits.argmax(1)[target >= 0])
    x, weight, target, group = arguments("LigerFusedLinearScaledCrossEntropyTPFunction")
    apply = functions.LigerFusedLinearScaledCrossEntropyTPFunction.apply
    nll = apply(x, weight, target, group, 0.7, -100, 2)
    both = apply(x, weight, target, group, 0.7, -100, 2, True)
    torch.testing.assert_close(nll, both[0])
    assert both[1].shape == nll.shape


IGNORED = torch.full((6,), -100)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_cross_entropy_of_no_rows_is_zero(reduction):
    """As Liger's; liger_hw's own mean is nan, as torch's."""
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    logits = torch.randn(6, 16, requires_grad=True)
    own = liger_cross_entropy(logits, IGNORED)
    assert own.isnan()
    heads = [
        checked.liger_fused_linear_cross_entropy(x, weight, IGNORED, reduction=reduction),
        checked.LigerFusedLinearCrossEntropyLoss(reduction=reduction)(weight, x, IGNORED),
        functions.LigerFusedLinearCrossEntropyFunction.apply(x, weight, IGNORED, None, None, -100, 0.0, 0.0, reduction)[
            0
        ],
    ]
    plain = [
        checked.liger_cross_entropy(logits, IGNORED, reduction=reduction),
        checked.LigerCrossEntropyLoss(reduction=reduction)(logits, IGNORED),
        functions.LigerCrossEntropyFunction.apply(logits, IGNORED, None, -100, 0.0, 0.0, reduction)[0],
    ]
    for loss in (*heads, *plain):
        assert loss.shape == ((6,) if reduction == "none" else ()) and not loss.any()
    for grad in torch.autograd.grad(sum(loss.sum() for loss in (*heads, *plain)), (x, weight, logits)):
        assert not grad.any()
    if reduction == "mean":
        asked = checked.liger_cross_entropy(logits, IGNORED, lse_square_scale=0.1, return_z_loss=True)
        assert asked.loss == 0 and asked.z_loss == 0 and asked.predicted_tokens is None
        labels = IGNORED.view(2, 3)
        assert LigerForCausalLMLoss(x.view(2, 3, 8), weight, labels, 8) == 0
        one = torch.where(torch.arange(6) == 2, 3, -100)
        torch.testing.assert_close(checked.liger_cross_entropy(logits, one), liger_cross_entropy(logits, one))


@pytest.mark.parametrize("loss", [LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss])
def test_distillation_takes_sequences(loss):
    """Inputs [batch, length, hidden] and labels [batch, length], as some of TRL's trainers pass them."""
    student, teacher = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 12)
    heads = torch.randn(16, 8, requires_grad=True), torch.randn(16, 12)
    labels = torch.tensor([[1, -100, 3], [15, 0, 7]])
    flat = loss()(student.flatten(0, 1), heads[0], teacher.flatten(0, 1), heads[1], labels.flatten())
    for given in (labels, labels.flatten()):
        found = loss()(student, heads[0], teacher, heads[1], given)
        assert torch.equal(found, flat)
        leaves = student, heads[0]
        for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(flat, leaves, retain_graph=True)):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"must be \[tokens, hidden\]"):
        loss()(student, heads[0], teacher.transpose(0, 1), heads[1], labels)
