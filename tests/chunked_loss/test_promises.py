"""Promises of the chunked losses beside their numbers: memory, gradients, torch.compile, Liger's signatures, errors."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path

import pytest
import torch
from cases import CASES, ONE_OF_EACH, VOCAB
from harness import assert_others_get_no_gradient, tensors
from torch._dynamo.testing import CompileCounterWithBackend

import liger_hw.chunked_loss as chunked_loss
from liger_hw import compat
from liger_hw.chunked_loss import functional, grpo_loss, log_prob_loss
from liger_hw.kernels.heads import linear_head
from liger_hw.kernels.heads.linear_head import DEFAULT_MIB, MAX_CHUNKS_WITH_TARGETS, MIN_ROWS, plan_groups
from liger_hw.transformers import grpo_loss as of_logits

HEADS = [name for name in ONE_OF_EACH if not name.startswith("distillation")]


def case_of(name, lane, generator, sizes=(4, 5, VOCAB), dtype=torch.float32):
    op, sample = CASES[name](sizes, dtype, lane.device, generator)
    return op, sample, [t for t in tensors(sample.args) if t.requires_grad]


def _loss(op, sample):
    return tensors(op.function(*sample.args, **sample.kwargs))[0]


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("vocab", [32768, 131072, 262144])
@pytest.mark.parametrize("group", [1, 512, 2048, 8192, 65536])
def test_plan_covers_the_rows_and_keeps_the_budget(group, vocab, itemsize):
    for n_groups in (1, 4, 9):
        n_rows, hidden = n_groups * group, 4096
        chunks = plan_groups(n_rows, group, hidden, vocab, itemsize, True)
        bounds = chunks.bounds
        assert bounds[0][0] == 0 and bounds[-1][1] == n_rows
        assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
        assert chunks.wide or itemsize == 4 or len(bounds) <= MAX_CHUNKS_WITH_TARGETS
        row, weight = vocab * itemsize, vocab * hidden * itemsize
        most = max(DEFAULT_MIB << 20, MIN_ROWS * row) + 256 * row
        most = most + 2 * weight if itemsize == 2 else most  # what so few roundings may cost, see plan_chunks
        assert chunks.rows * row <= most, f"{chunks.rows * row >> 20} MiB of logits"


def test_a_larger_budget_keeps_a_group_whole(set_env):
    sizes = 16384, 16384, 4096, 131072, 2, True  # one pair of 8192 tokens: 4 GiB of logits
    assert plan_groups(*sizes).rows < 16384
    set_env("LIGER_HW_LOSS_MEMORY_MIB", 8192)
    assert plan_groups(*sizes).bounds == ((0, 16384),)
    set_env("LIGER_HW_LOSS_MEMORY_MIB", 1536)
    assert plan_groups(*sizes).rows < 4096


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("name", HEADS)
def test_a_long_sample_stays_within_the_budget(name, lane, generator, monkeypatch):
    """No buffer of logits is larger than the budget's chunk, although the group is."""
    monkeypatch.setattr(linear_head, "MIN_ROWS", 8)
    monkeypatch.setattr(linear_head, "DEFAULT_MIB", 0)
    made = []
    original = linear_head.logits_buffer
    monkeypatch.setattr(linear_head, "logits_buffer", lambda rows, *a: made.append(rows) or original(rows, *a))
    op, sample, inputs = case_of(name, lane, generator, (2, 99, VOCAB))
    found = torch.autograd.grad(_loss(op, sample), inputs)
    assert made and max(made) <= 8
    expected = torch.autograd.grad(tensors(op.reference(*sample.args, **sample.kwargs))[0], inputs)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# -- gradients -------------------------------------------------------------------------------------------------------


