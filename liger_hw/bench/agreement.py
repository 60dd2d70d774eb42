"""How far two right trainings may part, and whether two did.

Both arms compute the same mathematics with other roundings, so their losses differ by rounding only, and the tolerance
is made of that. With eps the dtype's machine epsilon and L the loss of Hugging Face's arm at step t = 0, 1, ...

    allowed(t) = eps * L * (FIRST + GROWTH * t)        for t < JUDGED_STEPS

FIRST is one forward pass from equal weights. In fp32 the sums themselves are rounded to fp32 and the loss is stored in
fp32, so a few eps are normal. In bf16 sums and loss are fp32 and only tensors between kernels are rounded; those errors
are independent and the loss is a mean over all tokens, so it is right to a small part of an eps.
GROWTH is training: a gradient that is off by a part r moves the weights off by a part r of each update, so the distance
grows by about the same amount a step. Over longer runs it grows faster: training is chaotic, and after a few hundred
steps two right trainings are two samples. So only the first JUDGED_STEPS are judged, and the rest is only drawn.

`liger-hw demo --against hf,hf-eager,liger_hw` shows on the device at hand how far Hugging Face is from itself.

A loss near its start says little about gradients, and AdamW hides a gradient's scale. So the gradient norm of every
parameter at the first step, where both arms have equal weights, is compared too: GRAD eps, relative.
"""

from __future__ import annotations

from dataclasses import dataclass

from .training import Run

JUDGED_STEPS = 100
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
FIRST = {"float32": 8.0, "bfloat16": 0.25}
GROWTH = {"float32": 1.0, "bfloat16": 0.03}
GRAD = {"float32": 64.0, "bfloat16": 2.0}


def allowed(dtype: str, step: int, loss: float) -> float:
    """Largest difference from `loss` that rounding explains at `step` (counted from 0)."""
    return EPS[dtype] * abs(loss) * (FIRST[dtype] + GROWTH[dtype] * step)


@dataclass(frozen=True)
class Verdict:
    """One arm against the first.

    difference, step, allowance: the largest difference in loss, where (counted from 0), and what was allowed there
    problems: what is wrong, in words; empty when the arms agree
    """

    difference: float
    step: int
    allowance: float
    grad_difference: float
    grad_parameter: str
    grad_allowance: float
    problems: tuple[str, ...]


def compare(base: Run, other: Run, dtype: str) -> Verdict:
    """Judge `other` against `base`. A NaN anywhere is a failure."""
    problems = []
    if base.start != other.start:
        problems.append("the arms did not start from the same weights, so their curves cannot be compared")

    steps = range(min(len(base.losses), JUDGED_STEPS))
    gaps = [abs(base.losses[t] - other.losses[t]) for t in steps]
    limits = [allowed(dtype, t, base.losses[t]) for t in steps]
    worst = max(steps, key=lambda t: _share(gaps[t], limits[t]))
    largest = max(steps, key=lambda t: _share(gaps[t], 1.0))
    if not gaps[worst] <= limits[worst]:
        problems.append(
            f"the loss of step {worst + 1} differs by {gaps[worst]:.3g}; {dtype} rounding explains {limits[worst]:.3g}"
        )

    limit = GRAD[dtype] * EPS[dtype]
    if missing := sorted(set(base.grad_norms) ^ set(other.grad_norms)):
        problems.append(f"only one arm has a gradient for {missing[0]}")
    parts = {
        name: abs(norm - other.grad_norms[name]) / norm if norm else abs(other.grad_norms[name])
        for name, norm in base.grad_norms.items()
        if name in other.grad_norms
    }
    name = max(parts, key=lambda n: _share(parts[n], limit), default="")
    if name and not parts[name] <= limit:
        problems.append(
            f"the first gradient of {name} differs by {parts[name]:.3g} of its norm; rounding explains {limit:.3g}"
        )
    return Verdict(
        difference=gaps[largest],
        step=largest,
        allowance=limits[largest],
        grad_difference=parts.get(name, 0.0),
        grad_parameter=name,
        grad_allowance=limit,
        problems=tuple(problems),
    )


def _share(gap: float, limit: float) -> float:
    share = gap / limit if limit else (float("inf") if gap else 0.0)
    return share if share == share else float("inf")  # NaN is the worst of all
