"""On a CPU no kernel runs: a patched model then runs its own code, and takes no longer."""

from __future__ import annotations

import pytest
import torch
import transformers

import liger_hw
from liger_hw.kernels.rotary.rope import RopeFunction
from liger_hw.transformers import replacing
from liger_hw.transformers.tiny import tiny_model


def test_a_rotary_function_may_be_called_with_its_axis_first():
    """By keyword, in any order: the first value need not be a tensor."""

    def original(q, k, cos, sin, unsqueeze_dim=1):
        return q

    turn = replacing.of_q_and_k(RopeFunction, None, 1, original)
    q = torch.ones(2)
    assert turn(unsqueeze_dim=1, sin=None, cos=torch.ones(2), k=q, q=q) is q


@pytest.fixture
def own_code(set_env):
    """As for a user: the rest of the tests compare what the kernels' references compute."""
    set_env("LIGER_HW_CPU_REFERENCE", 0)


def _model():
    return tiny_model(transformers.Qwen3ForCausalLM)


def _called(model) -> list[str]:
    """liger_hw's operators in one training step, and its loss."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "liger_hw":
                seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    ids = torch.randint(model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(1))
    with Names():
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
    return seen, outputs


@pytest.mark.parametrize("classes", [True, False], ids=["classes", "instance"])
def test_no_operator_runs_on_a_cpu(own_code, classes):
    model = _model()
    before = _called(model)[1]
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with liger_hw.patch(type(model) if classes else model) as report:
        assert len({row.kernel for row in report.patched}) >= 4
        seen, after = _called(model)
        assert not seen
        assert torch.equal(after.loss, before.loss)
        assert torch.equal(after.logits, before.logits), "the loss computed them, so they are kept"
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients))


def test_references_run_where_they_are_asked_for(own_code):
    """By LIGER_HW_CPU_REFERENCE, and inside an activation scope, which recomputes what the operators offer."""
    model = _model()
    with liger_hw.patch(model):
        with liger_hw.activations("cheap"):
            seen = {name.removeprefix("liger_hw::") for name in _called(model)[0]}
        assert {"rms_norm_fwd", "swiglu_fwd"} <= seen


def test_the_references_are_the_default_of_these_tests():
    assert not replacing.should_use_original(torch.ones(1))
    assert not replacing.should_use_original(torch.ones(1, device="meta"))