class _Products:
    """Counts the matrix products of the chunks and of a reference."""

    def __init__(self, monkeypatch):
        self.count = 0

        def counted(original):
            def call(*args, **kwargs):
                self.count += 1
                return original(*args, **kwargs)

            return call

        places = (torch, "mm"), (torch.Tensor, "addmm_"), (torch.nn.functional, "linear"), (torch.Tensor, "__matmul__")
        for owner, name in places:
            monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_only_what_is_wanted(name, lane, generator, monkeypatch):
    """A frozen weight (LoRA) costs no GEMM, and a tensor without requires_grad gets no gradient."""
    op, sample, (x, weight, bias) = case_of(name, lane, generator, (4, 5, 40))  # words that are multiplied at once
    every = torch.autograd.grad(_loss(op, sample), (x, weight, bias))
    counted = []
    for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        for t, w in zip((x, weight, bias), wanted):
            t.requires_grad_(w)
        with monkeypatch.context() as patch:
            products = _Products(patch)
            loss = _loss(op, sample)
            counted.append(products.count)
        found = torch.autograd.grad(loss, [t for t, w in zip((x, weight, bias), wanted) if w])
        torch.testing.assert_close(found, [g for g, w in zip(every, wanted) if w])
    full, frozen, *one = counted
    assert frozen == full - 1 and one == [full - 1, full - 2]


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_without_gradients(name, lane, generator):
    op, sample, inputs = case_of(name, lane, generator)
    expected = tensors(op.function(*sample.args, **sample.kwargs))
    with torch.no_grad():
        found = tensors(op.function(*sample.args, **sample.kwargs))
    assert not any(t.requires_grad for t in found)
    torch.testing.assert_close(found, expected)


OF_A_TEACHER = [name for name in CASES if "ref=True" in name or "ref=head" in name or "distillation" in name]


@pytest.mark.cpu
@pytest.mark.parametrize("name", OF_A_TEACHER)
def test_a_teacher_that_requires_grad_gets_none(name, generator):
    op, sample = CASES[name]((2, 3, VOCAB), torch.float32, "cpu", generator)
    assert_others_get_no_gradient(op.function, sample)


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_backward_twice_and_nothing_is_overwritten(name, lane, generator):
    op, sample, inputs = case_of(name, lane, generator)
    before = [t.detach().clone() for t in tensors(sample.args)]
    loss = _loss(op, sample)
    first = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(3 * loss, inputs)
    for a, b, c in zip(first, kept, second):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert all(torch.equal(a, b) for a, b in zip(tensors(sample.args), before))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(_loss(op, sample), inputs, create_graph=True)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_garbage_where_nothing_counts(generator, level):
    """Log-probabilities and advantages of masked tokens may be anything, nan too."""
    inputs = torch.randn(2, 4, 8, generator=generator).requires_grad_(), torch.randn(11, 8, generator=generator)
    ids, mask = torch.randint(11, (2, 4), generator=generator), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    old = torch.randn(2, 4, generator=generator) - 3
    loss = chunked_loss.LigerFusedLinearGRPOLoss(importance_sampling_level=level)
    advantages = torch.tensor([[1.0], [-0.5]]).expand(2, 4)

    def run(fill):
        padded, weighed = (t.masked_fill(mask == 0, fill) for t in (old, advantages))
        found = loss(*inputs, ids, mask, weighed, ref_per_token_logps=padded, old_per_token_logps=padded)[0]
        return found, torch.autograd.grad(found, inputs[0])[0]

    torch.testing.assert_close(run(0.0), run(float("nan")), rtol=0, atol=0)


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("name", [n for n in ONE_OF_EACH if n.split("-")[0] in ("distillation", "grpo")])
def test_fp16_of_many_tokens(name, lane, generator):
    """A token's share of the gradient is below fp16's range, but not after a gradient scaler's factor."""
    op, sample, inputs = case_of(name, lane, generator, (32, 1024, VOCAB), torch.float16)
    scale = 2.0**14
    found = torch.autograd.grad(_loss(op, sample) * scale, inputs)
    wide = [t.detach().double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in sample.args]
    wide_inputs = [wide[i].requires_grad_() for i, t in enumerate(sample.args) if any(t is x for x in inputs)]
    expected = torch.autograd.grad(tensors(op.reference(*wide, **sample.kwargs))[0] * scale, wide_inputs)
    for a, b in zip(found, expected):
        assert (a.double() - b).norm() <= torch.finfo(torch.float16).eps * b.norm()


# -- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.daily(name=("dpo-ref=True", "distillation-kind=jsd"))  # pairs and rows; all others are cut as these
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("name", [n for n in ONE_OF_EACH if n.split("-")[0] in ("dpo", "kto", "grpo", "distillation")])
def test_compiled(name, lane, generator):
    """No graph break, the same numbers, and a new batch does not recompile."""
    torch._dynamo.reset()
    op, sample, inputs = case_of(name, lane, generator)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op.function, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for sizes in ((4, 5, VOCAB), (6, 7, VOCAB), (8, 3, VOCAB)):
        op, sample, inputs = case_of(name, lane, generator, sizes)
        found, expected = compiled(*sample.args, **sample.kwargs), op.function(*sample.args, **sample.kwargs)
        torch.testing.assert_close(tensors(found), tensors(expected))
        grads = torch.autograd.grad(tensors(found)[0], inputs), torch.autograd.grad(tensors(expected)[0], inputs)
        torch.testing.assert_close(*grads)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3, f"compilations after each batch: {counts}"


