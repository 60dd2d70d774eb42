"""The chunked losses as cases of `benchmarks/sweep.py losses`, beside the registered ops.

They register no op: their kernels are those of the linear head's ops. Here each has what the bench asks of an op: its
call, the same loss in plain torch, samples and real sizes, batch x length x hidden x vocabulary. liger-kernel's are its
classes of the same names, with its defaults (torch.compile included). Every arm returns the loss alone.
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.nn.functional as F

from liger_hw.registry import Op, Sample

WORKLOADS = {"llama3_8b": (8, 1024, 4096, 128256), "mistral_7b": (8, 1024, 4096, 32768)}
"""(batch, length, hidden, vocab) of real models"""

_DIMS = (SimpleNamespace(dims=("batch", "seq_len", "hidden", "vocab")),)

# -- the losses in torch, at the defaults of the modules -------------------------------------------------------------


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _logps(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return _logits(x, weight).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _halves(logps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = logps.chunk(2)
    return chosen, rejected


def _orpo(x, weight, ids, beta=0.1):
    logps = _logps(x, weight, ids)
    chosen, rejected = _halves(logps.mean(-1))
    odds = chosen - torch.log(-torch.expm1(chosen)) - rejected + torch.log(-torch.expm1(rejected))
    return -chosen.mean() - beta * F.logsigmoid(odds).mean()


def _cpo(x, weight, ids, beta=0.1):
    logps = _logps(x, weight, ids)
    chosen, rejected = _halves(logps.sum(-1))
    return -F.logsigmoid(beta * (chosen - rejected)).mean() - _halves(logps)[0].mean()


def _simpo(x, weight, ids, beta=0.1, gamma=0.5):
    chosen, rejected = _halves(_logps(x, weight, ids).mean(-1))
    return -F.logsigmoid(beta * (chosen - rejected) - gamma).mean() - chosen.mean()


def _kto(x, weight, ids, good, beta=0.1):
    reward = beta * _logps(x, weight, ids).mean(-1)
    return (1 - torch.sigmoid(torch.where(good, reward, -reward))).mean()


def _dpo(x, weight, ids, ref_x, ref_weight, beta=0.1):
    chosen, rejected = _halves(_logps(x, weight, ids).sum(-1))
    with torch.no_grad():
        ref_chosen, ref_rejected = _halves(_logps(ref_x, ref_weight, ids).sum(-1))
    return -F.logsigmoid(beta * (chosen - ref_chosen - rejected + ref_rejected)).mean()


def _grpo(x, weight, ids, mask, advantages, ref, old, beta=0.04, sequence=False):
    logps = _logps(x, weight, ids)
    ratio = logps - old
    if sequence:
        ratio = ((ratio * mask).sum(-1) / mask.sum(-1)).unsqueeze(-1)
    ratio, gain = ratio.exp(), advantages.unsqueeze(-1)
    losses = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    losses = losses + beta * (torch.exp(ref - logps) - (ref - logps) - 1)
    return (losses * mask).sum() / mask.sum()


def _distilled(rows: Callable) -> Callable:
    def loss(x, weight, teacher, teacher_weight, ids):
        student = _logits(x, weight)
        with torch.no_grad():
            given = _logits(teacher, teacher_weight)
        hard = -student.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).mean()
        return 0.5 * hard + 0.5 * rows(student, given).mean()

    return loss


def _jsd_rows(student, teacher):
    x, y = student.log_softmax(-1), teacher.log_softmax(-1)
    middle = torch.logaddexp(x, y) - math.log(2)
    return 0.5 * (y.exp() * (y - middle)).sum(-1) + 0.5 * (x.exp() * (x - middle)).sum(-1)


def _cosine_rows(student, teacher):
    return 0.5 * (1 - F.cosine_similarity(student, teacher, dim=-1))


# -- samples ---------------------------------------------------------------------------------------------------------


def _drawn(sizes, dtype, device, generator) -> dict[str, Callable[[], torch.Tensor]]:
    """Every tensor a loss may be given, drawn when it is asked for."""
    batch, length, hidden, vocab = sizes

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(scale)

    def logps() -> torch.Tensor:
        return random(batch, length, scale=0.1) - (math.log(vocab) + 0.5)

    return {
        "x": lambda: random(batch, length, hidden).to(dtype).requires_grad_(),
        "weight": lambda: random(vocab, hidden, scale=hidden**-0.5).to(dtype).requires_grad_(),
        "other_x": lambda: random(batch, length, hidden).to(dtype),
        "other_weight": lambda: random(vocab, hidden, scale=hidden**-0.5).to(dtype),
        "ids": lambda: torch.randint(vocab, (batch, length), generator=generator, device=device),
        "mask": lambda: torch.ones(batch, length, dtype=torch.int64, device=device),
        "good": lambda: torch.arange(batch, device=device) % 2 == 0,
        "advantages": lambda: random(batch),
        "ref": logps,
        "old": logps,
    }


# -- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loss:
    """module: LigerFusedLinear<module>Loss of either package; given: the tensors of a call; call: (module, *tensors)"""

    module: str
    given: tuple[str, ...]
    call: Callable[..., Any]
    formula: Callable[..., torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def of(self, package: str) -> Callable[..., torch.Tensor]:
        loss = getattr(importlib.import_module(f"{package}.chunked_loss"), f"LigerFusedLinear{self.module}Loss")
        loss = loss(**self.options)

        def function(*tensors: torch.Tensor) -> torch.Tensor:
            found = self.call(loss, *tensors)
            return found[0] if isinstance(found, tuple) else found

        return function

    def sample(self, sizes, dtype, device, generator, **options: Any) -> Sample:
        drawn = _drawn(sizes, dtype, device, generator)
        return Sample(args=tuple(drawn[name]() for name in self.given))


def _paired(loss, x, weight, ids):
    return loss(weight, x, ids)


def _policy(loss, x, weight, ids, mask, advantages, ref, old):
    return loss(x, weight, ids, mask, advantages, None, ref, old)


def _teacher(loss, x, weight, teacher, teacher_weight, ids):
    return loss(x.flatten(0, 1), weight, teacher.flatten(0, 1), teacher_weight, ids.flatten())


_PAIR = ("x", "weight", "ids")
_POLICY = (*_PAIR, "mask", "advantages", "ref", "old")
_TEACHER = ("x", "weight", "other_x", "other_weight", "ids")
_LOSSES = {
    "orpo": _Loss("ORPO", _PAIR, _paired, _orpo),
    "cpo": _Loss("CPO", _PAIR, _paired, _cpo),
    "simpo": _Loss("SimPO", _PAIR, _paired, _simpo),
    "kto": _Loss(
        *("KTO", (*_PAIR, "good"), lambda loss, x, w, ids, good: loss(x, w, ids, None, good), _kto),
        options={"average_log_prob": True},
    ),
    "dpo": _Loss(
        *("DPO", (*_PAIR, "other_x", "other_weight")),
        *(lambda loss, x, w, ids, ref_x, ref_w: loss(w, x, ids, None, ref_x, ref_w), _dpo),
    ),
    "grpo": _Loss("GRPO", _POLICY, _policy, _grpo),
    "grpo_sequence": _Loss(
        *("GRPO", _POLICY, _policy, functools.partial(_grpo, sequence=True)),
        options={"importance_sampling_level": "sequence"},
    ),
    "jsd_distillation": _Loss("JSD", _TEACHER, _teacher, _distilled(_jsd_rows)),
    "cosine_distillation": _Loss("CosineSimilarity", _TEACHER, _teacher, _distilled(_cosine_rows)),
}
TWO_HEADS = frozenset({"dpo", "jsd_distillation", "cosine_distillation"})
"""Those whose reference model or teacher costs a product more."""


def _op(name: str, loss: _Loss) -> Op:
    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return ours()(*tensors)

    ours = functools.cache(lambda: loss.of("liger_hw"))
    return Op(name, function, loss.formula, _DIMS, WORKLOADS, loss.sample)


OPS = {name: _op(name, loss) for name, loss in _LOSSES.items()}


def liger(name: str) -> Callable[..., torch.Tensor]:
    """liger-kernel's loss of this name, called as `OPS[name].function` is."""
    return _LOSSES[name].of("liger_kernel")
