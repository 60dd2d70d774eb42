"""Edges of the divergences and the distillation losses: ties, impossible classes, nothing that counts, their
definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import assert_others_get_no_gradient, few_sizes, make

from liger_hw.kernels.heads.fused_linear_jsd import fused_linear_jsd_reference, liger_fused_linear_jsd
from liger_hw.kernels.heads.fused_linear_kl_div import fused_linear_kl_div_reference, liger_fused_linear_kl_div
from liger_hw.kernels.heads.fused_linear_log_probs import fused_linear_log_probs_reference, liger_fused_linear_log_probs
from liger_hw.kernels.losses.fused_ce_tvd import fused_ce_tvd_reference, liger_fused_ce_tvd
from liger_hw.kernels.losses.jsd import jsd_reference, liger_jsd
from liger_hw.kernels.losses.kl_div import kl_div_reference, liger_kl_div
from liger_hw.kernels.losses.tvd import liger_tvd, tvd_reference
from liger_hw.registry import get_op

ROWS, COLS, HIDDEN = 6, 37, 5


def _log_probs(generator, lane=None, rows=ROWS, cols=COLS, dtype=torch.float32):
    x = torch.log_softmax(torch.randn(rows, cols, generator=generator, dtype=torch.float64), -1).to(dtype)
    return x if lane is None else x.to(lane.device)


def _grad(loss, x):
    return torch.autograd.grad(loss, x)[0]


# -- the references against torch's functions and the papers' formulas, in fp64 ---------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.filterwarnings("ignore:reduction")
def test_kl_div_is_torchs(generator, reduction, log_target):
    x, t = (_log_probs(generator, dtype=torch.float64) for _ in range(2))
    t = t if log_target else t.exp()
    found = kl_div_reference(x, t, reduction=reduction, log_target=log_target)
    torch.testing.assert_close(found, F.kl_div(x, t, reduction=reduction, log_target=log_target))


@pytest.mark.cpu
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_jsd_is_the_papers(generator, beta):
    x, y = (_log_probs(generator, dtype=torch.float64) for _ in range(2))
    m = (beta * y.exp() + (1 - beta) * x.exp()).log()
    expected = beta * (y.exp() * (y - m)).sum(-1) + (1 - beta) * (x.exp() * (x - m)).sum(-1)
    if beta in (0.0, 1.0):  # the ends are the two KL divergences, not the zero that the mixture gives there
        expected = F.kl_div(x, y.exp(), reduction="none").sum(-1) if not beta else (x.exp() * (x - y)).sum(-1)
    labels = torch.tensor([1, -100, 3, 4, -100, 6])
    torch.testing.assert_close(jsd_reference(x, y, None, beta), expected.mean())
    torch.testing.assert_close(jsd_reference(x, y, labels, beta), expected[labels != -100].mean())


@pytest.mark.cpu
def test_heads_are_a_linear_layer_and_the_loss(generator):
    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, w, x2, w2 = random(ROWS, HIDDEN), random(COLS, HIDDEN), random(ROWS, 3), random(COLS, 3)
    labels = torch.tensor([1, -100, 3, 4, -100, 6])
    student, teacher = torch.log_softmax(x @ w.t() / 2, -1), torch.log_softmax(x2 @ w2.t() / 2, -1)
    found = fused_linear_jsd_reference(x, w, x2, w2, labels, 0.3, temperature=2.0)
    torch.testing.assert_close(found, jsd_reference(student, teacher, labels, 0.3))
    counted, target = labels != -100, teacher.exp()
    for reduction in ("batchmean", "mean", "sum"):
        found = fused_linear_kl_div_reference(x, w, target, labels, reduction, temperature=2.0)
        torch.testing.assert_close(found, kl_div_reference(student[counted], target[counted], reduction=reduction))
    ids = torch.tensor([3, 0, 3])
    options = {"temperature": 2.0, "return_entropy": True, "return_top1": True, "selected_token_ids": ids}
    logp, entropy, is_top1, chosen = fused_linear_log_probs_reference(x, w, labels, **options)
    torch.testing.assert_close(-logp, F.cross_entropy(x @ w.t() / 2, labels, reduction="none"))
    assert torch.equal(is_top1, counted & ((x @ w.t()).argmax(1) == labels))
    exact = torch.distributions.Categorical(logits=x @ w.t() / 2).entropy()
    torch.testing.assert_close(entropy, torch.where(counted, exact, 0.0))
    torch.testing.assert_close(chosen, torch.where(counted[:, None], student[:, ids], 0.0))
    ce, tvd = fused_ce_tvd_reference(x @ w.t(), x2 @ w2.t(), labels)
    torch.testing.assert_close(ce, F.cross_entropy(x @ w.t(), labels, reduction="none"))
    exact = tvd_reference((x @ w.t()).softmax(-1), (x2 @ w2.t()).softmax(-1), labels, "none").sum(-1)
    torch.testing.assert_close(tvd, exact)


# -- edges -----------------------------------------------------------------------------------------------------------


def test_a_tie_has_no_slope(lane, generator):
    p = _log_probs(generator, lane).exp().requires_grad_()
    q = p.detach().clone()
    q[0, :5] *= 1.5
    grad = _grad(liger_tvd(p, q, reduction="sum"), p)
    assert (grad[0, :5] == -0.5).all() and not grad[0, 5:].any() and not grad[1:].any()


def test_impossible_classes(lane, generator):
    """Minus infinity, or a probability of zero, on both sides: nothing is lost, and nothing becomes nan."""
    x, y = _log_probs(generator, lane), _log_probs(generator, lane)
    mask = torch.zeros(COLS, dtype=torch.bool, device=lane.device)
    mask[::3] = True
    x, y = (torch.log_softmax(t.masked_fill(mask, float("-inf")), -1) for t in (x, y))
    for loss in (
        lambda a, b: liger_kl_div(a, b.exp(), reduction="sum"),
        lambda a, b: liger_kl_div(a, b, reduction="sum", log_target=True),
        lambda a, b: ROWS * liger_jsd(a, b, None, 0.0),
        lambda a, b: ROWS * liger_jsd(a, b, None, 1.0),
        lambda a, b: ROWS * liger_jsd(a, b, None, 0.3),
    ):
        whole = x.clone().requires_grad_()
        left = x[:, ~mask].clone().requires_grad_()
        found, expected = loss(whole, y), loss(left, y[:, ~mask].contiguous())
        torch.testing.assert_close(found, expected)
        grad = _grad(found, whole)
        torch.testing.assert_close(grad[:, ~mask], _grad(expected, left))
        assert not grad[:, mask].any()


def test_jsd_of_small_probabilities_and_near_equals(lane, generator):
    """fp32 keeps what fp64 says where e^x underflows, and where the two distributions differ in the fourth digit."""
    x = _log_probs(generator, dtype=torch.float64)
    far = x.clone()
    far[:, 0] = -110.0
    for a, b in ((far, x), (x, far), (x, x + 1e-3 * torch.randn(x.shape, generator=generator, dtype=torch.float64))):
        a32, b32 = a.float().to(lane.device).requires_grad_(), b.float().to(lane.device)
        exact = a32.detach().double().cpu().requires_grad_()
        expected = jsd_reference(exact, b32.double().cpu(), None, 0.5)
        found = liger_jsd(a32, b32, None, 0.5)
        torch.testing.assert_close(
            found.double().cpu(), expected, rtol=0, atol=2e-7 * float(a32.detach().exp().sum(-1).max())
        )
        torch.testing.assert_close(_grad(found, a32).double().cpu(), _grad(expected, exact), rtol=1e-4, atol=1e-8)


def test_kl_div_of_denormal_probabilities(lane, generator):
    """A fast logarithm may take them for zero; their terms are nothing, whatever eps."""
    x, y = _log_probs(generator, lane), _log_probs(generator, lane).exp()
    y[:, ::2] = 1e-40
    call = {"eps": 0.0, "reduction": "sum"}
    torch.testing.assert_close(liger_kl_div(x, y, **call), kl_div_reference(x, y, **call))
    h, w = torch.randn(ROWS, HIDDEN, generator=generator).to(lane.device), torch.ones(COLS, HIDDEN, device=lane.device)
    found = liger_fused_linear_kl_div(h, w, y, eps=0.0)
    torch.testing.assert_close(found, fused_linear_kl_div_reference(h, w, y, eps=0.0))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e9])
def test_logits_of_any_size(lane, generator, beta, size):
    """Only differences of logits matter, however large they are, and on whichever side."""
    h = torch.randn(ROWS, HIDDEN, generator=generator).to(lane.device)
    one = torch.ones(ROWS, 1, device=lane.device)
    w, w2 = (torch.randn(COLS, HIDDEN, generator=generator).mul(size**0.5).to(lane.device) for _ in range(2))
    shift = torch.full((COLS, 1), size, device=lane.device)
    x = torch.cat((h, one), 1)
    for student, teacher in ((shift, 0 * shift), (0 * shift, shift), (shift, -shift)):
        heads = torch.cat((w, student), 1), torch.cat((w2, teacher), 1)
        logits = [F.linear(x, head) for head in heads]
        eye = torch.eye(COLS, device=lane.device)  # rounded logits, handed through exactly
        given = logits[0].requires_grad_()
        found = liger_fused_linear_jsd(given, eye, logits[1], eye, jsd_beta=beta)
        exact = given.detach().double().requires_grad_()
        expected = fused_linear_jsd_reference(exact, eye.double(), logits[1].double(), eye.double(), jsd_beta=beta)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        terms = max(1.0, float(expected.detach()))  # RKL's slopes are as large as the loss, and cancel where q is 1
        grads = _grad(found, given).double(), _grad(expected, exact)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6 * terms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta, deviation", [(0.0, 3), (0.0, 30), (0.5, 3), (0.5, 10), (1.0, 3), (1.0, 30)])
def test_logits_of_two_heads_are_not_rounded(lane, generator, beta, deviation, dtype):
    """16-bit heads, by the spread of their logits, against fp64.

    Two roundings to 16 bits are left: of the gradient of the logits, before it is multiplied, and of the product. Each
    is at most half an eps of a number, and independent of the next number's, so in norm both are at most eps.
    """
    if lane.name == "interpret" and dtype is torch.bfloat16:
        pytest.skip("the interpreter's bf16 is not right")
    n_rows, hidden, vocab = 24, 64, 400

    def draw(rows, scale):
        return (scale * torch.randn(rows, hidden, generator=generator)).to(dtype)

    x, x2, w, w2 = (draw(*of) for of in [(n_rows, 1)] * 2 + [(vocab, deviation / hidden**0.5)] * 2)
    given, exact = ([t.to(lane.device).requires_grad_() for t in (x, w)], [t.double().requires_grad_() for t in (x, w)])
    found = liger_fused_linear_jsd(*given, x2.to(lane.device), w2.to(lane.device), jsd_beta=beta)
    expected = fused_linear_jsd_reference(*exact, x2.double(), w2.double(), jsd_beta=beta)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=0.0)
    for grad, wanted in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, exact)):
        assert (grad.double().cpu() - wanted).norm() <= torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_student_like_its_teacher(lane, generator, beta):
    h, w = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(COLS, HIDDEN, generator=generator)
    h, w = h.to(lane.device).requires_grad_(), w.to(lane.device)
    loss = liger_fused_linear_jsd(h, w, h.detach(), w, jsd_beta=beta)
    assert abs(float(loss.detach())) < 1e-6 and float(_grad(loss, h).abs().max()) < 1e-6


def test_one_class(lane):
    """A vocabulary of one: every distribution is the same, every loss and gradient through a softmax zero."""
    x = torch.zeros(3, 1, device=lane.device).requires_grad_()
    y, labels = torch.zeros(3, 1, device=lane.device), torch.zeros(3, dtype=torch.long, device=lane.device)
    h = torch.randn(3, 4, device=lane.device).requires_grad_()
    w, w2 = torch.ones(1, 4, device=lane.device), torch.full((1, 4), 2.0, device=lane.device)
    cases = (
        (liger_jsd(x, y), x),
        (liger_tvd(x, y), x),
        (sum(t.sum() for t in liger_fused_ce_tvd(x, y + 2, labels)), x),
        (liger_fused_linear_jsd(h, w, h.detach(), w2), h),
        (liger_fused_linear_kl_div(h, w, y.exp()), h),
        (liger_fused_linear_log_probs(h, w, labels).sum(), h),
    )
    for loss, of in cases:
        assert float(loss.detach()) == 0.0 and not _grad(loss, of).any()
    loss = liger_kl_div(x, y.exp(), reduction="sum")
    assert float(loss.detach()) == 0.0 and (_grad(loss, x) == -1.0).all()


OF_A_TEACHER = ("kl_div", "jsd", "tvd", "fused_ce_tvd", "fused_linear_kl_div", "fused_linear_jsd")
WITH_A_TEACHER = [
    (op, options) for op in map(get_op, OF_A_TEACHER) for options in op.options if "frozen" not in options
]


@pytest.mark.cpu
@pytest.mark.parametrize("op, options", WITH_A_TEACHER, ids=lambda value: getattr(value, "name", str(value)))
def test_a_teacher_that_requires_grad_gets_none(op, options, seed):
    assert_others_get_no_gradient(op.function, make(op, few_sizes(op), torch.float32, "cpu", seed, options), seed)


@pytest.mark.lanes("cpu", "interpret", "gpu")
def test_jsd_keeps_a_nan_of_the_target(lane, generator):
    """It reaches the loss and its row's gradient, although a device's maximum drops NaN."""
    x, y = (torch.randn(3, 70, generator=generator).log_softmax(-1).to(lane.device) for _ in range(2))
    y[1, 17] = float("nan")
    loss = liger_jsd(x.requires_grad_(), y)
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isnan()
    assert dx.isnan().any(-1).tolist() == [False, True, False]
