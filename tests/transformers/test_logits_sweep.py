"""Whatever a program computes from a patched model's logits has the value and the gradients of the unpatched model's.

Not a list of programs but their product: every loss of torch.nn.functional, forms of targets, reductions, ways to take
rows of the logits, and every method of a tensor and function of torch that takes one tensor and has a gradient. Each is
differentiated alone, beside the model's own loss, and twice.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

import liger_hw

pytestmark = pytest.mark.filterwarnings("ignore")
VOCAB, BATCH, SEQ = 13, 2, 7
IDS = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % VOCAB


@pytest.fixture(scope="module")
def models():
    """(unpatched, patched) with the same weights; references run in the place of kernels."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    unpatched = transformers.LlamaForCausalLM(config).double().train()
    with torch.no_grad():
        unpatched.lm_head.weight.mul_(30)  # logits that differ from one another
    patched = copy.deepcopy(unpatched)
    liger_hw.patch(patched)
    return unpatched, patched


def outcome(model: Any, program: Callable[[Any], Any]) -> tuple[str, list[torch.Tensor]]:
    """(the error or "", what the program returned and the gradient of every parameter)"""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    outputs = model(input_ids=IDS, labels=IDS)
    try:
        result = program(outputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}", []
    results = [t.detach().clone() for t in (result if isinstance(result, (tuple, list)) else (result,))]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return "", [*results, *gradients]


def assert_same(models: tuple, program: Callable[[Any], Any]) -> None:
    (expected_error, expected), (error, tensors) = (outcome(model, program) for model in models)
    assert error.partition(":")[0] == expected_error.partition(":")[0], f"{expected_error!r}, patched {error!r}"
    for tensor, other in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.isfinite(), other.isfinite()) and torch.equal(tensor.isnan(), other.isnan())
        difference = (tensor - other).nan_to_num(0.0, 0.0, 0.0).norm()
        assert difference <= 1e-4 * other.nan_to_num(0.0, 0.0, 0.0).norm() + 1e-9  # norms and its loss are fp32 there


def backward(value: torch.Tensor) -> torch.Tensor:
    """Differentiate the sum of a result, weighed so that its elements differ."""
    (value * torch.linspace(0.5, 1.5, max(1, value.numel()), dtype=value.dtype).reshape(value.shape)).sum().backward(
        retain_graph=True
    )
    return value


USES: dict[str, Callable[[Any, Callable], Any]] = {
    "alone": lambda out, f: backward(f(out.logits)),
    "added to the loss": lambda out, f: backward(f(out.logits) + out.loss),
    "after the loss's backward": lambda out, f: (backward(out.loss), backward(f(out.logits))),
    "before the loss's backward": lambda out, f: (backward(f(out.logits)), backward(out.loss)),
    "twice": lambda out, f: (backward(f(out.logits)), backward(f(out.logits))),
    "read before": lambda out, f: (out.logits + 0, backward(f(out.logits)))[1],
}

ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(-1, VOCAB),
    "shifted": lambda x: x[:, :-1].reshape(-1, VOCAB),
    "shifted, contiguous": lambda x: x[..., :-1, :].contiguous().view(-1, VOCAB),
    "double": lambda x: x.double().flatten(0, 1),
    "to": lambda x: x.to(torch.float64).reshape(-1, x.size(-1)),
    "one sequence": lambda x: x[0],
    "masked": lambda x: x[IDS % 3 == 0],
    "some columns": lambda x: x[:, 1:, : VOCAB - 1].flatten(0, 1),
    "scaled": lambda x: (x / 0.7).view(-1, VOCAB),
    "no row": lambda x: x.view(-1, VOCAB)[:0],
    "one row": lambda x: x[0, -1:],
}


def _classes(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(rows)) % rows.shape[-1]


CLASS_TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int64": _classes,
    "uint8": lambda rows: _classes(rows).to(torch.uint8),
    "int32": lambda rows: _classes(rows).to(torch.int32),
    "some ignored": lambda rows: _classes(rows).masked_fill(_classes(rows) % 2 == 0, -100),
    "all ignored": lambda rows: torch.full_like(_classes(rows), -100),
    "probabilities": lambda rows: torch.linspace(0, 3, rows.numel(), dtype=rows.dtype).reshape(rows.shape).softmax(-1),
    "another shape": lambda rows: _classes(rows).unsqueeze(-1),
}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "size_average": {"size_average": False},
    "reduce": {"reduce": False},
}


def _like(rows: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0, 1, rows.numel(), dtype=rows.dtype).reshape(rows.shape)


