"""The patch engine: what it changes, that it takes it back, and how it answers bad requests."""

from __future__ import annotations

import copy
import inspect
import io
import logging

import pytest
import torch
import transformers
from families import counted
from harness import python
from small_models import forwards

import liger_hw
from liger_hw.transformers import PatchReport
from liger_hw.transformers.report import config_source

KEYWORDS = {
    "rope": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
    "rms_norm": True,
    "swiglu": True,
    "model": None,
}


def module_functions(*modules):
    return {(m.__name__, name): value for m in modules for name, value in vars(m).items() if callable(value)}


def test_class_patch_and_revert_restore_the_very_objects(family):
    before = family.state()
    report = family.apply()
    changed = {key for key, value in family.state().items() if value is not before[key]}
    attention = (family.attention, "forward")
    assert changed == set(before) - {attention}
    assert not report.rows[0].state.startswith("left")
    report.revert()
    assert family.state() == before
    report.revert()
    assert family.state() == before


@pytest.mark.parametrize("part", ["rope", "fused_linear_cross_entropy", "rms_norm", "swiglu"])
def test_each_part_alone(family, part):
    before = family.state()
    with family.apply(**{name: name == part for name in KEYWORDS if name != "model"}) as report:
        assert [row.part for row in report.patched] == [part]
        assert sum(value is not before[key] for key, value in family.state().items()) == 1


def test_nothing_process_wide_changes(family):
    import transformers.activations
    import transformers.loss.loss_utils
    import transformers.modeling_utils
    import transformers.models.mixtral.modeling_mixtral as other_family

    modules = (
        torch,
        torch.nn,
        torch.nn.functional,
        torch.Tensor,
        torch.nn.Module,
        torch.nn.Linear,
        torch.nn.CrossEntropyLoss,
        transformers.loss.loss_utils,
        transformers.activations,
        transformers.modeling_utils,
        transformers.PreTrainedModel,
        other_family,
    )
    model, other = family.model(), family.model()  # the first model makes transformers add a method to nn.Module
    before = module_functions(*modules)
    mapping = dict(transformers.loss.loss_utils.LOSS_MAPPING)
    with family.apply(model=other), family.apply():
        model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
        after = module_functions(*modules)
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    assert mapping == transformers.loss.loss_utils.LOSS_MAPPING


def test_instance_patch_binds_this_model_only(family, batch):
    before = family.state()
    patched, other = family.model(), family.model()
    untouched = forwards(other)
    report = family.apply(model=patched)
    assert family.state() == before
    assert forwards(other) == untouched
    counts = {part: sum(row.part == part for row in report.patched) for part in KEYWORDS}
    assert counts == {
        "rope": 2,
        "cross_entropy": 0,
        "fused_linear_cross_entropy": 1,
        "rms_norm": 5,
        "swiglu": 2,
        "model": 0,
    }
    assert patched(**batch).logits.is_deferred and type(other(**batch).logits) is torch.Tensor
    report.revert()
    assert forwards(patched) == forwards(other)
    assert all("forward" not in vars(module) for module in patched.modules())


def test_a_global_that_is_replaced_later_is_used_by_the_copied_attention_forward(family, batch, monkeypatch):
    model, eager, original = family.model(), [], family.modeling.eager_attention_forward
    with family.apply(model=model), counted() as calls:
        monkeypatch.setattr(
            family.modeling, "eager_attention_forward", lambda *a, **k: eager.append(1) or original(*a, **k)
        )
        model.set_attn_implementation("eager")
        model(batch["input_ids"])
        assert len(eager) == calls["rope"] == 2


def test_idempotent(family, batch, calls):
    before = family.state()
    first = family.apply()
    once = family.state()
    second = family.apply()
    assert family.state() == once
    assert second.patched == [] and {row.state for row in second.rows} == {"already patched"}
    model = family.model()
    instance = family.apply(model=model)
    assert instance.patched == []
    model(**batch)
    assert calls["fused"] == 1
    second.revert()
    assert family.state() == once
    first.revert()
    assert family.state() == before


def test_the_other_loss_must_be_reverted_first(family):
    before = family.state()
    with family.apply():
        patched = family.state()
        with pytest.raises(ValueError, match=r"already patched for fused_linear_cross_entropy; revert\(\)"):
            family.apply(cross_entropy=True, fused_linear_cross_entropy=False)
        assert family.state() == patched
    assert family.state() == before


def test_patch_suggests_a_keyword():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"patch\(\) got an unexpected keyword argument 'ropee'; did you mean 'rope'\?"):
        liger_hw.patch(model, ropee=True)
    with pytest.raises(TypeError, match=r"'zzz'; its keywords are model, rope, "):
        liger_hw.patch(model, zzz=True)


def test_unknown_keyword_suggests(family):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'rmsnorm'; did you mean 'rms_norm'\?"):
        family.apply(rmsnorm=True)
    with pytest.raises(TypeError, match=r"'zzz'; its keywords are rope, "):
        family.apply(zzz=True)
    with pytest.raises(TypeError, match="too many positional"):
        family.apply(True, False, True, True, True, None, 1)


def test_wrong_models_raise_with_what_to_do(mistral, llama):
    with pytest.raises(TypeError, match="not a llama model; call apply_liger_kernel_to_mistral for it"):
        llama.apply(model=mistral.model())
    with pytest.raises(TypeError, match="call apply_liger_kernel_to_llama for it"):
        mistral.apply(model=llama.causal_lm)
    with pytest.raises(TypeError, match="got str; load it first"):
        mistral.apply(model="mistralai/Mistral-7B-v0.1")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
    with pytest.raises(TypeError, match=r"GPT2LMHeadModel, not a mistral model; call liger_hw.patch\(model\)"):
        mistral.apply(model=gpt2)
    with pytest.raises(TypeError, match="Linear, not a mistral model"):
        mistral.apply(model=torch.nn.Linear(2, 2))


