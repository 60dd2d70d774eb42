"""The cases of a benchmark: an op at problem sizes, in a dtype.

cases(["rms_norm"])                                  its workloads
cases(["jsd"], ["workloads", "4096x131072@fp32"])    its workloads and one more size
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Callable, Sequence

import torch

from .. import registry
from ..registry import Op
from .inputs import Inputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """An op at problem sizes. quick: measure times only, no memory or accuracy
    prepare: changes the op's sample; limit: seconds in which an arm must be ready (default: `ops.ARM_LIMIT`)
    """

    op: Op
    label: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    quick: bool = False
    prepare: Callable[[Inputs], Inputs] | None = None
    limit: int | None = None

    def __str__(self) -> str:
        dtype = "" if self.dtype is torch.bfloat16 else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{self.op.name} {'x'.join(map(str, self.sizes))}{dtype}"


def cases(ops: Sequence[str], sizes: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """The named ops, or all, at each of `sizes`, or at all their workloads.

    A size is the name of a workload, numbers such as `8192x4096`, `workloads` for all of an op's, or `small` for a size
    that runs quickly anywhere. `@fp32` after it sets its dtype. Raises `ValueError` for an unknown op, and for a size
    that none of the ops takes.
    """
    table = [registry.get_op(name) for name in ops] if ops else list(registry.ops().values())
    todo: list[Case] = []
    used = set()
    for op in table:
        dims = op.tunables[0].dims
        for text in sizes or ["workloads"]:
            word, _, dtype_name = text.partition("@")
            if dtype_name and dtype_name not in DTYPES:
                raise ValueError(f"size {text!r}: unknown dtype {dtype_name!r}; known: {', '.join(DTYPES)}")
            kind = DTYPES.get(dtype_name, dtype)
            parts = word.split("x")
            numbers = tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
            if word == "workloads":
                todo += [Case(op, name, shape, kind) for name, shape in op.workloads.items()]
            elif word == "small":
                todo.append(Case(op, word, op.small_sizes, kind))
            elif word in op.workloads:
                todo.append(Case(op, word, op.workloads[word], kind))
            elif len(numbers) == len(dims) and min(numbers) > 0:
                todo.append(Case(op, word, numbers, kind))
            else:
                continue
            used.add(text)
    if missing := [text for text in sizes if text not in used]:
        takes = "; ".join(f"{op.name}: {' x '.join(op.tunables[0].dims)} or {', '.join(op.workloads)}" for op in table)
        raise ValueError(f"no op takes size {missing[0]!r} ({takes})")
    return todo


# -- the inputs of a case ---------------------------------------------------------------------------------------------

ROW_DIMS = frozenset({"n_rows", "n_tokens", "rows", "tokens", "batch", "seq", "seq_len", "n_seq", "bsz", "bt"})
"""Names in `Tunable.dims` of sizes that may be reduced without changing the computation of a row."""


def make_inputs(case: Case, sizes: tuple[int, ...], device: torch.device, seed: int) -> Inputs:
    """Inputs from the op's sample, without keywords that have their default value: a peer may not have the keyword."""
    generator = torch.Generator(device).manual_seed(seed)
    sample = case.op.sample(sizes, case.dtype, device, generator)
    known = inspect.signature(case.op.function).parameters
    kwargs = {name: value for name, value in sample.kwargs.items() if value is not known[name].default}
    inputs = Inputs(sample.args, kwargs, seed=1000 + seed, moved=sample.moved, exact=sample.exact)
    return case.prepare(inputs) if case.prepare else inputs


def with_few_rows(case: Case, limit: int) -> tuple[int, ...]:
    """The case's sizes, limited to `limit` in the dims of `ROW_DIMS`."""
    dims = case.op.tunables[0].dims
    rows = [name in ROW_DIMS for name in dims]
    if not any(rows):
        rows[0] = True
    return tuple(min(size, limit) if row else size for size, row in zip(case.sizes, rows))