def _signs(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.numel()).reshape(rows.shape) % 2 * 2.0 - 1


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "nll_loss": lambda x, **how: F.nll_loss(x.log_softmax(-1), _classes(x), **how),
    "kl_div": lambda x, **how: F.kl_div(x.log_softmax(-1), _like(x).softmax(-1), **how),
    "binary_cross_entropy_with_logits": lambda x, **how: F.binary_cross_entropy_with_logits(x, _like(x), **how),
    "binary_cross_entropy": lambda x, **how: F.binary_cross_entropy(x.sigmoid(), _like(x), **how),
    "mse_loss": lambda x, **how: F.mse_loss(x, _like(x), **how),
    "mse_loss, as target": lambda x, **how: F.mse_loss(_like(x), x, **how),
    "l1_loss": lambda x, **how: F.l1_loss(x, _like(x), **how),
    "smooth_l1_loss": lambda x, **how: F.smooth_l1_loss(x, _like(x), **how),
    "huber_loss": lambda x, **how: F.huber_loss(x, _like(x), **how),
    "multi_margin_loss": lambda x, **how: F.multi_margin_loss(x, _classes(x), **how),
    "multilabel_margin_loss": lambda x, **how: F.multilabel_margin_loss(x, _classes(x)[:, None].expand_as(x), **how),
    "multilabel_soft_margin_loss": lambda x, **how: F.multilabel_soft_margin_loss(x, _like(x), **how),
    "soft_margin_loss": lambda x, **how: F.soft_margin_loss(x, _signs(x), **how),
    "hinge_embedding_loss": lambda x, **how: F.hinge_embedding_loss(x, _signs(x), **how),
    "cosine_embedding_loss": lambda x, **how: F.cosine_embedding_loss(x, _like(x), _signs(x)[:, 0], **how),
    "margin_ranking_loss": lambda x, **how: F.margin_ranking_loss(x, _like(x), _signs(x), **how),
    "triplet_margin_loss": lambda x, **how: F.triplet_margin_loss(x, _like(x), x.flip(0), **how),
    "poisson_nll_loss": lambda x, **how: F.poisson_nll_loss(x, _like(x), **how),
    "gaussian_nll_loss": lambda x, **how: F.gaussian_nll_loss(x, _like(x), x.exp().clamp(max=9), **how),
}
ALL_ROWS = [pytest.param(name, marks=[] if name == "shifted" else [pytest.mark.full]) for name in ROWS]


_DAILY = ("alone", "added to the loss")
ALL_USES = [pytest.param(name, marks=[] if name in _DAILY else [pytest.mark.full]) for name in USES]


@pytest.mark.parametrize("use", ALL_USES)
@pytest.mark.parametrize("rows", ALL_ROWS)
def test_cross_entropy(models, rows, use):
    for target in CLASS_TARGETS.values():
        for how in REDUCTIONS.values():
            for more in (
                {},
                {"label_smoothing": 0.1},
                {"weight": torch.linspace(0.5, 1.5, VOCAB, dtype=torch.float64)},
            ):

                def loss(logits, target=target, how=how, more=more):
                    taken = ROWS[rows](logits)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        return F.cross_entropy(taken, target(taken), **how, **more)

                assert_same(models, lambda out, loss=loss: USES[use](out, loss))


@pytest.mark.parametrize(
    "use", [pytest.param(u, marks=[] if u == "added to the loss" else [pytest.mark.full]) for u in USES]
)
@pytest.mark.parametrize("rows", ALL_ROWS)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_torch(models, name, rows, use):
    if rows == "no row" and name in ("multi_margin_loss", "multilabel_margin_loss"):
        pytest.skip("torch leaves this loss of no row uninitialised")
    for how in REDUCTIONS.values():

        def loss(logits, how=how):
            return LOSSES[name](ROWS[rows](logits), **how)

        assert_same(models, lambda out, loss=loss: USES[use](out, loss))


def _with_a_gradient(owner: Any) -> list[str]:
    """Names of `owner`'s functions that take one tensor and return floating tensors with a gradient."""
    names = []
    for name in sorted(set(dir(owner))):
        if name.startswith("_") or name in (
            "backward",
            "requires_grad_",
            "retain_grad",
            "share_memory_",
            "cuda",
            "xpu",
        ):
            continue
        if name.startswith(("rand", "to_", "mkldnn", "is_", "set_", "get_", "hpu", "mtia", "ipu")):
            continue
        x = (
            torch.linspace(-2, 2, BATCH * SEQ * VOCAB, dtype=torch.float64).reshape(BATCH, SEQ, VOCAB)
        ).requires_grad_()
        function = getattr(owner, name)
        if not callable(function) or isinstance(function, type):
            continue
        try:
            torch.manual_seed(1)
            result = function(x * 1.0)
        except Exception:
            continue
        first = result[0] if isinstance(result, (tuple, list)) and len(result) else result
        if isinstance(first, torch.Tensor) and first.is_floating_point() and first.requires_grad:
            names.append(name)
    return names


