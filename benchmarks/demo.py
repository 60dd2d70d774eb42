"""The same small Mistral trained twice on real text, before and after one line, and compared.

    python benchmarks/demo.py                    or: make demo
    python benchmarks/demo.py --interpret        the real kernels on a CPU, in Triton's interpreter

Ends with 0 when the curves agree within what the dtype's rounding explains, and with 1 when they do not. `--out` gets
demo.json, with every number. `end_to_end.py` trains real sizes.

Both arms compute the same mathematics with other roundings, so the tolerance is made of rounding alone. With eps the
dtype's machine epsilon and L the loss of Hugging Face's arm at step t = 0, 1, ...

    allowed(t) = eps * L * (FIRST + GROWTH * t)        for t < JUDGED_STEPS

FIRST is one forward pass from equal weights. In fp32 the sums themselves are rounded to fp32 and the loss is stored in
fp32, so a few eps are normal. In bf16 sums and loss are fp32 and only tensors between kernels are rounded; those errors
are independent and the loss is a mean over all tokens, so it is right to a small part of an eps.
GROWTH is training: a gradient that is off by a part r moves the weights off by a part r of each update, so the distance
grows by about the same amount a step. Over longer runs it grows faster: training is chaotic, and after a few hundred
steps two right trainings are two samples. So only the first JUDGED_STEPS are judged. `--against hf,hf-eager,liger_hw`
shows how far Hugging Face is from itself on the device at hand.

A loss near its start says little about gradients, and AdamW hides a gradient's scale. So the gradient norm of every
parameter at the first step, where both arms have equal weights, is compared too: GRAD eps, relative.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIZES = {
    "tiny": {"hidden": 64, "layers": 2, "batch": 2, "seq": 48, "steps": 12},
    "small": {"hidden": 192, "layers": 4, "batch": 8, "seq": 128, "steps": 80},
    "interpreted": {"hidden": 64, "layers": 2, "batch": 1, "seq": 32, "steps": 6},
}
NOTES = {
    "reference": (
        "This ran on the CPU: liger_hw's cpu backend is torch's reference path, the same mathematics without a Triton "
        "kernel. That the curves agree says something; the speeds say nothing about liger_hw. --interpret runs the "
        "real kernels on the CPU, slowly."
    ),
    "interpreter": "Triton's interpreter checks what the kernels compute. It is slow; the speeds above mean nothing.",
}
JUDGED_STEPS = 100
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
FIRST = {"float32": 8.0, "bfloat16": 0.25}
GROWTH = {"float32": 1.0, "bfloat16": 0.03}
GRAD = {"float32": 64.0, "bfloat16": 2.0}


# -- the verdict -----------------------------------------------------------------------------------------------------


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


def allowed(dtype: str, step: int, loss: float) -> float:
    """Largest difference from `loss` that rounding explains at `step` (counted from 0)."""
    return EPS[dtype] * abs(loss) * (FIRST[dtype] + GROWTH[dtype] * step)


def compare(base: Any, other: Any, dtype: str) -> Verdict:
    """Judge the `training.Run` of an arm against the first arm's. A NaN anywhere is a failure."""
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
    return Verdict(gaps[largest], largest, limits[largest], parts.get(name, 0.0), name, limit, tuple(problems))


def _share(gap: float, limit: float) -> float:
    share = gap / limit if limit else (math.inf if gap else 0.0)
    return math.inf if math.isnan(share) else share  # NaN is the worst of all


# -- the run ---------------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", choices=("tiny", "small"), help="model and batch (default small; with --interpret few rows)")
    add("--steps", type=int, help="training steps (default: what --size has)")
    add("--device", help="torch device (default: the GPU if there is one, else cpu)")
    add("--dtype", choices=tuple(EPS), help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--interpret", action="store_true", help="run the real Triton kernels, in Triton's interpreter on the CPU")
    against = "arms of `training.py`; compared with hf, or else the first (default hf,liger_hw)"
    add("--against", default="hf,liger_hw", metavar="ARMS", help=against)
    add("--out", default="liger-hw-demo", metavar="DIR", help="where the numbers go (default ./liger-hw-demo)")
    arguments = parser.parse_args(words)
    if arguments.interpret:
        if arguments.device not in (None, "cpu") or arguments.dtype == "bfloat16":
            parser.error("--interpret runs on the CPU in float32; leave --device and --dtype away")
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, which nothing did so far
    # OpenMP threads that spin while they wait take most of a small machine's time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import end_to_end
    from training import Original, Schedule

    from liger_hw import env, registry
    from liger_hw.bench import report
    from liger_hw.cli import UsageError
    from liger_hw.cli.arguments import usable_device
    from liger_hw.text import fold

    os.environ.setdefault("LIGER_HW_CPU_REFERENCE", "1")  # on a CPU, what is compared is what the kernels compute
    env.clear()
    sizes = dict(SIZES[arguments.size or ("interpreted" if arguments.interpret else "small")])
    sizes |= {"steps": arguments.steps} if arguments.steps else {}
    runs: dict[str, Any] = {}
    try:
        device = usable_device("cpu" if arguments.interpret else arguments.device)
        dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        arms = tuple(arguments.against.split(","))
        schedule = Schedule("mistral", arms=arms, dtype=dtype, learning_rate=1e-3, **sizes)
        Original("mistral")  # refuses a Mistral that is already patched
        results = end_to_end.measure(schedule, device, say=end_to_end.progress, on_run=runs.__setitem__)
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    first = "hf" if "hf" in runs else next(iter(runs), "")
    left_out = {row["arm"]: row["note"] for row in results["runs"] if row["status"] != "ok"}
    if len(runs) < 2 and "liger_hw" not in left_out:
        parser.error("nothing to compare with; " + "; ".join(f"{arm}: {why}" for arm, why in left_out.items()))
    verdicts = {name: compare(runs[first], one, dtype) for name, one in runs.items() if name != first}
    machine = report.machine(device)
    print(end_to_end.as_text(results))
    print(fold(f"on {device}: {machine['device']}, torch {machine['torch']}, triton {machine['triton']}"))
    if device.type == "cpu":
        print(fold(NOTES["interpreter" if registry.interpreting() else "reference"]))
    document = {"machine": machine, **results, "verdicts": {name: asdict(one) for name, one in verdicts.items()}}
    report.save(Path(arguments.out) / "demo.json", document)
    print(f"written: {Path(arguments.out) / 'demo.json'}")
    return _conclude(verdicts, first, left_out)


def _conclude(verdicts: dict[str, Verdict], first: str, left_out: dict[str, str]) -> int:
    """Say whether the curves agree. Only liger_hw's own arm decides the exit code."""
    if "liger_hw" in left_out:
        print(f"FAILED: liger_hw: {left_out['liger_hw']}", file=sys.stderr)
        return 1
    code = 0
    for name, verdict in verdicts.items():
        apart = f"{verdict.difference:.2g} at step {verdict.step + 1} ({verdict.allowance:.2g} allowed)"
        gradient = f"{verdict.grad_difference:.2g} ({verdict.grad_allowance:.2g} allowed)"
        print(f"{name} against {first}: losses differ by {apart}, the first gradients by {gradient}")
        for problem in verdict.problems:
            print(f"{'FAILED' if name == 'liger_hw' else 'note'}: {name} against {first}: {problem}")
            code = 1 if name == "liger_hw" else code
    if code == 0 and "liger_hw" in verdicts:
        print(f"OK: liger_hw trains as {first} does, within what rounding explains")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