def test_a_class_of_the_family_means_its_classes(family):
    before = family.state()
    with family.apply(model=family.causal_lm):
        assert family.norm.forward is not before[family.norm, "forward"]


def test_a_model_without_a_head(family, batch):
    base = family.model().model
    expected = base(batch["input_ids"]).last_hidden_state
    with family.apply(model=base) as report:
        loss = next(row for row in report.rows if row.part == "fused_linear_cross_entropy")
        assert loss.state.startswith("left alone: this") and len(report.patched) == 9
        torch.testing.assert_close(base(batch["input_ids"]).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "act, kernel, variant", [("gelu", "geglu", "gelu"), ("gelu_pytorch_tanh", "geglu", "gelu_tanh")]
)
def test_an_mlp_with_another_activation_takes_its_kernel(family, batch, act, kernel, variant, monkeypatch):
    from liger_hw.kernels.pointwise.swiglu import SiLUMulFunction

    monkeypatch.setattr(SiLUMulFunction, "apply", None)  # calling it would fail
    model = family.model(hidden_act=act)
    expected = model(batch["input_ids"]).logits
    with family.apply(model=model) as report:
        torch.testing.assert_close(model(batch["input_ids"]).logits, expected, rtol=1e-4, atol=1e-5)
        assert {(r.kernel, r.variant) for r in report.patched if r.part == "swiglu"} == {(kernel, variant)}


@pytest.mark.parametrize("scope", ["classes", "instance"])
def test_an_mlp_without_a_kernel_keeps_its_own_forward(family, batch, scope, monkeypatch):
    from liger_hw.kernels.pointwise.swiglu import SiLUMulFunction

    monkeypatch.setattr(SiLUMulFunction, "apply", None)
    model = family.model(hidden_act="relu")
    expected = model(batch["input_ids"]).logits
    with family.apply(model=None if scope == "classes" else model) as report:
        torch.testing.assert_close(model(batch["input_ids"]).logits, expected, rtol=1e-4, atol=1e-5)
        if scope == "instance":
            states = {row.state for row in report.rows if row.part == "swiglu"}
            assert states == {"left alone: it is gated by relu: no kernel"}


def test_report_reads_as_a_table(family, caplog):
    with caplog.at_level(logging.INFO, "liger_hw"):
        report = family.apply(model=family.model(hidden_act="relu"))
    logged = [record for record in caplog.records if record.name == "liger_hw"]
    assert len(logged) == 1 and "rms_norm x5" in logged[0].message and "gated by relu" in logged[0].message
    assert isinstance(report, PatchReport) and report.family == family.name
    lines = str(report).splitlines()
    assert lines[0] == f"{family.name}: one {family.causal_lm.__name__}"
    assert lines[1].split() == ["part", "where", "kernel", "state", "configuration"]
    norm = next(line for line in lines if line.startswith("rms_norm"))
    assert f"{family.norm.__name__}.forward x5" in norm and norm.endswith(config_source("rms_norm"))
    assert next(line for line in lines if line.startswith("swiglu")).endswith("-")
    report.revert()


def test_forward_keeps_its_signature(family):
    original = inspect.signature(family.causal_lm.forward).parameters
    norm = inspect.signature(family.norm.forward).parameters
    rotary = inspect.signature(family.modeling.apply_rotary_pos_emb).parameters
    with family.apply():
        patched = inspect.signature(family.causal_lm.forward).parameters
        extra = ("skip_logits", "return_token_accuracy", "return_predicted_tokens")
        assert [n for n in patched if n not in extra] == list(original)
        assert list(inspect.signature(family.norm.forward).parameters) == list(norm)
        assert list(inspect.signature(family.modeling.apply_rotary_pos_emb).parameters) == list(rotary)


def test_a_patched_model_pickles_and_saves(family, batch, tmp_path, calls):
    """What is pickled is the model without its kernels."""
    model = family.model()
    expected = model(**batch).loss
    with family.apply(model=model):
        model.save_pretrained(tmp_path)
        assert set(model.state_dict()) == set(family.model().state_dict())
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(model), buffer)
    buffer.seek(0)
    pickled = torch.load(buffer, weights_only=False)
    for loaded in (pickled, family.causal_lm.from_pretrained(tmp_path)):
        torch.testing.assert_close(loaded(**batch).loss, expected)
        assert type(loaded(**batch).logits) is torch.Tensor
    assert not calls["fused"]
    with family.apply(model=pickled):
        assert pickled(**batch).logits.is_deferred and calls["fused"] == 1


# A process of its own that imports transformers; the pickle is written alike for every family.
@pytest.mark.daily(family="mistral")
def test_a_pickle_of_a_patched_model_needs_no_liger_hw(family, tmp_path):
    model = family.model()
    with family.apply(model=model):
        torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['liger_hw'] = None\n"
        "import torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "ids = torch.tensor([[5, 6, 7]])\n"
        "assert type(model(ids, labels=ids).logits) is torch.Tensor\n"
    )
    python("-c", code)


def test_lazy_exports_load_no_torch():
    code = (
        "import sys, liger_hw.transformers as t, liger_hw.transformers.functional as f\n"
        "assert 'apply_liger_kernel_to_mistral' in dir(t) and 'liger_rope' in dir(f)\n"
        "heavy = [m for m in ('torch', 'triton', 'transformers') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "try: t.apply_liger_kernel_to_mistrl\n"
        "except AttributeError as e: assert 'apply_liger_kernel_to_mistral' in str(e), e\n"
        "else: raise SystemExit('no error')\n"
    )
    python("-c", code)
