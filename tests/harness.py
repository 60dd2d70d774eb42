"""Helpers of the tests: an op's sizes and samples, one forward and backward, the fp64 oracle, and processes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping

import torch
from tolerance import assert_close, unit
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from liger_hw.registry import Op, Sample
from liger_hw.runtime.launch import compile_key

Sizes = tuple[int, ...]


ONE_OF_A_FAMILY = (
    "attn_res",
    "cross_entropy",
    "embedding",
    "float8_linear",
    "fused_linear_cross_entropy",
    "rms_norm",
    "rope",
    "short_conv",
    "softmax",
    "swiglu",
)
"""An op of each family of kernels, for tests of which `make test` runs some ops and `make test LANES=full` all."""


def small_sizes(op: Op) -> list[Sizes]:
    """Small problem sizes of an op: its own `small`, or its first workload shrunk, odd, single and even."""
    if op.small:
        return list(op.small)
    large = next(iter(op.workloads.values()))
    many = len(large) > 3  # a product of that many sizes must stay small: the interpreter takes 1 to 2 ms a program

    def shrunk(of_thousands: int, of_hundreds: int, of_few: int, step: int = 0) -> Sizes:
        sizes = (of_thousands if s >= 1024 else of_hundreds if s >= 64 else min(s, of_few) for s in large)
        return tuple(s + step * i * (s > 3) for i, s in enumerate(sizes))

    odd, even = shrunk(9, 37, 3, 2) if many else shrunk(37, 37, 3, 32), shrunk(8 if many else 64, 16, 2)
    return [odd, (1, *shrunk(17, 10, 1)[1:]), (min(even[0], 24), *even[1:])]


def few_sizes(op: Op) -> Sizes:
    """The first of `small_sizes` with a few rows."""
    first = small_sizes(op)[0]
    return (min(first[0], 7), *(min(s, 7) if s == first[1] and len(first) > 3 else s for s in first[1:]))


def wide_sizes(op: Op) -> Sizes:
    """Few rows with a last dimension of more than one tile of 4096, if the op has such a dimension."""
    large = next(iter(op.workloads.values()))
    if large[-1] < 1024:
        return small_sizes(op)[-1]
    width = 300 if op.name == "short_conv" else 4500  # its tiles are 128 wide
    return (min(3, large[0]), *(7 if s >= 1024 else min(s, 10) for s in large[1:-1]), width)


def real_sizes(op: Op) -> Sizes:
    """The first workload with a few rows: its real width, for a GPU."""
    large = next(iter(op.workloads.values()))
    return (min(7, large[0]), *large[1:])


def make(op: Op, sizes: Sizes, dtype: torch.dtype, device: str, seed: int, options: Mapping[str, Any] = {}) -> Sample:
    """A seeded sample of `op`."""
    return op.sample(sizes, dtype, torch.device(device), torch.Generator(device).manual_seed(seed), **options)


def in_threads(*functions: Callable[[], Any]) -> None:
    """Call the functions at once, each in a thread, and raise an error of one of them."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        for call in [pool.submit(function) for function in functions]:
            call.result()


def python(*words: Any, env: Mapping[str, str] = {}, **options: Any) -> str:
    """What a new Python process prints; it must succeed. env: added to this process's environment"""
    command, environment = [sys.executable, *map(str, words)], {**os.environ, **env}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def said(capsys: Any, *words: str) -> tuple[int, str, str]:
    """What `liger-hw` returns and prints: the exit code, standard output and standard error."""
    from liger_hw.cli import main

    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def printed(capsys: Any, *words: str, code: int = 0) -> str:
    """What `liger-hw` prints on standard output, or on standard error if `code` is not 0; it must return `code`."""
    found, out, err = said(capsys, *words)
    assert found == code, out + err
    return err if code else out


