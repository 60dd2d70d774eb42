"""The head of TRL's trainers on liger_fused_linear_log_probs: `liger_hw.trl`.

Skipped if trl is not installed (TRL=1.16.0 bash ci/cpu.sh), or older than 1.15, which `install` must refuse.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types

import pytest
import torch
from trl_programs import STEPS, found_by

import liger_hw.trl

TRAINERS = ("sft", "dpo", "kto", "grpo", "rloo")
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _oracle(hidden, weight, bias, targets, temperature, softcap, logit_scale):
    """The five outputs by their formulas, from all logits in fp64."""
    s = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * logit_scale
    s = (softcap * torch.tanh(s / softcap) if softcap else s) / temperature
    logp = s.log_softmax(-1)
    rows = torch.arange(len(s))
    first = s.argmax(-1) == targets
    return logp[rows, targets], -(logp.exp() * logp).sum(-1), (2 * logp).logsumexp(-1), s.mean(-1), first


CASES = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 0.5, "biased": True},
    "softcap": {"softcap": 3.0, "temperature": 1.3},
    "all": {"softcap": 3.0, "temperature": 0.7, "logit_scale": 2.0, "biased": True},
    "no rows": {"rows": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_every_output_and_its_gradient(case):
    options = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0, "biased": False, "rows": 37, **CASES[case]}
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options["rows"], 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    bias = torch.randn(50, generator=generator, requires_grad=True) if options["biased"] else None
    targets = torch.randint(50, (options["rows"],), generator=generator)
    numbers = options["temperature"], 7, options["softcap"], options["logit_scale"]
    actual = liger_hw.trl.log_probs(hidden, weight, bias, targets, *numbers, OUTPUTS)
    expected = _oracle(hidden, weight, bias, targets, numbers[0], *numbers[2:])
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    seeds = [torch.randn(options["rows"], generator=generator) for _ in range(2)]
    for name, ours, theirs in zip(OUTPUTS, actual, expected):
        assert ours.shape == (options["rows"],), name
        assert ours.dtype == (torch.bool if name == "is_top1" else torch.float32)
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=2e-5, msg=name)
    assert not any(t.requires_grad for t in actual[2:])
    gradients = [
        torch.autograd.grad(sum((t * seed).sum() for t, seed in zip(results, seeds)), leaves)
        for results in (actual, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_outputs_that_are_not_requested_are_none():
    hidden, weight = torch.randn(5, 16), torch.randn(50, 16)
    results = liger_hw.trl.log_probs(hidden, weight, None, torch.arange(5), 1.0, 7, None, 1.0, ("log_probs",))
    assert results[0].shape == (5,) and results[1:] == (None,) * 4


def test_the_products_are_in_the_dtype_of_the_hidden_states():
    """As with `cast_lm_head_to_fp32`: the weight is cast, and its gradient has the weight's dtype."""
    hidden = torch.randn(5, 16, requires_grad=True)
    weight = torch.randn(50, 16).bfloat16().requires_grad_()
    targets = torch.arange(5)
    logp = liger_hw.trl.log_probs(hidden, weight, None, targets, 1.0, 7)[0]
    expected = torch.log_softmax(hidden @ weight.float().T, -1)[torch.arange(5), targets]
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)
    logp.sum().backward()
    assert weight.grad.dtype == torch.bfloat16 and weight.grad.abs().max() > 0


def test_autocast_decides_the_dtype_of_the_products():
    hidden, weight = torch.randn(5, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logp = liger_hw.trl.log_probs(hidden, weight, None, torch.arange(5), 1.0, 7)[0]
        expected = (hidden @ weight.T).float().log_softmax(-1)[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-4)
    logp.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_a_weight_that_zero3_takes_away_again():
    """DeepSpeed leaves an empty tensor in the place of a gathered weight after the call."""
    hidden, weight = torch.randn(5, 16, requires_grad=True), torch.nn.Parameter(torch.randn(50, 16))
    whole = weight.detach().clone().requires_grad_()
    weight.ds_id = 3
    logp = liger_hw.trl.log_probs(hidden, weight, None, torch.arange(5), 1.0, 7)[0]
    expected = torch.log_softmax(hidden @ whole.T, -1)[torch.arange(5), torch.arange(5)]
    gradients = torch.autograd.grad(expected.sum(), (hidden, whole))
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient) or gradient)
    weight.data.fill_(float("nan"))
    ours = torch.autograd.grad(logp.sum(), (hidden, weight))
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-5)
    assert len(seen) == 1


