"""`apply` of Liger's classes is a public function. Invalid arguments are refused before a launch, also by the functions
of `liger_kernel.chunked_loss`."""

from __future__ import annotations

import pytest
import torch
from harness import few_sizes, make, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from liger_hw import registry
from liger_hw.chunked_loss import LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearJSDLoss
from liger_hw.chunked_loss import functional as losses
from liger_hw.compat import checked, functions
from liger_hw.compat.loss_utils import LigerForCausalLMLoss
from liger_hw.transformers.functional import liger_cross_entropy

WITHOUT_AN_OP = {"LigerMLPFunction", "LigerTiledMLPFunction"}
"""Compared in tests/kernels/test_tiled_mlp.py."""
SCALED = {"LigerFusedLinearScaledCrossEntropyFunction", "LigerFusedLinearScaledCrossEntropyTPFunction"}
"""Other names of fused_linear_log_probs, compared in tests/kernels/test_log_probs.py."""
OF_LIGER = {
    "kl_div": ((), {"reduction": "batchmean"}),
    "mhc_coeffs": (
        (True, 3, 1e-5, 0.5, 1e-3, 1.5),
        {"allow_fp32": True, "tmax": 3, "rms_eps": 1e-5, "pre_eps": 0.5, "sinkhorn_eps": 1e-3, "post_mult": 1.5},
    ),
    "tvd": ((), {"reduction": "batchmean"}),
}
"""Op whose defaults differ -> the numbers that Liger's class takes, and the same options of the public function."""


def arguments(name: str) -> tuple:
    return make(registry.get_op(name), few_sizes(registry.get_op(name)), torch.float32, "cpu", 0).args


@pytest.mark.parametrize("name", sorted(set(functions.__all__) - WITHOUT_AN_OP - SCALED))
def test_a_class_gives_what_its_public_function_gives(name):
    function = getattr(functions, name)
    op = registry.get_op(function.__name__.removeprefix("liger_").removeprefix("_"))
    args, (numbers, options) = arguments(op.name), OF_LIGER.get(op.name, ((), {}))
    results, expected = (tensors(one) for one in (function.apply(*args, *numbers), op.function(*args, **options)))
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    with pytest.raises((TypeError, ValueError), match="^liger_"):
        function.apply(args[0].to(torch.complex64), *args[1:], *numbers)


class _Launched(TorchDispatchMode):
    """Names of liger_hw's operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "liger_hw":
            self.names.append(str(func))
        return result


CHANGES = {
    "fewer columns": lambda t: t[..., :-1],
    "fewer rows": lambda t: t[:-1] if t.dim() > 1 else t[:-2],
    "one dimension more": lambda t: t[None],
    "another device": lambda t: t.to("meta"),
}


def _calls() -> dict:
    """Name -> (function, its arguments, position -> changes after which the arguments are still valid)."""
    x, weight, bias, ids = torch.randn(4, 6, 8), torch.randn(11, 8), torch.randn(11), torch.randint(11, (4, 6))
    policy, reference = (x, weight, ids, bias), (x + 1, weight + 1, bias + 1)
    per_token, kept, good = torch.randn(2, 4, 6), torch.ones(4, 6), torch.tensor([True, False, True, False])
    heads = x[0], weight, x[1], weight + 1, ids[0]
    losses_taking = {
        "cpo": (policy, {}),
        "orpo": (policy, {}),
        "simpo": (policy, {}),
        "dpo": ((*policy, *reference), {}),
        "kto": ((x, weight, ids, good, bias, *reference), {3: {"another device"}}),  # the answers' kinds are copied
        "grpo": ((x, weight, ids, kept, torch.randn(4), bias, *per_token), {3: {"another device"}}),  # torch says it
        "jsd": (heads, {}),
        "cosine": (heads, {}),
    }
    calls = {name: (getattr(losses, f"liger_fused_linear_{name}"), *call) for name, call in losses_taking.items()}
    for name in sorted(SCALED):
        group = (None,) * name.endswith("TPFunction")
        calls[name] = getattr(functions, name).apply, (x[0], weight, ids[0], *group), {1: {"fewer rows"}}
    return calls


@pytest.mark.parametrize("name", _calls())
def test_arguments_that_do_not_fit_are_refused_before_a_launch(name):
    """Every change of a tensor that makes it invalid is an error that names the function."""
    function, args, fitting = _calls()[name]
    with _Launched() as launched:
        function(*args)
    assert launched.names
    for place in (place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)):
        for change in CHANGES.keys() - fitting.get(place, set()):
            given = *args[:place], CHANGES[change](args[place]), *args[place + 1 :]
            with _Launched() as launched, pytest.raises((TypeError, ValueError), match="^liger_"):
                function(*given)
            assert not launched.names, f"argument {place} with {change}: {launched.names}"


def test_a_short_weight_is_refused_under_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: functions.LigerRMSNormFunction.apply(x, w, 1e-6), backend="eager")
    x = torch.randn(4, 8, requires_grad=True)
    expected = r"liger_rms_norm: W must have shape \(8,\) to match X, got \(7,\)"
    with pytest.raises(RuntimeError, match=expected):  # torch's own, around the ValueError of the operator's fake
        compiled(x, torch.ones(7))


def test_results_are_those_of_liger_s_classes():
    """Four results of a cross entropy, None if not requested."""
    logits, target = arguments("cross_entropy")
    loss, *others = functions.LigerCrossEntropyFunction.apply(logits, target, None)
    assert others == [None] * 3
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))
    _, z_loss, accuracy, top = functions.LigerCrossEntropyFunction.apply(
        logits, target, None, -100, 1e-4, 0.0, "mean", None, True, True, True
    )
    assert z_loss > 0 and 0 <= accuracy <= 1 and torch.equal(top[target >= 0], logits.argmax(1)[target >= 0])
    x, weight, target, _ = arguments("fused_linear_log_probs")
    apply = functions.LigerFusedLinearScaledCrossEntropyTPFunction.apply
    nll = apply(x, weight, target, None, 0.7, -100, 2)
    both = apply(x, weight, target, None, 0.7, -100, 2, True)
    torch.testing.assert_close(nll, both[0])
    assert both[1].shape == nll.shape


IGNORED = torch.full((6,), -100)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_cross_entropy_of_no_rows_is_zero(reduction):
    """As in Liger; liger_hw's own mean is nan, as in torch."""
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
    """[batch, length, hidden] with labels [batch, length], as some of TRL's trainers pass them."""
    student, teacher = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 12)
    heads = torch.randn(16, 8, requires_grad=True), torch.randn(16, 12)
    labels = torch.tensor([[1, -100, 3], [15, 0, 7]])
    flat = loss()(student.flatten(0, 1), heads[0], teacher.flatten(0, 1), heads[1], labels.flatten())
    for given in (labels, labels.flatten()):
        found = loss()(student, heads[0], teacher, heads[1], given)
        assert torch.equal(found, flat)
        leaves = student, heads[0]
        torch.testing.assert_close(
            torch.autograd.grad(found, leaves), torch.autograd.grad(flat, leaves, retain_graph=True), rtol=0, atol=0
        )
    with pytest.raises(ValueError, match=r"must be \[tokens, hidden\]"):
        loss()(student, heads[0], teacher.transpose(0, 1), heads[1], labels)