def team_words(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The words that `cooperative.publish` writes for these sums."""
    high, low = (t.float().view(torch.int32).long() for t in (first, second))
    return ~(high << 32 | low & 0xFFFFFFFF)


def team_sums(words: torch.Tensor) -> torch.Tensor:
    """The sums in words: [2, ...]."""
    return torch.stack([~words >> 32, ~words << 32 >> 32]).to(torch.int32).view(torch.float32)


def leaf(t: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return t.requires_grad_() if requires_grad else t


def mapped(
    tree: Any, change: Callable[[torch.Tensor], torch.Tensor], seen: dict[int, torch.Tensor] | None = None
) -> Any:
    """`tree` (tuples, lists, dicts) with every tensor changed, one that occurs twice only once."""
    seen = {} if seen is None else seen
    if isinstance(tree, torch.Tensor):
        if id(tree) not in seen:
            seen[id(tree)] = change(tree)
        return seen[id(tree)]
    if isinstance(tree, dict):
        return {key: mapped(value, change, seen) for key, value in tree.items()}
    return type(tree)(mapped(part, change, seen) for part in tree) if type(tree) in (tuple, list) else tree


def changed(sample: Sample, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    """The sample with every tensor changed: new leaves with the same requires_grad."""
    seen: dict[int, torch.Tensor] = {}

    def new(t: torch.Tensor) -> torch.Tensor:
        return leaf(change(t.detach()), t.requires_grad)

    return dataclasses.replace(sample, args=mapped(sample.args, new, seen), kwargs=mapped(sample.kwargs, new, seen))


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element into its memory."""
    room = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    return room[1:].view(t.shape).copy_(t)


def padded(t: torch.Tensor) -> torch.Tensor:
    """A copy whose rows lie apart."""
    wide = torch.zeros((*t.shape[:-1], t.shape[-1] + 3), dtype=t.dtype, device=t.device)
    return wide[..., : t.shape[-1]].copy_(t)


def shipped_tables() -> dict[str, list[tuple[Any, Any]]]:
    """`vendor/file` of every shipped table -> its ((op, variant, key), Entry) pairs."""
    from liger_hw.autotune import store, tables
    from liger_hw.backends import VENDORS

    results = {}
    for vendor in VENDORS:
        for path in sorted(store.shipped_folder(vendor).glob("*.json")):
            _, lines, problems = tables.load(path)
            assert not problems, problems
            results[f"{vendor}/{path.stem}"] = lines
    return results


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor in tuples, lists, dicts and dataclasses, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    elif dataclasses.is_dataclass(tree):
        tree = tuple(getattr(tree, f.name) for f in dataclasses.fields(tree))
    return [t for part in tree for t in tensors(part)] if isinstance(tree, (tuple, list)) else []


@dataclass
class Result:
    """One call, as flat lists of tensors, or None for an absent gradient."""

    outputs: list[torch.Tensor]
    incoming: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]

    def bits(self) -> list[torch.Tensor]:
        return [t for t in (*self.outputs, *self.gradients) if t is not None]


def checked_inputs(sample: Sample) -> list[torch.Tensor]:
    """The inputs whose gradient is checked."""
    return list({id(t): t for t in tensors((sample.args, sample.kwargs)) if t.requires_grad}.values())


def forward(function: Callable[..., Any], sample: Sample) -> list[torch.Tensor]:
    return tensors(function(*sample.args, **sample.kwargs))


def output_grads(outputs: Iterable[torch.Tensor], seed: int) -> list[torch.Tensor | None]:
    """Random gradients of the differentiable outputs, representable in the outputs' dtype."""
    gradients = []
    for number, o in enumerate(outputs):
        generator = torch.Generator(o.device).manual_seed(seed + 1 + number)
        g = torch.randn(o.shape, generator=generator, dtype=torch.float32, device=o.device)
        gradients.append(g.to(o.dtype) if o.requires_grad else None)
    return gradients


