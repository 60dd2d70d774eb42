"""The losses of `liger_hw.chunked_loss` in plain torch: all logits at once, `log_softmax`, the papers' formulas.

The oracle of this folder's tests, run in fp64. It shares nothing with the package. Every function returns (loss,
metrics) in the order Liger 0.8.5 returns them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

IGNORED = -100


def head(x, weight, bias=None):
    """Logits: rounded to the head's dtype as a linear layer's are, then at least fp32; the bias is added there.

    Its gradient, like that of the logits, is rounded to the head's dtype for each token (hence the expand).
    """
    logits = F.linear(x, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide) if bias is None else logits.to(wide) + bias.expand_as(logits).to(wide)


def token_logps(logits, target):
    """Log-probability of each target; zero where it is ignored."""
    picked = logits.log_softmax(-1).gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return picked * (target != IGNORED)


def sequence_logps(logits, target, average):
    sums = token_logps(logits, target).sum(-1)
    return sums / (target != IGNORED).sum(-1) if average else sums


def smoothed(margin, smoothing):
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


PAIR_LOSSES = {
    "sigmoid": lambda c, r, o: -F.logsigmoid(o["beta"] * (c - r)),
    "hinge": lambda c, r, o: torch.relu(1 - o["beta"] * (c - r)),
    "ipo": lambda c, r, o: (c - r - 0.5 / o["beta"]) ** 2,
    "robust": lambda c, r, o: (
        (
            -(1 - o["label_smoothing"]) * F.logsigmoid(o["beta"] * (c - r))
            + o["label_smoothing"] * F.logsigmoid(-o["beta"] * (c - r))
        )
        / (1 - 2 * o["label_smoothing"])
    ),
    "exo_pair": lambda c, r, o: sum(
        torch.sigmoid(s * o["beta"] * (c - r)) * (F.logsigmoid(s * o["beta"] * (c - r)) - math.log(q))
        for s, q in ((1, 1 - o["label_smoothing"]), (-1, o["label_smoothing"]))
    ),
    "bco_pair": lambda c, r, o: -F.logsigmoid(o["beta"] * c) - F.logsigmoid(-o["beta"] * r),
    "sppo_hard": lambda c, r, o: (c - 0.5 / o["beta"]) ** 2 + (r + 0.5 / o["beta"]) ** 2,
    "nca_pair": lambda c, r, o: (
        -F.logsigmoid(o["beta"] * c) - 0.5 * F.logsigmoid(-o["beta"] * c) - 0.5 * F.logsigmoid(-o["beta"] * r)
    ),
    "apo_zero": lambda c, r, o: 1 - torch.sigmoid(o["beta"] * c) + torch.sigmoid(o["beta"] * r),
    "apo_down": lambda c, r, o: torch.sigmoid(o["beta"] * c) + 1 - torch.sigmoid(o["beta"] * (c - r)),
    "discopop": lambda c, r, o: discopop(o["beta"] * (c - r), o["discopop_tau"]),
}


def discopop(margin, tau):
    share = torch.sigmoid(margin / tau)
    return (1 - share) * -F.logsigmoid(margin) + share * torch.exp(-margin)


def paired(x, weight, target, bias, pair_loss, *, average, nll_weight, nll_target=None, ref=None):
    """What DPO, ORPO, CPO and SimPO share; pair_loss(chosen, rejected, ref_chosen, ref_rejected) -> losses, aux."""
    logits, half = head(x, weight, bias), x.shape[0] // 2
    chosen, rejected = sequence_logps(logits, target, average).tensor_split(2)
    refs = (torch.zeros_like(chosen), torch.zeros_like(rejected))
    if ref is not None:
        refs = sequence_logps(head(*ref), target, average).tensor_split(2)
    losses, aux = pair_loss(chosen, rejected, *refs)
    nll = torch.zeros_like(losses.mean())
    if nll_weight is not None:
        labels = (target if nll_target is None else nll_target)[:half]
        nll = -token_logps(logits[:half], labels).sum() / (labels != IGNORED).sum()
    loss = losses.mean() + (nll_weight or 0.0) * nll
    return loss, (chosen, rejected, logits[:half].mean(), logits[half:].mean(), nll, *aux)


def dpo(x, weight, target, bias=None, ref=None, *, beta=0.1, alpha=1.0, compute_nll_loss=False, average_log_prob=False,
        loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05):  # fmt: skip
    options = {"beta": beta, "label_smoothing": label_smoothing, "discopop_tau": discopop_tau}

    def pair_loss(chosen, rejected, ref_chosen, ref_rejected):
        c, r = chosen - ref_chosen, rejected - ref_rejected
        rewards = beta * c, beta * r
        if loss_type == "ipo" and not average_log_prob:  # over tokens, as its authors told TRL's
            lengths = (target != IGNORED).sum(-1)
            c, r = c / lengths[: len(c)], r / lengths[len(c) :]
        return PAIR_LOSSES[loss_type](c, r, options), rewards

    nll_weight = alpha if compute_nll_loss else None
    return paired(x, weight, target, bias, pair_loss, average=average_log_prob, nll_weight=nll_weight, ref=ref)


def orpo(x, weight, target, bias=None, *, beta=0.1, compute_nll_loss=True, nll_target=None):
    def pair_loss(chosen, rejected, *_):
        log_odds = chosen - rejected - torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))
        ratio = F.logsigmoid(log_odds)
        return -beta * ratio, (beta * chosen, beta * rejected, ratio.mean(), log_odds.mean())

    nll_weight = 1.0 if compute_nll_loss else None
    return paired(x, weight, target, bias, pair_loss, average=True, nll_weight=nll_weight, nll_target=nll_target)


def cpo(x, weight, target, bias=None, *, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True,
        average_log_prob=False):  # fmt: skip
    def pair_loss(chosen, rejected, *_):
        return smoothed(beta * (chosen - rejected), label_smoothing), (beta * chosen, beta * rejected)

    nll_weight = alpha if compute_nll_loss else None
    return paired(x, weight, target, bias, pair_loss, average=average_log_prob, nll_weight=nll_weight)


def simpo(x, weight, target, bias=None, *, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, gamma=0.5):
    def pair_loss(chosen, rejected, *_):
        margin = beta * (chosen - rejected) - gamma
        return smoothed(margin, label_smoothing), (beta * chosen, beta * rejected)

    nll_weight = alpha if compute_nll_loss else None
    return paired(x, weight, target, bias, pair_loss, average=True, nll_weight=nll_weight)


def kto(x, weight, target, labels, bias=None, ref=None, kl=None, *, beta=0.1, average_log_prob=False):
    logits = head(x, weight, bias)
    logps = sequence_logps(logits, target, average_log_prob)
    ratio = logps - (0.0 if ref is None else sequence_logps(head(*ref), target, average_log_prob))
    kl = 0.0 if kl is None else kl
    losses = torch.where(labels, 1 - torch.sigmoid(beta * (ratio - kl)), 1 - torch.sigmoid(beta * (kl - ratio)))
    sums = [(t * labels).sum() for t in (logps,)] + [(logps * ~labels).sum()]
    per_sequence = logits.sum((1, 2))
    sums += [(per_sequence * labels).sum(), (per_sequence * ~labels).sum()]
    sums += [beta * (ratio * labels).sum(), beta * (ratio * ~labels).sum()]
    return losses.mean(), tuple(sums)


def pick(condition, one, other, dtype):
    return torch.where(condition, *(torch.tensor(n, dtype=dtype, device=condition.device) for n in (one, other)))


def vespo_weights(log_ratio, mask, advantages, vllm, o):
    """Gamma weights of a sequence: exp(lambda + k log w - lambda w), w = pi / pi_sampler of the whole sequence."""
    log_w = (log_ratio.clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if vllm is not None:
        log_w = log_w + vllm.log().clamp(math.log(1e-8), 20).sum(-1, keepdim=True)
    log_w = log_w.clamp(math.log(1e-8), 20)
    up = advantages >= 0
    k = pick(up, o["vespo_k_pos"], o["vespo_k_neg"], log_w.dtype)
    lam = pick(up, o["vespo_lambda_pos"], o["vespo_lambda_neg"], log_w.dtype).clamp_min(1e-4)
    return torch.exp(lam + k * log_w - lam * log_w.exp()).nan_to_num(0.0, 0.0, 0.0)


def grpo_from_logps(logps, mask, advantages, ref_logps=None, old_logps=None, vllm_is_ratio=None, num_items=None, **o):
    """(loss, metrics) of the GRPO family, from the log-probabilities of the tokens [batch, length]."""
    mask, kind, beta = mask.to(logps.dtype), o["loss_type"], o["beta"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    old = logps.detach() if old_logps is None else old_logps
    ref = logps.detach() if ref_logps is None else ref_logps
    vllm = vllm_is_ratio if vllm_is_ratio is None or vllm_is_ratio.dim() == 2 else vllm_is_ratio[:, None]
    log_ratio = logps - old
    weights = log_ratio
    if o["importance_sampling_level"] == "sequence":
        weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp_min(1)).unsqueeze(-1)
    raw = weights.exp()
    low, high = 1 - o["epsilon_low"], 1 + o["epsilon_high"]
    clipped = torch.zeros_like(logps)
    if kind == "cispo":
        losses = -raw.clamp_max(o["epsilon_high"]).detach() * advantages * logps
        clipped = (raw > o["epsilon_high"]) & (advantages > 0)
    elif kind == "sapo":
        t = pick(advantages > 0, o["sapo_temperature_pos"], o["sapo_temperature_neg"], mask.dtype)
        losses = -4 / t * torch.sigmoid(t * (raw - 1)) * advantages
    elif kind == "vespo":
        losses = -vespo_weights(log_ratio, mask, advantages, vllm, o).detach() * advantages * logps
    else:
        one = raw if o["delta"] is None else raw.clamp_max(o["delta"])
        losses = -torch.minimum(one * advantages, raw.clamp(low, high) * advantages)
        clipped = ((raw < low) & (advantages < 0)) | ((raw > high) & (advantages > 0))
    if vllm is not None and kind != "vespo":
        losses = losses * vllm
    kl = torch.exp(ref - logps) - (ref - logps) - 1
    if o["use_bias_correction_kl"]:
        kl = kl * raw
    if beta:
        losses = losses + beta * kl
    losses = losses.expand_as(mask)
    counts = mask.sum(-1).clamp_min(1)
    if kind in ("grpo", "sapo"):
        loss = ((losses * mask).sum(-1) / counts).mean()
    elif kind == "luspo":
        loss = (losses * mask).sum(-1).mean()
    elif kind == "dr_grpo":
        loss = (losses * mask).sum() / (mask.shape[0] * o["max_completion_length"])
    else:
        items = mask.sum() if kind == "bnpo" or num_items is None else torch.as_tensor(num_items, dtype=mask.dtype)
        loss = (losses * mask).sum() / items.clamp_min(1)

    def mean(values):
        return values.to(mask.dtype).mean() if values.shape[1] == 1 else (values * mask).sum() / mask.sum().clamp_min(1)

    return loss, ((mean(kl),) if beta else ()) + (mean(clipped),)


GRPO_DEFAULTS = {
    "beta": 0.04, "epsilon_low": 0.2, "epsilon_high": 0.2, "loss_type": "dapo", "max_completion_length": None,
    "importance_sampling_level": "token", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "delta": None,
    "use_bias_correction_kl": False, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}  # fmt: skip


def grpo(x, weight, ids, mask, advantages, bias=None, ref=None, *, temperature=1.0, ref_logps=None, old_logps=None,
         vllm_is_ratio=None, num_items=None, **options):  # fmt: skip
    logps = token_logps(head(x, weight, bias) / temperature, ids)
    if ref is not None:
        ref_logps = token_logps(head(*ref) / temperature, ids)
    options = {**GRPO_DEFAULTS, **options}
    return grpo_from_logps(logps, mask, advantages, ref_logps, old_logps, vllm_is_ratio, num_items, **options)


def jsd(student, teacher, beta):
    """Generalised JSD of each row, from logits."""
    x, y = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        return (y.exp() * (y - x)).sum(-1)
    if beta == 1:
        return (x.exp() * (x - y)).sum(-1)
    middle = torch.logaddexp(y + math.log(beta), x + math.log(1 - beta))
    return beta * (y.exp() * (y - middle)).sum(-1) + (1 - beta) * (x.exp() * (x - middle)).sum(-1)


def distillation(x, weight, teacher, teacher_weight, labels, bias=None, teacher_bias=None, *, kind="jsd", beta=0.5,
                 weight_hard_loss=0.5, weight_soft_loss=0.5, temperature=1.0):  # fmt: skip
    s, t = head(x, weight, bias), head(teacher, teacher_weight, teacher_bias)
    rows = jsd(s / temperature, t / temperature, beta)
    if kind == "cosine":
        rows = beta * (1 - F.cosine_similarity(s, t, dim=-1))
    counted = (labels != IGNORED).to(rows.dtype)
    n = counted.sum().clamp_min(1)
    soft = (rows * counted).sum() / n
    hard = -token_logps(s, labels).sum() / n
    return weight_soft_loss * soft + weight_hard_loss * hard, soft, hard