@pytest.mark.parametrize(
    "owner", [torch.Tensor, F, pytest.param(torch, marks=pytest.mark.full)], ids=["Tensor", "functional", "torch"]
)
def test_every_function_of_one_tensor(models, owner):
    names = _with_a_gradient(owner)
    assert len(names) > 30, names

    def first(result):
        return result[0] if isinstance(result, (tuple, list)) else result

    for name in names:

        def function(logits, name=name):
            torch.manual_seed(2)
            return first(getattr(owner, name)(logits))

        try:
            assert_same(models, lambda out, function=function: USES["added to the loss"](out, function))
        except AssertionError as error:
            raise AssertionError(name) from error


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def _in_place(logits, change):
    change(logits)
    return logits.log_softmax(-1)


def _hooked(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """What is computed of `function(x)`, whose gradient a hook doubles."""
    derived = function(x)
    derived.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(derived.reshape(-1, VOCAB), IDS.flatten(), reduction="none")


def _retained(x: torch.Tensor) -> torch.Tensor:
    derived = x.view(-1, VOCAB)
    derived.retain_grad()
    derived.pow(2).sum().backward(retain_graph=True)
    return x * derived.grad.view_as(x)


def _gradient(x: torch.Tensor) -> torch.Tensor:
    derived = x.float()
    return x * torch.autograd.grad(derived.exp().sum(), derived, retain_graph=True)[0]


def _read_in_inference_mode(x: torch.Tensor, read: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    with torch.inference_mode():
        read(x)
    return x.softmax(-1)


class Halved(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class Tripled(torch.autograd.Function):
    """Returns its input, and so reads nothing of it."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def _changed_by_a_function(x: torch.Tensor) -> torch.Tensor:
    Halved.apply(x)
    return x.log_softmax(-1)


class HalvedAtOnce(Halved):
    """Returns what the method that changes its input in place returns."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)


def _watched(x: torch.Tensor, watch: Callable, how: str) -> torch.Tensor:
    """What a gradient with respect to logits that are changed in place says, watched before or after the change."""
    x = x if how.startswith("logits") else x[:, :-1]
    seen = watch(x) if how.endswith("before") else None
    x.mul_(2.0)
    seen = seen or watch(x)
    loss = x.square().sum()
    loss.backward(retain_graph=True)
    return x * seen(loss)


def _retain_grad(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    x.retain_grad()
    return lambda loss: x.grad


def _register_hook(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    gradients = []
    x.register_hook(gradients.append)
    return lambda loss: gradients[-1]


WATCHES: dict[str, Callable] = {
    "retain_grad": _retain_grad,
    "register_hook": _register_hook,
    "autograd.grad": lambda x: lambda loss: torch.autograd.grad(loss, x, retain_graph=True)[0],
}
WHERE = ["logits, before", "logits, after", "a slice, before", "a slice, after"]


def _softmax(x):
    return x.softmax(-1)


def _changed_between_copies(x: torch.Tensor) -> torch.Tensor:
    before = x[:, :-1].reshape(-1, VOCAB)
    x[..., 4] = -10.0
    between = x[:, :-1].reshape(-1, VOCAB)
    x[..., 5] = -10.0
    return sum(F.cross_entropy(rows, IDS[:, 1:].flatten()) for rows in (before, between, x[:, 1:].flatten(0, 1)))


def _changed_in_place(x: torch.Tensor) -> list[torch.Tensor]:
    rows = x.view(-1, VOCAB)  # made before the change, sees it all the same
    copied, scaled = x.clone(), x * 2.0  # and these do not
    x[..., 3] = -1.0
    return [x.view(-1, VOCAB), rows, copied.view(-1, VOCAB), scaled.view(-1, VOCAB)]


MASK, ROW = IDS % 4 == 0, torch.linspace(-1, 2, VOCAB, dtype=torch.float64)
PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "themselves": lambda x: x,
    "a Function": Squared.apply,
    "a Function of a slice": lambda x: Squared.apply(x[:, 1:].float()),
    "a Function and more": lambda x: Squared.apply(x).mean() + x.mean() + x[:, 1:].exp().mean(),
    "script": lambda x: torch.jit.script(_softmax)(x),
    "compile": lambda x: torch.compile(_softmax, backend="eager")(x),
    "copies before and between changes in place": _changed_between_copies,
    "views and copies around a change in place": lambda x: torch.stack(_changed_in_place(x)),
    "einsum": lambda x: torch.einsum("bsv,bsv->b", x, x),
    "gather": lambda x: x.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)),
    "index by a mask": lambda x: x[MASK],
    "index by None and ...": lambda x: x[None, ..., 2:5],
    "cat": lambda x: torch.cat([x, x * 2], -1),
    "checkpoint": lambda x: checkpoint(lambda y: y.softmax(-1), x, use_reentrant=False),
    "checkpoint of a mask": lambda x: checkpoint(lambda y: (y * (IDS > 5)[..., None]).square(), x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(lambda y: y.softmax(-1), x, use_reentrant=True),
    "a clone changed in place": lambda x: x.clone().mul_(2).add_(1),
    "changed in place": lambda x: _in_place(x, lambda y: y.mul_(0.5)),
    "assigned in place": lambda x: _in_place(x, lambda y: y.__setitem__((..., 3), -1.0)),
    "a view changed in place": lambda x: _in_place(x, lambda y: y.view(-1, VOCAB)[0].zero_()),
    "nll of a temperature": lambda x: F.cross_entropy((x / 2).view(-1, VOCAB), IDS.flatten(), reduction="none"),
    "softcap": lambda x: F.cross_entropy((torch.tanh(x / 5) * 5).view(-1, VOCAB), IDS.flatten()),
    "a row for each position": lambda x: F.cross_entropy((x + torch.eye(SEQ, VOCAB)).view(-1, VOCAB), IDS.flatten()),
    "a row after a softcap": lambda x: F.cross_entropy((torch.tanh(x) + ROW).view(-1, VOCAB), IDS.flatten()),
    "two softcaps": lambda x: F.cross_entropy(torch.tanh(torch.tanh(x)).view(-1, VOCAB), IDS.flatten()),
    "scaled by a tensor": lambda x: F.cross_entropy((x * torch.tensor(0.5)).view(-1, VOCAB), IDS.flatten()),
    "of classes in the middle": lambda x: F.cross_entropy(x.transpose(1, 2), IDS),
    "of float": lambda x: F.cross_entropy(x.float().view(-1, VOCAB), IDS.flatten()),
    "a module": lambda x: torch.nn.CrossEntropyLoss(label_smoothing=0.2)(x.view(-1, VOCAB), IDS.flatten()),
    "a student's divergence": lambda x: F.kl_div(F.log_softmax(x / 2, -1), F.softmax(x.detach(), -1), reduction="sum"),
    "a hook on a slice": lambda x: _hooked(x, lambda y: y[:]),
    "a hook on a cast": lambda x: _hooked(x, torch.Tensor.float),
    "a hook on a temperature": lambda x: _hooked(x, lambda y: y / 2),
    "retain_grad of a view": _retained,
    "gradient with respect to a cast": _gradient,
    "argmax in inference mode": lambda x: _read_in_inference_mode(x, lambda y: y.argmax(-1)),
    "a slice in inference mode": lambda x: _read_in_inference_mode(x, lambda y: y[:, :-1].softmax(-1)),
    "a loss in inference mode": lambda x: _read_in_inference_mode(x, lambda y: F.cross_entropy(y[:, 0], IDS[:, 0])),
    "changed in place by a Function": _changed_by_a_function,
    "changed in place by a Function, at once": lambda x: HalvedAtOnce.apply(x).log_softmax(-1),
    "backward of what was changed in place": lambda x: (x.mul_(2), x.backward(IDS[..., None] + x.detach()), x * 0)[-1],
    **{
        f"{name} of {how} a change in place": lambda x, watch=watch, how=how: _watched(x, watch, how)
        for name, watch in WATCHES.items()
        for how in WHERE
        if name == "retain_grad" or how in ("logits, after", "a slice, after")  # hooks stay with what they were put on
    },
    "keywords of torch": lambda x: torch.div(x, 0.5, rounding_mode=None).reshape(shape=(-1, VOCAB)),
    "returned by a Function": lambda x: F.cross_entropy(Tripled.apply(x).view(-1, VOCAB), IDS.flatten()),
    "times nan": lambda x: F.cross_entropy((x * float("nan")).view(-1, VOCAB), IDS.flatten()),
    "a softcap of inf": lambda x: F.cross_entropy((torch.tanh(x) * float("inf")).view(-1, VOCAB), IDS.flatten()),
    "forward-mode": lambda x: torch.func.jvp(torch.exp, (x,), (torch.ones_like(x),))[1] * x,
    "requires_grad of what is detached": lambda x: x.detach().requires_grad_() + x,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(models, name):
    for use in USES.values():
        if "in place" in name and use in (USES["twice"], USES["before the loss's backward"], USES["read before"]):
            continue  # the second use would see the first one's change
        if " a change in place" in name and use is USES["added to the loss"]:
            continue  # a loss that does not pass by watched logits is refused
        assert_same(models, lambda out, use=use: use(out, PROGRAMS[name]))


SHARED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a slice, then all": lambda x: (Halved.apply(x[:, :-1]), x)[1],
    "all, then a view": lambda x: (x.view(-1, VOCAB), Halved.apply(x))[0],
    "a cast that is none, then all": lambda x: (HalvedAtOnce.apply(x.to(x.dtype)), x)[1],
    "after a change": lambda x: (x.mul_(2), Squared.apply(x))[1],
    "after a change of a view": lambda x: (x[..., :3].zero_(), Squared.apply(x))[1],
    "after a change, read nowhere": lambda x: (x.mul_(2), Tripled.apply(x))[1].exp(),
    "after a cut": lambda x: (x.detach_(), Squared.apply(x) + torch.ones(1, requires_grad=True))[1],
    "a checkpoint after a change": lambda x: (x.mul_(2), checkpoint(torch.sin, x, use_reentrant=True))[1],
    "a script after a change": lambda x: (x.mul_(2), torch.jit.script(_softmax)(x))[1],
}


@pytest.mark.parametrize("name", SHARED)
def test_functions_and_changes_in_place_are_refused(models, name):
    expected_error, _ = outcome(models[0], lambda out: backward(SHARED[name](out.logits)))
    error, _ = outcome(models[1], lambda out: backward(SHARED[name](out.logits)))
    assert not expected_error and ("GradientWouldBeLost" in error or "TorchScript" in error), error


@pytest.mark.parametrize("change", ["unsqueeze_(0)", "transpose_(0, 1)", "squeeze_()", "t_()", "swapaxes_(1, 2)"])
def test_a_shape_changed_in_place(models, change):
    def program(out):
        x = out.logits[0] if change == "t_()" else out.logits
        other = x.view(-1, VOCAB)
        eval(f"x.{change}")
        assert hash(x) == id(x)
        return torch.tensor([1.0 * x.dim(), len(x), *x.shape, *other.shape]), backward(
            x.exp() * (x.shape[-1] + x.size(0))
        )

    assert_same(models, program)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_as_the_model_s_loss(models, name):
    try:
        for model in models:
            model.loss_function = lambda logits, **_: PROGRAMS[name](logits).mean()
        assert_same(models, lambda out: (backward(out.loss), out.logits))
    finally:
        for model in models:
            del model._loss_function


def _hook(model: Any) -> Callable:
    return model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2).remove


def _freeze(model: Any) -> Callable:
    model.lm_head.weight.requires_grad_(False)
    return lambda: model.lm_head.weight.requires_grad_(True)


@pytest.mark.parametrize("read", [torch.exp, lambda x: F.cross_entropy(x[:, 1:].flatten(0, 1), IDS[:, 1:].flatten())])
@pytest.mark.parametrize("change", [_hook, _freeze, lambda model: model.eval().train])
def test_logits_are_those_of_the_forward(models, change, read):
    """Whatever is done to the model before they are read."""

    def program(out):
        undo = [change(model) for model in models]
        value = read(out.logits)
        for each in undo:
            each()
        return backward(value)

    assert_same(models, program)


class Subclass(torch.nn.Parameter):
    """A plain one."""


class Doubled(torch.Tensor):
    """Changes what F.linear does with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return F.linear(args[0], args[1].as_subclass(torch.Tensor) * 2)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("kind", [Subclass, lambda t: t.as_subclass(Doubled).requires_grad_()])
def test_weights_of_another_class(models, kind):
    before = [model.lm_head.weight for model in models]
    try:
        for model, weight in zip(models, before):
            model.lm_head._parameters["weight"] = kind(weight.detach().clone())
        assert isinstance(models[1](input_ids=IDS, labels=IDS).logits, torch.Tensor)
        assert_same(models, lambda out: backward(out.logits.exp().sum() + out.loss))
    finally:
        for model, weight in zip(models, before):
            model.lm_head.weight = weight