def run(function: Callable[..., Any], sample: Sample, seed: int = 0, grads: list | None = None) -> Result:
    """Forward, then backward with `grads` (default: `output_grads(seed)`)."""
    outputs = forward(function, sample)
    grads = output_grads(outputs, seed) if grads is None else grads
    inputs = checked_inputs(sample)
    pairs = [(o, g) for o, g in zip(outputs, grads) if o.requires_grad and g is not None]
    gradients = [None] * len(inputs)
    if pairs and inputs:
        gradients = list(torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))
    return Result([o.detach() for o in outputs], grads, inputs, gradients)


def assert_others_get_no_gradient(function: Callable[..., Any], sample: Sample, seed: int = 0) -> None:
    """Inputs without requires_grad in the sample, such as a teacher's, get no gradient if they require one, and the
    results stay the same."""
    alone, inputs = run(function, sample, seed), tensors((sample.args, sample.kwargs))
    others = [t.requires_grad_() for t in inputs if t.is_floating_point() and not t.requires_grad]
    found = run(function, sample, grads=alone.incoming)
    assert others
    torch.testing.assert_close(found.bits(), alone.bits(), rtol=0, atol=0)
    for t in alone.inputs:
        t.requires_grad_(False)
    assert not any(t.requires_grad for t in forward(function, sample))


def reference(
    op: Op, sample: Sample, incoming: list[torch.Tensor | None], change: Callable[[torch.Tensor], torch.Tensor]
) -> Result:
    """The reference's result for the sample and the outputs' gradients, every floating tensor changed."""

    def new(t: torch.Tensor) -> torch.Tensor:
        return change(t) if t.is_floating_point() else t.clone()

    return run(op.reference, changed(sample, new), grads=[g if g is None else change(g) for g in incoming])


def oracle(op: Op, sample: Sample, incoming: list[torch.Tensor | None]) -> Result:
    """The exact result: the reference in fp64. Roundings in `sample.exact`, at which the definition jumps, are kept."""
    stated = dataclasses.replace(sample, kwargs={**sample.kwargs, **sample.exact})
    return reference(op, stated, incoming, torch.Tensor.double)