def test_a_logit_scale_of_zero_is_refused():
    with pytest.raises(ValueError, match="logit_scale must be positive, got 0.0"):
        liger_hw.trl.log_probs(torch.randn(5, 16), torch.randn(50, 16), None, torch.arange(5), 1.0, 7, None, 0.0)


def _fake_trl(monkeypatch, version: str, forward) -> types.ModuleType:
    """Modules under TRL's names whose head takes the arguments of `forward`."""
    modules = {name: types.ModuleType(name) for name in ("trl", "trl.kernels", "trl.trainer", "trl.trainer.utils")}
    function = type("ChunkedLogProbFunction", (), {"forward": staticmethod(forward)})
    modules["trl"].__version__ = version
    modules["trl.kernels"].ChunkedLogProbFunction = function
    modules["trl.trainer.utils"]._ChunkedLogProbFunction = function
    modules["trl.trainer"].utils = modules["trl.trainer.utils"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["trl.trainer.utils"]


def _as_in_1_16(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None,
                logit_scale=1.0, outputs=()):  # fmt: skip
    """The arguments of TRL 1.15 and 1.16."""


def test_install_is_undone(monkeypatch):
    utils = _fake_trl(monkeypatch, "1.16.0", _as_in_1_16)
    before = utils._ChunkedLogProbFunction
    with liger_hw.trl.install() as installed:
        assert utils._ChunkedLogProbFunction.apply is liger_hw.trl.log_probs
        with liger_hw.trl.install():
            assert utils._ChunkedLogProbFunction.apply is liger_hw.trl.log_probs
        assert utils._ChunkedLogProbFunction.apply is liger_hw.trl.log_probs  # the outer one still is
    assert utils._ChunkedLogProbFunction is before
    installed.uninstall()
    first, second = liger_hw.trl.install(), liger_hw.trl.install()
    first.uninstall()
    second.uninstall()  # the earlier one was taken back first: ours does not come again
    assert utils._ChunkedLogProbFunction is before
    liger_hw.trl.install()
    liger_hw.trl.uninstall()
    assert utils._ChunkedLogProbFunction is before


def test_a_head_of_another_form_is_refused(monkeypatch):
    utils = _fake_trl(monkeypatch, "1.14.0", lambda ctx, last_hidden, weight, bias, targets: None)
    before = utils._ChunkedLogProbFunction
    with pytest.raises(ImportError, match=r"trl 1\.14\.0 has no output head of the form of TRL 1\.15 and 1\.16;"):
        liger_hw.trl.install()
    assert utils._ChunkedLogProbFunction is before


# -- with TRL itself ---------------------------------------------------------------------------------------------------

CODE = """
import liger_hw.trl
found = {}
real = liger_hw.trl._Function.apply
for kind in TRAINERS:
    options = {"use_weighting": True} if kind == "dpo" else {}  # WPO asks for log_sum_sq_probs
    plain = trained(kind, **options)
    asked = []
    def counted(*args, **kwargs):
        asked.append(sorted(args[8]))
        return real(*args, **kwargs)
    liger_hw.trl._Function.apply = staticmethod(counted)
    with liger_hw.trl.install():
        ours = trained(kind, **options)
    found[kind] = {**compared(plain, ours), "asked": asked}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each trainer's log without and with `install()`, and the outputs that it requested in each call."""
    version = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "1.15"
    if tuple(int(part) for part in version.split(".")[:2]) < (1, 15):
        with pytest.raises(ImportError, match="patch the model instead"):
            liger_hw.trl.install()
        pytest.skip(f"trl {version} has a head of another form, which install() refuses")
    return found_by(CODE, TRAINERS, tmp_path_factory.mktemp("trl_head"))


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_trainer_trains_as_without(trained, kind):
    """Every number that the trainer logs, and the parameters after the last step."""
    one = trained[kind]
    plain, with_head = one["plain"]["logged"], one["ours"]["logged"]
    assert len(plain) == len(with_head) == STEPS and sum(step["grad_norm"] for step in plain) > 1
    for theirs, ours in zip(plain, with_head):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        numbers = [name for name in theirs if not name.startswith(("step_time", "profiling", "num_tokens"))]
        assert {n: ours[n] for n in numbers} == pytest.approx({n: theirs[n] for n in numbers}, rel=1e-3, abs=1e-4)
    assert one["moved"] > 1e-3 and one["apart"] < 1e-2 * one["moved"]


def test_every_output_was_requested(trained):
    asked = {kind: {name for call in trained[kind]["asked"] for name in call} for kind in TRAINERS}
    assert all(trained[kind]["asked"] for kind in TRAINERS)
    assert asked["dpo"] == set(OUTPUTS)
    assert {"log_probs", "entropy", "mean_logits"} <= asked["kto"] and "entropy" in asked["grpo"]