def test_operators(generator):
    """torch's own check of schema, fake and aliasing."""
    pick = "test_schema", "test_faketensor"
    x, weight = torch.randn(4, 3, 8, generator=generator), torch.randn(11, 8, generator=generator)
    target = torch.randint(11, (4, 3), generator=generator)
    counts, tokens = torch.full((2, 2), 3.0), torch.tensor(6.0)
    call = x, weight, None, target, None, [counts, None, tokens], "pairs", "dpo_sigmoid"
    numbers = [0.1, 1.0, 0.0, 1.0, 0.0, 0.0]
    for wanted in ((True, True, False), (False, False, False)):
        numbers_and_flags = numbers, log_prob_loss.PAIR, 2, -100, 1.0, 1.0, *wanted
        torch.library.opcheck(log_prob_loss.chunked_loss.overload, (*call, *numbers_and_flags), test_utils=pick)


# -- Liger's names ---------------------------------------------------------------------------------------------------

SIGNATURES = json.loads(Path(__file__).with_name("liger_signatures.json").read_text())
"""liger-kernel 0.8.5: function, or method of a module, -> its signature."""


def _plain(function) -> str:
    """The signature without annotations and self."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))[1:-1]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_liger_s(name):
    home = functional if name.startswith("liger_") else chunked_loss if name.startswith("Liger") else of_logits
    assert _plain(functools.reduce(getattr, name.split("."), home)) == SIGNATURES[name]


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name.startswith("liger_")])
def test_a_wrong_argument_of_a_function_is_named(name):
    function = getattr(functional, name)
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    values = dict.fromkeys(required)
    with pytest.raises(TypeError, match=f"missing a required argument: {required[-1]!r}"):
        function(*required[:-1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        function(**values, temprature=1.0)
    with pytest.raises(TypeError, match=f"multiple values for argument {required[0]!r}"):
        function(*required, **{required[0]: None})


@pytest.mark.parametrize("kind", ["CPO", "SimPO", "ORPO"])
def test_a_loss_made_in_a_compiled_function(kind):
    def loss(weight, x, target):
        return getattr(chunked_loss, f"LigerFusedLinear{kind}Loss")()(weight, x, target)[0]

    inputs = torch.randn(11, 8), torch.randn(4, 5, 8), torch.randint(11, (4, 5))
    torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs), loss(*inputs))


def test_names():
    assert set(chunked_loss.__all__) == {name.split(".")[0] for name in SIGNATURES if "." in name}
    for name in ("k3_loss_fn", "get_gamma_weights", "sapo_loss_fn", "clip_coef_fn", "LigerFusedLinearGRPOFunction"):
        assert hasattr(grpo_loss, name)
    for module in ("dpo_loss", "kto_loss", "grpo_loss", "functional"):  # the shim's liger_kernel.chunked_loss.<module>
        homes = f"liger_hw.chunked_loss.{module}", "liger_hw.compat.loss_bases"
        assert compat.homes(f"chunked_loss.{module}") == homes
    with pytest.raises(AttributeError, match="LigerFusedLinearDPOLoss"):
        chunked_loss.LigerFusedLinearPPOLoss  # noqa: B018


# -- errors ----------------------------------------------------------------------------------------------------------

_X, _W, _Y = torch.zeros(4, 3, 8), torch.zeros(11, 8), torch.zeros(4, 3, dtype=torch.int64)
_A, _L = torch.zeros(4), torch.ones(4, dtype=torch.bool)


def _dpo(**options):
    return chunked_loss.LigerFusedLinearDPOLoss(use_ref_model=False, **options)


def _grpo(*args, x=_X, ids=_Y, mask=_Y, advantages=_A, **call):
    of_the_module = inspect.signature(chunked_loss.LigerFusedLinearGRPOLoss).parameters
    options = {k: call.pop(k) for k in list(call) if k in of_the_module}
    loss = chunked_loss.LigerFusedLinearGRPOLoss(**{"use_ref_model": False, **options})
    return loss(x, _W, ids, mask, advantages, **call)


def _kto(*args, **options):
    return chunked_loss.LigerFusedLinearKTOLoss(**options)(_X, _W, _Y, None, *args)


def _jsd(**options):
    loss = chunked_loss.LigerFusedLinearJSDLoss(**{k: v for k, v in options.items() if k in ("beta", "temperature")})
    teacher = options.get("teacher", (_X[0], _W))
    return loss(_X[0], _W, *teacher, options.get("labels", _Y[0]))


ERRORS = {
    "loss types": (lambda: _dpo(loss_type=["sigmoid", "bco_pair"]), r"Unsupported loss_type \['sigmoid', 'bco_pair'\]"),
    "loss type": (lambda: _dpo(loss_type="aot"), "Unsupported loss_type 'aot': it must be one of sigmoid, .*ipo"),
    "exo smoothing": (
        lambda: _dpo(loss_type="exo_pair"),
        "label_smoothing must be > 0 for loss_type='exo_pair'.* got 0.0",
    ),
    "robust smoothing": (
        lambda: _dpo(loss_type="robust", label_smoothing=0.5),
        r"must lie in \[0.0, 0.5\) for loss_type='robust', got 0.5",
    ),
    "beta": (lambda: _dpo(loss_type="ipo", beta=0.0), "beta must not be 0"),
    "tau": (lambda: _dpo(loss_type="discopop", discopop_tau=0.0), "discopop_tau must be positive"),
    "no reference": (lambda: chunked_loss.LigerFusedLinearDPOLoss()(_W, _X, _Y), "needs ref_input and ref_weight"),
    "reference shape": (
        lambda: chunked_loss.LigerFusedLinearDPOLoss()(_W, _X, _Y, None, _X[:2], _W),
        r"ref_input must have the batch and length of _input, \(4, 3\), got \(2, 3\)",
    ),
    "odd batch": (lambda: _dpo()(_W, _X[:3], _Y[:3]), "as many rejected ones; got 3 sequences"),
    "two dimensions": (lambda: _dpo()(_W, _X[0], _Y[0]), r"_input must be \[batch, length, hidden\]"),
    "hidden sizes": (lambda: _dpo()(_W[:, :7], _X, _Y), r"got \(4, 3, 8\) and \(11, 7\)"),
    "dtypes": (lambda: _dpo()(_W.bfloat16(), _X, _Y), "must share one dtype, got torch.float32, torch.bfloat16"),
    "bias": (lambda: _dpo()(_W, _X, _Y, _A), r"bias must have shape \(11,\), got \(4,\)"),
    "target shape": (lambda: _dpo()(_W, _X, _Y[:, :2]), r"target must have shape \(4, 3\)"),
    "target dtype": (lambda: _dpo()(_W, _X, _Y.float()), "target must hold indices"),
    "target range": (lambda: _dpo()(_W, _X, _Y + 11), r"target\[0\] = 11 is out of bounds"),
    "target range, with a reference": (
        lambda: chunked_loss.LigerFusedLinearDPOLoss()(_W, _X, _Y + 11, None, _X, _W),
        r"target\[0\] = 11 is out of bounds",
    ),
    "a reference of fewer words": (
        lambda: chunked_loss.LigerFusedLinearDPOLoss()(_W, _X, _Y + 9, None, _X, _W[:7]),
        r"target\[0\] = 9 is out of bounds: expected 0 <= target < 7",
    ),
    "nll target": (
        lambda: chunked_loss.LigerFusedLinearORPOLoss()(_W, _X, _Y, None, _Y[:2]),
        r"nll_target must have shape \(4, 3\)",
    ),
    "smoothing": (
        lambda: chunked_loss.LigerFusedLinearCPOLoss(label_smoothing=1.5),
        "label_smoothing must be between 0 and 1",
    ),
    "labels": (lambda: _kto(_Y[:, 0]), "preference_labels must be a bool tensor, .* got torch.int64"),
    "no labels": (lambda: _kto(None), "preference_labels must be a bool tensor, .* got None"),
    "labels shape": (lambda: _kto(_L[:2]), r"preference_labels must have shape \(4,\)"),
    "kl": (lambda: _kto(_L, None, None, None, _A[:2]), r"kl must be one number or have shape \(4,\)"),
    "grpo loss type": (lambda: _grpo(loss_type="ppo"), "loss_type must be one of grpo, bnpo, .* got 'ppo'"),
    "level": (lambda: _grpo(importance_sampling_level="word"), "importance_sampling_level must be token or sequence"),
    "dr_grpo": (lambda: _grpo(loss_type="dr_grpo"), "give it, got None"),
    "delta": (lambda: _grpo(delta=-1.0), "delta must be positive, or None, got -1.0"),
    "sapo": (lambda: _grpo(loss_type="sapo", sapo_temperature_pos=0.0), "sapo_temperature_pos must be positive"),
    "temperature": (lambda: _grpo(temperature=0.0), "temperature must be positive and finite, got 0.0"),
    "infinite temperature": (lambda: _grpo(temperature=float("inf")), "temperature must be positive and finite"),
    "jsd infinite temperature": (lambda: _jsd(temperature=float("inf")), "temperature must be positive and finite"),
    "grpo reference": (lambda: _grpo(use_ref_model=True), "needs ref_per_token_logps, or ref_input and ref_weight"),
    "no advantages": (lambda: _grpo(advantages=None), "advantages must be a tensor, got NoneType"),
    "items": (
        lambda: _grpo(loss_type="dapo", num_items_in_batch=_A),
        r"num_items_in_batch must be one number, got Tensor of shape \(4,\)",
    ),
    "items as text": (
        lambda: _grpo(loss_type="dapo", num_items_in_batch="8"), "num_items_in_batch must be a number, got str"
    ),
    "mask": (lambda: _grpo(mask=_Y[:2]), r"attention_mask must be a tensor of shape \(4, 3\)"),
    "advantages": (lambda: _grpo(advantages=_A[:2]), r"advantages must have shape \(4,\) or \(4, 3\)"),
    "old": (lambda: _grpo(old_per_token_logps=_A), r"old_per_token_logps must have shape \(4, 3\), got \(4,\)"),
    "vllm": (lambda: _grpo(vllm_is_ratio=_X[:, :, 0][:2]), r"vllm_is_ratio must have shape .* got \(2, 3\)"),
    "jsd beta": (lambda: _jsd(beta=1.5), "beta must be between 0 and 1"),
    "jsd temperature": (lambda: _jsd(temperature=0.0), "temperature must be positive"),
    "teacher": (lambda: _jsd(teacher=(_X[0], _W[:7])), "the student's 3 tokens and vocabulary of 11, got 3 and 7"),
    "true labels": (lambda: _jsd(labels=_Y), r"true_labels must have shape \(3,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, message = ERRORS[case]
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        call()


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_a_loss_type_without_sequence_level_raises_at_the_call(loss_type):
    """As in Liger: a program may build such a loss and then set its level."""
    loss = chunked_loss.LigerFusedLinearGRPOLoss(
        beta=0.0, loss_type=loss_type, importance_sampling_level="sequence", use_ref_model=False
    )
    call = _X, _W, _Y, torch.ones(4, 3), torch.ones(4)
    with pytest.raises(
        ValueError, match=f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}"
    ):
        loss(*call)
    loss.importance_sampling_level = "token"
    assert torch.isfinite(loss(*call)[0])


def test_of_two_references_of_grpo_the_log_probabilities_are_taken():
    logps, mask = torch.full((4, 3), -2.0), torch.ones(4, 3)
    call = {"mask": mask, "advantages": torch.ones(4), "use_ref_model": True, "ref_per_token_logps": logps}
    expected, _ = _grpo(**call)
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        loss, _ = _grpo(**call, ref_input=_X, ref_weight=_W)
    torch.testing.assert_close(loss, expected)


def test_no_tensor_is_a_type_error():
    with pytest.raises(TypeError, match="target must be a tensor, got list"):
        _dpo()(_W, _X, [[0]])
    with pytest.raises(TypeError, match="advantages must be a tensor, got float"):
        _grpo(advantages=0.5)


_LOSSES = [getattr(chunked_loss, name) for name in dir(chunked_loss) if name.endswith("Loss")]
_UNUSED = ("compiled", "chunk_size")  # Liger's, without a meaning here


@pytest.mark.parametrize("kind", _LOSSES, ids=lambda kind: kind.__name__)
def test_text_for_a_number_or_a_flag_is_refused_when_the_loss_is_made(kind):
    """It is neither converted nor taken for True; None is no number either."""
    scalars = [
        n for n, p in inspect.signature(kind).parameters.items() if type(p.default) is not str and n not in _UNUSED
    ]
    assert "beta" in scalars
    for name in scalars:
        with pytest.raises((TypeError, ValueError), match=f": {name} must be"):
            kind(**{name: "1"})
    for name in {"ignore_index", "beta"}.intersection(scalars):
        with pytest.raises((TypeError, ValueError), match=f": {name} must be"):
            kind(**{name: None})