class _Rounded(TorchDispatchMode):
    """Every floating-point result of an operation moves up or down by `unit`, forward and backward, also inside a
    softmax. Copies, views and changes in place stay as they are."""

    _COPIES = (
        *("_to_copy", "cat", "clone", "constant_pad_nd", "copy", "embedding", "gather", "index", "index_select"),
        *("masked_fill", "repeat", "select_backward", "slice_backward", "stack", "where"),
        *("empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_zeros", "zeros", "zeros_like"),
    )

    _aten = torch.ops.aten
    _PARTS = get_decompositions(
        [_aten._softmax, _aten._log_softmax, _aten._softmax_backward_data, _aten._log_softmax_backward_data]
    )

    def __init__(self, unit: float, draw: int) -> None:
        super().__init__()
        self.unit, self.draw = unit, draw
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self._PARTS:
            with self:
                return self._PARTS[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self._COPIES or any(r.alias_info for r in func._schema.returns):
            return out
        return mapped(out, self.moved)

    def moved(self, t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        if t.device not in self.generators:
            self.generators[t.device] = torch.Generator(t.device).manual_seed(self.draw)
        sign = torch.randint(2, t.shape, generator=self.generators[t.device], device=t.device) * 2 - 1
        return t * (1 + self.unit * sign)


def _farthest(exact: Result, moved: Callable[[int], Result]) -> list[torch.Tensor]:
    """The largest distance of three draws from `exact`, for each output, then each gradient."""
    most = [torch.zeros_like(t) if t.is_floating_point() else t for t in exact.bits()]
    for draw in range(3):
        drawn = zip(most, moved(draw).bits(), exact.bits())
        most = [torch.maximum(m, (a - b).abs()) if a.is_floating_point() else m for m, a, b in drawn]
    return most


def sensitivity(
    op: Op, sample: Sample, incoming: list[torch.Tensor | None], exact: Result, dtype: torch.dtype
) -> list[torch.Tensor]:
    """How much `exact` (outputs, then gradients) moves when every input moves by the accumulator's rounding error."""

    def moved(draw: int) -> Result:
        rounded = _Rounded(unit(dtype), draw)
        return reference(op, sample, incoming, lambda t: rounded.moved(t.double()))

    return _farthest(exact, moved)


def roundings(
    op: Op, sample: Sample, incoming: list[torch.Tensor | None], exact: Result, dtype: torch.dtype
) -> list[torch.Tensor]:
    """How much `exact` moves when every intermediate result of the oracle moves by the accumulator's rounding error.

    Unlike `sensitivity`, this shows terms that cancel whatever the inputs are: dy - n mean(dy n) in a norm's gradient,
    if one element is most of the row's norm, or a logit less the log-sum-exp of one class.
    """

    def moved(draw: int) -> Result:
        with _Rounded(unit(dtype), draw):
            return reference(op, sample, incoming, torch.Tensor.double)

    return _farthest(exact, moved)


def check(op: Op, sample: Sample, result: Result) -> None:
    """Compare a Result with the reference in fp64, within the bounds of `tolerance`."""
    first = next(t for t in tensors(sample.args) if t.is_floating_point())
    dtype, float8 = first.dtype, sample.float8 and first.device.type != "cpu"
    exact = oracle(op, sample, result.incoming)
    spec = reference(op, sample, result.incoming, torch.clone)
    assert len(result.outputs) == len(exact.outputs), f"{len(result.outputs)} outputs, expected {len(exact.outputs)}"
    for i, (a, b) in enumerate(zip(result.gradients, exact.gradients)):
        assert (a is None) == (b is None), f"gradient {i}: {a} against {b}"
    names = [f"output {i}" for i, _ in enumerate(result.outputs)]
    names += [f"gradient {i}" for i, g in enumerate(result.gradients) if g is not None]
    smooth = reference(op, sample, result.incoming, torch.Tensor.double) if sample.exact else exact
    moves = sensitivity(op, sample, result.incoming, smooth, dtype)
    for place, (name, got, expected, plain) in enumerate(zip(names, result.bits(), exact.bits(), spec.bits())):
        assert got.dtype == plain.dtype, f"{name}: {got.dtype}, the reference gives {plain.dtype}"
        n, move = sample.reduction if name.startswith("output") else sample.grad_reduction, moves[place]
        try:
            assert_close(name, got, expected, n, dtype, plain, move, float8=float8)
            continue
        except AssertionError:
            if not got.is_floating_point():
                raise
        move = torch.maximum(move, roundings(op, sample, result.incoming, smooth, dtype)[place])
        try:
            assert_close(name, got, expected, n, dtype, plain, move, float8=float8)
        except AssertionError:
            if dtype.itemsize > 2 or name.startswith("output"):
                raise
            draws = [(factor, *drawn[names.index(name)]) for factor, drawn in _draws(op, sample, result).items()]
            assert_close(name, got, expected, n, dtype, plain, move, draws, float8)


def _draws(op: Op, sample: Sample, result: Result) -> dict[float, list[tuple[torch.Tensor, torch.Tensor]]]:
    """factor -> (reference's result, oracle) of every output and gradient, for incoming gradients times the factor."""
    results = {}
    for factor in (0.7, 1.3):
        incoming = [g if g is None else g * factor for g in result.incoming]
        spec, exact = reference(op, sample, incoming, torch.clone).bits(), oracle(op, sample, incoming).bits()
        results[factor] = list(zip(spec, exact))
    return results


def noted(launches: dict) -> Callable[..., None]:
    """For `LaunchTracer`: adds a key to `launches` for each kernel that a launch would compile."""

    def note(plan: Any, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        launches[plan.tunable.name, plan.key, compile_key(kernel, args, flags)] = None

    return note


def verify(op: Op, sample: Sample, seed: int) -> Result:
    """Run the op's function, forward and backward, and check it against the oracle."""
    result = run(op.function, sample, seed)
    check(op, sample, result)
    return result
