"""Every kernel at odd sizes, forward and backward, for compute-sanitizer: `python -m tests.fuzz.device sweep`.

Kernels of rows that begin anywhere read whole vectors of 16 bytes, the last of which may end behind the tensor
(docs/safety.md). With `--checked` every tensor has an allocation of whole units of 16 bytes, filled with NaN
(allocator.c). The checker reports accesses past the last unit; a result that is NaN shows that a value in it was used.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from harness import few_sizes, make, real_sizes, reference, run, wide_sizes

from liger_hw import registry

Case = tuple[registry.Op, tuple[int, ...], torch.dtype, dict[str, Any]]


def sweep(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every op at odd sizes, forward and backward, while the time lasts; all ops at one size before any at the next.

    It passes if all ran, no result is NaN, and every kernel of the ops was launched.
    """
    part, parts = map(int, arguments.part.split("/"))
    device, end = "cpu" if arguments.dry else "cuda", time.monotonic() + arguments.seconds
    mine = list(registry.ops().values())[part::parts][: 2 if arguments.dry else None]
    todo = list(cases(mine, arguments.dry))
    done: list[str] = []
    failed: list[str] = []
    launched: set[str] = set()
    found = {"held": False, "planned": len(todo), "done": done, "failed": failed}
    for case in todo:
        if time.monotonic() > end:
            break
        print(label(case), file=sys.stderr, flush=True)
        try:
            run_case(case, device)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{label(case)}: {type(error).__name__}: {error}"[:300])
        launched |= {plan.tunable.name for plan in registry.plans()}
        done.append(label(case))
        save(found)
    own = set() if arguments.dry else {tunable.name for op in mine for tunable in op.tunables}
    missing = sorted(own - launched)
    if missing:
        print(f"sweep: no case launched {', '.join(missing)}", file=sys.stderr, flush=True)
    quarantined = {f"{mark[1]} {mark[3]}": why for mark, why in registry.quarantined().items()}
    return found | {
        "held": not failed and not missing,
        "cases": len(done),
        "kernels": sorted(launched),
        "not_launched": missing,
        "quarantined": quarantined,
    }


def label(case: Case) -> str:
    op, sizes, dtype, options = case
    return f"{op.name} {'x'.join(map(str, sizes))} {str(dtype).removeprefix('torch.')} {options or ''}".strip()


def run_case(case: Case, device: str) -> None:
    """Raises `AssertionError` for an output or a gradient that is NaN, but not in the reference."""
    op, sizes, dtype, options = case
    sample = make(op, sizes, dtype, device, 0, options)
    result = run(op.function, sample)
    if not any(t.isnan().any() for t in result.bits() if t.is_floating_point()):
        return
    plain = reference(op, sample, result.incoming, torch.clone)
    for place, (got, expected) in enumerate(zip(result.bits(), plain.bits())):
        wrong = int((got.isnan() & ~expected.isnan()).sum()) if got.is_floating_point() else 0
        assert not wrong, f"result {place}: {wrong} of {got.numel()} are NaN"


def cases(ops: list[registry.Op], dry: bool = False) -> Iterator[Case]:
    for sizes_of, dtype, every_option in (
        (few_sizes, torch.float32, False),
        (_many_rows, torch.bfloat16, False),
        (_rare, torch.bfloat16, False),
        (_long_rows, torch.bfloat16, False),
        (wide_sizes, torch.bfloat16, False),
        (_narrow_real_sizes, torch.bfloat16, False),
        (few_sizes, torch.bfloat16, True),
        (wide_sizes, torch.float32, False),
        (few_sizes, torch.float16, False),
    ):
        for op in ops:
            if sizes := sizes_of(op):
                for options in op.options if every_option else op.options[:1]:
                    yield op, sizes, torch.float32 if dry else dtype, options
        if dry:
            return


def _many_rows(op: registry.Op) -> tuple[int, ...]:
    """Enough rows for the kernels that join partial sums and merge sorted tokens."""
    special = {"embedding": (4099, 11, 33), "modulated_rms_norm": (2, 16001, 69)}
    return special.get(op.name) or (133, *few_sizes(op)[1:])


def _rare(op: registry.Op) -> tuple[int, ...] | None:
    """Sizes for two kernels: the sums of all modulations, and a head of more than two chunks in 16 bits."""
    return {"modulated_rms_norm": (1, 1001, 1153), "fused_linear_cross_entropy": (12301, 33, 101)}.get(op.name)


def _long_rows(op: registry.Op) -> tuple[int, ...]:
    """Rows too wide for one program, for ops of rows and columns."""
    first = few_sizes(op)
    if op.name == "modulated_rms_norm":
        return 2, 7, 12301
    return (7, 16401) if len(first) == 2 and op.name != "gated_rms_norm" else (2, *first[1:])


def _narrow_real_sizes(op: registry.Op) -> tuple[int, ...]:
    """A real width and less of everything else, since the checker is slow."""
    if op.name == "modulated_rms_norm":
        return 1, 8201, 1152  # more rows a modulation than one program adds up
    sizes = [min(size, 257) for size in real_sizes(op)[:-1]] + [real_sizes(op)[-1]]
    while len(sizes) > 2 and math.prod(sizes) > 1 << 21:
        largest = max(range(len(sizes) - 1), key=sizes.__getitem__)
        sizes[largest] = sizes[largest] // 2 | 1
    return tuple(sizes)


# -- memory in units of 16 bytes -------------------------------------------------------------------------------------


def round_allocations() -> None:
    """Use allocator.c for torch's GPU memory; to be called before CUDA is initialised."""
    library = build_allocator(Path(tempfile.mkdtemp(prefix="liger_hw-fuzz-")), loaded_library("libcudart.so"))
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "rounded_malloc", "rounded_free")
    torch.cuda.memory.change_current_allocator(allocator)


def build_allocator(folder: Path, runtime: str) -> Path:
    """allocator.c as a library that takes its memory from `runtime`."""
    library = folder / "allocator.so"
    source = Path(__file__).with_name("allocator.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), runtime, "-o", str(library)], check=True)
    return library


def loaded_library(name: str) -> str:
    """The path of a library that this process has loaded; raises `RuntimeError` if it has not."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if Path(line.rpartition(" ")[2]).name.startswith(name):
            return line.rpartition(" ")[2]
    raise RuntimeError(f"this process has not loaded {name}: torch's own allocator cannot be replaced")


def planted(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A kernel reads NaN up to the end of its tensor's last 16 bytes, which the checker must allow; another writes the
    next element, which the checker must report."""
    from tests.fuzz.misbehaving import read_behind, write_behind

    behind = read_behind()
    found = {"held": all(map(math.isnan, behind)), "read_behind": [repr(value) for value in behind]}
    try:
        write_behind()
    except RuntimeError as error:  # raised by the checker
        return {**found, "raised": str(error).splitlines()[0][:200]}
    return {**found, "raised": ""}
