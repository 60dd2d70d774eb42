"""Whatever a program makes of `outputs.logits` has the value and the gradients that it has in the unpatched model.

The cases are generated: every loss of `torch.nn.functional` with every form of target, reduction and slice, and every
function of torch that takes one tensor and has a gradient; beside them, what programs do with tensors in other ways.
Each is taken alone, added to the model's loss, and twice from one forward.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")

import liger_hw  # noqa: E402
from liger_hw.transformers.tiny import tiny_model  # noqa: E402

pytestmark = pytest.mark.cpu

VOCAB, IDS = 13, torch.tensor([[3, 5, 7, 11, 4], [6, 3, 12, 8, 9]])
LABELS = IDS.masked_fill(IDS == 12, -100)
SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}
FURTHER = {
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "GraniteForCausalLM": {"logits_scaling": 3.0},
    "CohereForCausalLM": {"logit_scale": 0.3},
    "MixtralForCausalLM": {"output_router_logits": True},
    "BartForConditionalGeneration": {"decoder_start_token_id": 1},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 1},
    "GPT2LMHeadModel": {},
}
PARTS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared", "experts")


class Pair:
    """An unpatched model and a copy of it, of which the head and the loss are patched."""

    def __init__(self, class_name, **own):
        self.unpatched = tiny_model(getattr(transformers, class_name), **{**SMALL, **own})
        self.patched = copy.deepcopy(self.unpatched)
        liger_hw.patch(self.patched, activations="keep", **dict.fromkeys(PARTS, False))

    def results(self, case, times=1, model_s_loss=0.0):
        """For each model: (what `case(outputs, model)` gives, the gradients), or the error that it ends with."""
        return [self._of(model, case, times, model_s_loss) for model in (self.unpatched, self.patched)]

    def _of(self, model, case, times, model_s_loss):
        torch.manual_seed(0)
        model.zero_grad()
        outputs = model(input_ids=IDS, labels=LABELS)
        assert type(outputs.logits) is torch.Tensor if model is self.unpatched else outputs.logits.is_deferred
        try:
            torch.manual_seed(0)
            values = [case(outputs, model) for _ in range(times)]
            loss = sum(value.sum() for value in values) + model_s_loss * outputs.loss
            loss.backward()
        except Exception as error:
            return type(error)
        return values[0].detach().clone(), [p.grad for p in model.parameters()]


def differences(pair, cases, modes=((1, 0.0), (1, 0.5), (2, 0.0))):
    """name -> what differs, of cases {name: function of (outputs, model)}; each raises in both models or in none."""
    wrong = {}
    for name, case in cases.items():
        for mode in modes:
            expected, found = pair.results(case, *mode)
            try:
                if isinstance(expected, type) or isinstance(found, type):
                    assert expected is found, (expected, found)
                    continue
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
            except AssertionError as error:
                wrong[name, mode] = str(error)[:200]
                break
    return wrong


@pytest.fixture(scope="module")
def llama():
    return Pair("LlamaForCausalLM")


@pytest.fixture(scope="module", params=FURTHER)
def further(request):
    return Pair(request.param, **FURTHER[request.param])


# -- losses ----------------------------------------------------------------------------------------------------------

FORMS = {
    "rows": lambda x: x.view(-1, VOCAB),
    "shifted rows": lambda x: x[:, :-1].contiguous().view(-1, VOCAB),
    "cast rows": lambda x: x.float().flatten(0, 1)[1:],
    "double rows": lambda x: x.double().reshape(-1, VOCAB),
    "masked rows": lambda x: x[LABELS != -100],
    "scaled row": lambda x: (x / 0.7)[0, 2],
    "no rows": lambda x: x[:, :0].reshape(-1, VOCAB),
    "classes second": lambda x: x.transpose(1, 2),
    "part of the classes": lambda x: x[0, :, 2:7],
    "copy": lambda x: x.clone()[1],
}


def numbers(x, dtype=torch.int64, classes=None):
    """A class for each row of logits, whose classes are the second dimension, or the only one."""
    n = classes or (x.shape[0] if x.dim() == 1 else x.shape[1])
    shape = x.shape[:1] + x.shape[2:] if x.dim() > 1 else ()
    return (torch.arange(shape.numel()).reshape(shape) * 5 % n).to(dtype)


TARGETS = {
    "int64": numbers,
    "uint8": lambda x: numbers(x, torch.uint8),
    "int32": lambda x: numbers(x, torch.int32),
    "ignored": lambda x: numbers(x).masked_fill(numbers(x) % 3 == 0, -100),
    "all ignored": lambda x: torch.full_like(numbers(x), -100),
    "soft": lambda x: x.detach().cos().softmax(1 if x.dim() > 1 else 0),
    "soft with a gradient": lambda x: x.sin().softmax(1 if x.dim() > 1 else 0),
    "longer": lambda x: F.pad(numbers(x).reshape(-1), (0, 1)),
}
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "another ignored": {"ignore_index": 5},
    "size_average": {"size_average": False},
    "reduce": {"reduce": False},
    "weighted": {"weight": True},
}


def cross_entropy(form, target, options):
    def case(outputs, model):
        x = FORMS[form](outputs.logits)
        kwargs = dict(OPTIONS[options])
        if "weight" in kwargs:
            kwargs["weight"] = torch.linspace(0.5, 2.0, x.shape[min(x.dim() - 1, 1)], dtype=x.dtype)
        return F.cross_entropy(x, TARGETS[target](x), **kwargs)

    return case


CROSS_ENTROPIES = {names: cross_entropy(*names) for names in itertools.product(FORMS, TARGETS, OPTIONS)}
DAILY = {n for n in CROSS_ENTROPIES if n[0] == "rows" or "mean" in n and n[1] != "soft" or n[1:] == ("soft", "rows")}


def rows_of(outputs):
    return outputs.logits[:, 1:].reshape(-1, VOCAB)


LOSSES = {
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().cos().sigmoid()),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x.detach().cos(), torch.ones(len(x))),
    "cross_entropy": lambda x: F.cross_entropy(x, numbers(x)),
    "ctc_loss": lambda x: F.ctc_loss(x.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), (len(x),), (2,)),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x.detach().cos(), x.exp()),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, x.detach().sign()),
    "huber_loss": lambda x: F.huber_loss(x, x.detach().cos(), delta=0.3),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), x.detach().cos().softmax(-1), reduction="batchmean"),
    "l1_loss": lambda x: F.l1_loss(x, x.detach().cos()),
    "linear_cross_entropy": lambda x: F.linear_cross_entropy(x, torch.eye(VOCAB), numbers(x)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x.cos(), torch.ones_like(x).detach()),
    "mse_loss": lambda x: F.mse_loss(x, x.detach().cos()),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, numbers(x)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, torch.arange(VOCAB).expand(len(x), -1)),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, x.detach().sigmoid()),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(x, -1), numbers(x)),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, x.detach().cos()),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach().cos()),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x.detach().sign()),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x.detach().cos(), x.sin()),
    "triplet_margin_with_distance_loss": lambda x: F.triplet_margin_with_distance_loss(x, x.detach().cos(), x.sin()),
}


def test_every_loss_of_torch_is_among_them():
    names = {name for name in dir(F) if name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"}
    assert {name for name in names if not name.startswith("_")} <= LOSSES.keys()


@pytest.mark.parametrize("part", ["daily", pytest.param("every", marks=pytest.mark.full)])
def test_cross_entropy(llama, part):
    cases = {n: case for n, case in CROSS_ENTROPIES.items() if (n in DAILY) == (part == "daily")}
    assert not differences(llama, cases, [(1, 0.0)] if part == "daily" else [(1, 0.0), (1, 0.5), (2, 0.0)])


def test_other_losses(llama):
    cases = {name: lambda o, m, loss=loss: loss(rows_of(o)) for name, loss in LOSSES.items() if hasattr(F, name)}
    assert not differences(llama, cases)


# -- functions of one tensor -----------------------------------------------------------------------------------------

_LEFT_OUT = ("backward", "retain_grad", "register_hook", "cuda", "xpu", "rnn", "dropout", "bernoulli", "quantized")
_LEFT_OUT += (
    "ipu",
    "mkldnn",
    "vulkan",
    "mps",
    "__reduce",
    "__deepcopy__",
    "_make",
    "__torch",
    "swap_tensors",
    "hpu",
    "mtia",
)


def functions_of_one_tensor():
    """name -> function, of those that have a gradient and the same result twice."""
    namespaces = {"": torch, "Tensor.": torch.Tensor, "F.": F, "special.": torch.special}
    namespaces |= {"fft.": torch.fft, "linalg.": torch.linalg}
    found = {}
    for prefix, namespace in namespaces.items():
        for name in dir(namespace):
            function = getattr(namespace, name)
            is_left_out = name.startswith("_") and not name.startswith("__") or any(w in name for w in _LEFT_OUT)
            if is_left_out or not callable(function) or isinstance(function, type):
                continue
            first, second = (_tried(function) for _ in range(2))
            if first is not None and second is not None and torch.equal(first, second):
                found[prefix + name] = lambda o, m, f=function: real_sum(f(o.logits))
    return found


def _tried(function):
    x = torch.linspace(0.1, 0.9, 2 * 5 * VOCAB).reshape(2, 5, VOCAB).requires_grad_() * 1.0
    try:
        result = real_sum(function(x))
        result.backward()
        return result.detach() if result.isfinite() else None
    except Exception:
        return None


def real_sum(result):
    """The sum of what has a gradient in a result, weighted so that its elements differ."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    total = 0.0
    for part in parts:
        if isinstance(part, torch.Tensor) and part.requires_grad:
            part = torch.view_as_real(part) if part.is_complex() else part
            total = total + (part * torch.linspace(0.5, 1.5, part.numel()).view(part.shape)).sum()
    return total


def test_functions_of_one_tensor(llama, recwarn):
    cases = functions_of_one_tensor()
    assert len(cases) > 250, "torch has fewer of them than this test was made for"
    assert not differences(llama, cases, [(1, 0.0), (2, 0.3)])
