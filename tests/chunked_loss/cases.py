"""Every chunked loss with its options, as samples that `harness.verify` runs against `formulas`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import formulas
import torch

from liger_hw import chunked_loss
from liger_hw.registry import Sample

VOCAB, HIDDEN = 37, 16


class Case(NamedTuple):
    """make(options, sizes, dtype, device, generator) -> (op, sample), as harness.verify takes them."""

    make: Any
    options: dict[str, Any]

    def __call__(self, sizes, dtype, device, generator):
        return self.make(self.options, sizes, dtype, torch.device(device), generator)


class Inputs:
    """Random tensors of one call, drawn on the CPU in fp32, then moved and rounded."""

    def __init__(self, batch, length, vocab, dtype, device, generator):
        self.batch, self.length, self.vocab = batch, length, vocab
        self.dtype, self.device, self.generator = dtype, device, generator
        self.n_rows, self.wide = batch * length, torch.promote_types(dtype, torch.float32)

    def random(self, *shape, scale=1.0, dtype=None):
        values = torch.randn(shape, generator=self.generator) * scale
        return values.to(self.device, dtype or self.dtype)

    def head(self, *shape):
        """(x, weight, bias), which require grad."""
        tensors = (
            self.random(*shape, HIDDEN),
            self.random(self.vocab, HIDDEN, scale=HIDDEN**-0.5),
            self.random(self.vocab),
        )
        return tuple(t.requires_grad_() for t in tensors)

    def fixed_head(self, *shape, hidden=HIDDEN):
        tensors = (
            self.random(*shape, hidden),
            self.random(self.vocab, hidden, scale=hidden**-0.5),
            self.random(self.vocab),
        )
        return tuple(t.detach() for t in tensors)

    def tokens(self, *shape, ignored=0.25):
        ids = torch.randint(self.vocab, shape, generator=self.generator)
        drop = torch.rand(shape, generator=self.generator) < ignored
        drop[..., :1] = False  # every sequence keeps a token
        return ids.masked_fill(drop, -100).to(self.device)

    def clear_of_thresholds(self, *shape):
        """Log-ratios whose exponentials are not near 1, 1 +- 0.05, 1.1, 1 +- 0.2 or 1.5, where clipping begins."""
        steps = torch.tensor([-0.5, -0.14, -0.025, 0.025, 0.14, 0.3, 0.6], dtype=self.wide)
        return steps[torch.randint(len(steps), shape, generator=self.generator)].to(self.device)

    def chance(self, *shape, share=0.5):
        return (torch.rand(shape, generator=self.generator) < share).to(self.device)


def _op(function, reference):
    return SimpleNamespace(function=function, reference=reference)


def _sample(inputs, args, kwargs):
    largest = max(inputs.n_rows, HIDDEN, inputs.vocab)
    return Sample(args=args, kwargs=kwargs, reduction=inputs.n_rows * max(HIDDEN, inputs.vocab), grad_reduction=largest)


def _split(options, *names):
    """(options without names, the values of names)"""
    return {k: v for k, v in options.items() if k not in names}, tuple(options.get(n) for n in names)


def _pairs(name, options, sizes, dtype, device, generator):
    options, (with_ref, with_nll, empty, bare) = _split(options, "ref", "nll", "empty", "bare")
    inputs = Inputs(*sizes, dtype, device, generator)
    x, weight, bias = inputs.head(inputs.batch, inputs.length)
    target = inputs.tokens(inputs.batch, inputs.length)
    if empty:
        target[0] = -100
    bias = None if bare else bias
    ref = inputs.fixed_head(inputs.batch, inputs.length) if with_ref else None
    extra = {"nll_target": inputs.tokens(inputs.batch, inputs.length)} if with_nll else {}
    if with_nll:  # as in TRL: the same targets where both count
        target[0, :1] = extra["nll_target"][0, :1]
    kinds = {"dpo": "DPO", "orpo": "ORPO", "cpo": "CPO", "simpo": "SimPO"}
    module = getattr(chunked_loss, f"LigerFusedLinear{kinds[name]}Loss")
    settings = dict(options, use_ref_model=ref is not None) if name == "dpo" else options

    def ours(x, weight, bias, target, ref, **extra):
        return module(**settings)(weight, x, target, bias, *(ref or ()), **extra)

    def exact(x, weight, bias, target, ref, **extra):
        extra = extra if ref is None else {"ref": ref}
        return getattr(formulas, name)(x, weight, target, bias, **extra, **options)

    return _op(ours, exact), _sample(inputs, (x, weight, bias, target, ref), extra)


def _kto(options, sizes, dtype, device, generator):
    options, (with_ref, kl) = _split(options, "ref", "kl")
    inputs = Inputs(*sizes, dtype, device, generator)
    x, weight, bias = inputs.head(inputs.batch, inputs.length)
    target, labels = inputs.tokens(inputs.batch, inputs.length), inputs.chance(inputs.batch)
    ref = inputs.fixed_head(inputs.batch, inputs.length) if with_ref else None
    kl = {None: None, "one": torch.tensor(0.3), "each": inputs.random(inputs.batch, dtype=inputs.wide)}[kl]
    kl = kl if kl is None else kl.to(device)
    settings = dict(options, use_ref_model=with_ref or False)

    def ours(x, weight, bias, target, labels, ref, kl):
        return chunked_loss.LigerFusedLinearKTOLoss(**settings)(
            x, weight, target, bias, labels, *(ref or [None] * 3), kl
        )

    def exact(x, weight, bias, target, labels, ref, kl):
        return formulas.kto(x, weight, target, labels, bias, ref, kl, **options)

    return _op(ours, exact), _sample(inputs, (x, weight, bias, target, labels, ref, kl), {})


def _grpo(options, sizes, dtype, device, generator):
    options, (ref, no_old, vllm, items, each, empty) = _split(
        options, "ref", "no_old", "vllm", "items", "each", "empty"
    )
    inputs = Inputs(*sizes, dtype, device, generator)
    x, weight, bias = inputs.head(inputs.batch, inputs.length)
    shape = inputs.batch, inputs.length
    ids = inputs.tokens(*shape, ignored=0.0)
    mask = inputs.chance(*shape, share=0.7)
    mask[:, :1] = True
    if empty:
        mask[0] = False
    advantages = inputs.random(*(shape if each else shape[:1]), dtype=inputs.wide)
    with torch.no_grad():
        temperature = options.get("temperature", 1.0)
        near = formulas.token_logps(formulas.head(x, weight, bias) / temperature, ids)
    tensors = {
        "advantages": advantages,
        "ref_head": inputs.fixed_head(*shape) if ref == "head" else None,
        "ref_logps": near + inputs.random(*shape, scale=0.3, dtype=inputs.wide) if ref == "logps" else None,
        "old_logps": None if no_old else near + inputs.clear_of_thresholds(*shape),
        "vllm": None
        if vllm is None
        else inputs.random(*shape, dtype=inputs.wide)[:, : vllm or shape[1]].sigmoid() + 0.5,
    }
    settings = dict(options, use_ref_model=ref is not None)

    def ours(x, weight, bias, ids, mask, advantages, ref_head, ref_logps, old_logps, vllm):
        loss = chunked_loss.LigerFusedLinearGRPOLoss(**settings)
        refs = ref_head or (None,) * 3
        more = {"vllm_is_ratio": vllm, "num_items_in_batch": items}
        return loss(x, weight, ids, mask.long(), advantages, bias, ref_logps, old_logps, *refs, **more)

    def exact(x, weight, bias, ids, mask, advantages, ref_head, ref_logps, old_logps, vllm):
        more = {"ref_logps": ref_logps, "old_logps": old_logps, "vllm_is_ratio": vllm, "num_items": items}
        return formulas.grpo(x, weight, ids, mask, advantages, bias, ref_head, **more, **options)

    return _op(ours, exact), _sample(inputs, (x, weight, bias, ids, mask, *tensors.values()), {})


def _distillation(options, sizes, dtype, device, generator):
    options, (kind,) = _split(options, "kind")
    inputs = Inputs(*sizes, dtype, device, generator)
    x, weight, bias = inputs.head(inputs.n_rows)
    teacher = inputs.fixed_head(inputs.n_rows, hidden=HIDDEN // 2)
    labels = inputs.tokens(inputs.n_rows)
    name = {"jsd": "JSD", "cosine": "CosineSimilarity"}[kind]
    module = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")

    def ours(x, weight, bias, teacher, labels):
        teacher_x, teacher_weight, teacher_bias = teacher
        loss = module(return_soft_hard_loss=True, **options)
        return loss(x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias)

    def exact(x, weight, bias, teacher, labels):
        teacher_x, teacher_weight, teacher_bias = teacher
        return formulas.distillation(
            x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias, kind=kind, **options
        )

    return _op(ours, exact), _sample(inputs, (x, weight, bias, teacher, labels), {})


def _name(family, options):
    return "-".join([family, *(f"{k}={v}" for k, v in options.items())])


_MAKERS = {
    **{name: partial(_pairs, name) for name in ("dpo", "orpo", "cpo", "simpo")},
    **{"kto": _kto, "grpo": _grpo, "distillation": _distillation},
}
_OPTIONS = {
    "dpo": [
        {"ref": True},
        {"ref": True, "loss_type": "hinge"},
        {"ref": True, "loss_type": "ipo"},
        {"ref": True, "loss_type": "ipo", "average_log_prob": True},
        {"ref": True, "loss_type": "robust", "label_smoothing": 0.2},
        {"ref": True, "loss_type": "exo_pair", "label_smoothing": 0.05},
        {"ref": True, "loss_type": "bco_pair"},
        {"ref": True, "loss_type": "sppo_hard", "beta": 0.5},
        {"ref": True, "loss_type": "nca_pair"},
        {"ref": True, "loss_type": "apo_zero"},
        {"ref": True, "loss_type": "apo_down"},
        {"ref": True, "loss_type": "discopop", "discopop_tau": 0.2},
        {"ref": True, "compute_nll_loss": True, "alpha": 0.7, "average_log_prob": True},
        {"bare": True, "empty": True},
    ],
    "orpo": [{}, {"nll": True, "beta": 0.5}, {"compute_nll_loss": False, "bare": True}],
    "cpo": [
        {},
        {"alpha": 0.3, "label_smoothing": 0.1},
        {"average_log_prob": True, "compute_nll_loss": False, "beta": 0.4},
    ],
    "simpo": [{}, {"alpha": 0.3, "label_smoothing": 0.1, "gamma": 0.8, "beta": 2.0}, {"compute_nll_loss": False}],
    "kto": [{}, {"ref": True, "kl": "one", "beta": 0.6}, {"ref": True, "kl": "each", "average_log_prob": True}],
    "grpo": [
        {"ref": "head"},
        {"ref": "logps", "loss_type": "grpo", "temperature": 0.7},
        {"loss_type": "bnpo"},
        {"ref": "logps", "loss_type": "dr_grpo", "max_completion_length": 11, "delta": 1.1},
        {"ref": "logps", "items": 23, "use_bias_correction_kl": True},
        {"ref": "logps", "loss_type": "cispo", "epsilon_high": 1.5, "items": 40},
        {"ref": "logps", "loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.6},
        {"ref": "logps", "loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"ref": "logps", "loss_type": "luspo", "beta": 0.5},
        {"ref": "logps", "loss_type": "vespo", "vllm": 0},
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.4,
            "vespo_lambda_pos": 2.2,
            "vespo_k_neg": 2.5,
            "vespo_lambda_neg": 1.2,
        },
        {
            "ref": "head",
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "temperature": 1.3,
            "empty": True,
        },
        {"ref": "logps", "importance_sampling_level": "sequence", "use_bias_correction_kl": True, "delta": 1.05},
        {"no_old": True, "beta": 0.0, "empty": True},
        {"each": True, "vllm": 1},
        {"each": True, "vllm": 0, "epsilon_low": 0.05, "epsilon_high": 0.1},
    ],
    "distillation": [
        {"kind": "jsd"},
        {"kind": "jsd", "beta": 0.0, "temperature": 2.0},
        {"kind": "jsd", "beta": 1.0, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0},
        {"kind": "jsd", "beta": 0.2, "temperature": 0.5, "weight_hard_loss": 0.9},
        {"kind": "cosine", "beta": 0.7},
    ],
}
CASES = {_name(family, o): Case(_MAKERS[family], o) for family, options in _OPTIONS.items() for o in options}
ONE_OF_EACH = [next(name for name in CASES if name.startswith(family)) for family in _OPTIONS]
"""One case of each family."""
KERNEL_CASES = [
    *ONE_OF_EACH,
    "orpo-nll=True-beta=0.5",
    "grpo-ref=logps-loss_type=grpo-temperature=0.7",
    "dpo-bare=True-empty=True",
    "distillation-kind=cosine-beta=0.7",
    "distillation-kind=jsd-beta=0.2-temperature=0.5-weight_hard_loss=0.9",
]
"""Cases that differ for the row kernels."""
assert set(KERNEL_CASES) <= set(CASES)
