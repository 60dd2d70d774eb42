"""The lists of cases behind docs/benchmarks: timed by one process, or by one a GPU off a shared list.

    python benchmarks/sweep.py table --against torch,compile,liger,quack,cce --json table.json
    python benchmarks/sweep.py many rms_norm dyt --against compile,liger
    for i in 0 1; do CUDA_VISIBLE_DEVICES=$i python benchmarks/sweep.py many --share out --json many.json & done; wait

table    every op at its workloads and `BESIDE`: at least three sizes, GEMM-bound ops first, which take longest
many     at least 40 shapes of every memory-bound op (`MANY`), only timed
widths   the norms at 8192 rows of 1024 to 16384 columns in steps of 128 (`WIDTHS`), only timed; --plot draws it, --step
         1024 is for peers that compile each width anew
losses   every loss at the sizes of docs/losses.md (`LOSSES`), the chunked losses included

The first shape of every op comes before the second of any, so that a run cut short has all ops.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import chunked_losses
import more_peers
import separate_ops
import share
import size_plots

from liger_hw import registry
from liger_hw.bench import floors, ops, peers, report
from liger_hw.bench.cases import DTYPES, Case, make_inputs, with_few_rows
from liger_hw.bench.inputs import Work
from liger_hw.bench.timing import Budget, Meter, OutOfBudget

CASE_LIMIT = 180
"""Seconds after which a case of a shared list is given up."""

# -- what only sweeps compare ----------------------------------------------------------------------------------------

floors.PRODUCTS.update(
    (name, floors.two_heads if name in chunked_losses.TWO_HEADS else floors.linear_head) for name in chunked_losses.OPS
)
peers.PEERS["apart"] = peers.Peer("apart", "torch", "torch", more_peers.table_of(separate_ops.SEPARATE, "apart"))
_of_liger = peers.PEERS["liger"].build


def _liger(op: Any) -> Callable[..., Any]:
    """liger-kernel's function for an op, or its class for a chunked loss."""
    return chunked_losses.liger(op.name) if op.name in chunked_losses.OPS else _of_liger(op)


peers.PEERS["liger"] = peers.Peer("liger", "liger_kernel", "liger-kernel", _liger)


def cases_of(name: str, only: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16, step: int = 128) -> list[Case]:
    """The cases of a list, of the ops named in `only` or of all. Raises `ValueError` for an unknown op."""
    table = {**registry.ops(), **chunked_losses.OPS}
    if unknown := [op for op in only if op not in table]:
        raise ValueError(f"unknown op {unknown[0]!r}; known: {', '.join(table)}")
    found: list[tuple[int, Case]] = []
    for op in [table[one] for one in only] or table.values():
        if name in ("many", "widths"):
            shapes = (MANY if name == "many" else WIDTHS).get(op.name, ())
            if name == "widths":
                shapes = [shape for shape in shapes if shape[1] % step == 0]
            found += [(place, Case(op, name, shape, dtype, quick=True)) for place, shape in enumerate(shapes)]
        elif name == "losses":
            found += [(place, Case(op, "losses", *shape)) for place, shape in enumerate(LOSSES.get(op.name, ()))]
        elif op.name not in chunked_losses.OPS:
            shapes = [*op.workloads.items(), *(("x".join(map(str, shape)), shape) for shape in BESIDE.get(op.name, ()))]
            kind = torch.float32 if op.name in DIVERGENCES else dtype
            early = -100 if "hidden" in op.tunables[0].dims else 0
            found += [(early + place, Case(op, label, shape, kind)) for place, (label, shape) in enumerate(shapes)]
    return [case for _, case in sorted(found, key=lambda pair: pair[0])]


# -- the lists ------------------------------------------------------------------------------------------------------

DIVERGENCES = frozenset({"kl_div", "jsd", "tvd"})
"""In fp32, as their callers hold log-probabilities."""

BESIDE: dict[str, tuple[tuple[int, ...], ...]] = {
    "rms_norm": ((16384, 1024), (2048, 65536)),
    "layer_norm": ((2048, 65536),),
    "cross_entropy": ((8192, 131072),),
    "fused_linear_cross_entropy": ((8192, 4096, 131072), (1024, 4096, 131072)),
    **dict.fromkeys(DIVERGENCES, ((4096, 131072),)),
    "llama4_rope": ((1, 8192, 40, 8, 128),),
    "vision_rope": ((64, 257, 16, 16, 64),),
    "qwen2vl_mrope": ((4, 4096, 16, 2, 128),),
    "interleaved_rope": ((4, 4096, 48, 8, 128),),
    "qk_norm_rope": ((4, 4096, 16, 8, 128),),
    "embedding": ((16384, 32768, 4096),),
    "multi_token_attention": ((8, 512, 32),),
}
"""Sizes beside an op's workloads that the table compares: wider, narrower, or a third."""

# -- the losses ------------------------------------------------------------------------------------------------------

_BF16, _FP32 = torch.bfloat16, torch.float32
LOSSES: dict[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]] = {
    "fused_linear_cross_entropy": (
        *(((8192, 4096, 131072), _BF16), ((8192, 4096, 32768), _BF16), ((1024, 4096, 131072), _BF16)),
    ),
    "fused_linear_log_probs": (((8192, 4096, 131072), _BF16),),
    "fused_linear_jsd": (((4096, 4096, 128256), _BF16),),
    "fused_linear_kl_div": (((4096, 4096, 128256), _BF16),),
    "cross_entropy": (((8192, 131072), _BF16), ((8192, 32768), _BF16)),
    **dict.fromkeys(("kl_div", "jsd", "tvd"), (((4096, 131072), _FP32),)),
    "fused_ce_tvd": (((4096, 131072), _BF16),),
    "vocab_parallel_cross_entropy": (((8192, 32768), _BF16),),
    **dict.fromkeys(chunked_losses.OPS, (((8, 1024, 4096, 131072), _BF16),)),
    **dict.fromkeys(("jsd_distillation", "cosine_distillation"), (((4, 1024, 4096, 131072), _BF16),)),
}
"""The problem sizes, with their dtype, at which docs/losses.md compares every loss with its peers."""

# -- many shapes -----------------------------------------------------------------------------------------------------

ROWS = (
    *((1, 512), (131072, 4096), (4096, 4096), (1000, 4095), (65536, 128), (2048, 32768), (16, 4096), (16384, 8191)),
    *((128, 512), (8192, 5120), (512, 2048), (32768, 1024), (1, 4096), (8192, 2047), (4096, 12288), (1024, 3072)),
    *((7, 4097), (131072, 1024), (257, 777), (16384, 4096), (512, 8192), (2048, 6144), (65536, 512), (128, 4096)),
    *((1, 12289), (8192, 3584), (32, 8192), (4096, 1024), (32768, 2880), (1024, 16384), (131072, 64), (512, 1000)),
    *((16, 1024), (3000, 2560), (16384, 1536), (4096, 2304), (8192, 7168), (2048, 4096), (128, 14336), (65536, 2048)),
    *((8192, 640), (4096, 8192)),
)
"""(n_rows, n_cols) from a decode step's to 131072 rows; the order mixes small and large, so that a run cut short has
both."""

_HEADS = ((32, 8, 128), (8, 4, 256), (28, 4, 128), (16, 16, 64), (40, 8, 128), (5, 1, 96))
_TOKENS = ((1, 1), (1, 8192), (1, 512), (4, 4096), (1, 17), (2, 2048), (32, 1), (1, 1000))
_VISION = ((16, 16, 80), (16, 16, 72), (16, 16, 64), (12, 12, 64), (16, 16, 88), (5, 5, 48))
_IMAGES = ((1, 1), (16, 1024), (1, 577), (16, 577), (1, 64), (4, 4096), (64, 257), (1, 1500))
_PICTURES = ((1, 64), (16, 1024), (4, 4096), (1, 49), (32, 256), (2, 16384), (3, 197))


def _modulated() -> Iterator[tuple[int, int, int]]:
    for n_rows, n_cols in ROWS:
        yield next(n for n in (32, 8, 5, 3, 1) if n_rows % n == 0), n_rows, n_cols


def _rotary(heads: tuple, tokens: tuple, long: tuple) -> tuple[tuple[int, ...], ...]:
    """Five counts of heads at each of eight counts of tokens, and 131072 tokens of few heads."""
    turns = [(*t, *heads[(i + j) % len(heads)]) for i in range(5) for j, t in enumerate(tokens)]
    return (*turns[:8], (1, 131072, *long), *turns[8:])


MANY: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(("rms_norm", "fused_add_rms_norm", "layer_norm", "poly_norm", "dyt", "softmax", "sparsemax"), ROWS),
    **dict.fromkeys(("swiglu", "fused_gate_up_swiglu", "geglu", "relu_squared"), ROWS),
    "modulated_rms_norm": tuple(_modulated()),
    "group_norm": (
        *((batch, 32, spatial, channels) for channels in (320, 64, 1280, 512, 128) for batch, spatial in _PICTURES),
        *(
            (8, groups, 1024, channels)
            for groups, channels in ((1, 512), (8, 96), (16, 400), (4, 20), (2, 66), (3, 33))
        ),
    ),
    "rope": _rotary(_HEADS, _TOKENS, (8, 2, 128)),
    "qk_norm_rope": _rotary(_HEADS, _TOKENS, (8, 2, 128)),
    "qwen2vl_mrope": _rotary(_HEADS, _TOKENS, (8, 2, 128)),
    "interleaved_rope": _rotary(_HEADS, _TOKENS, (8, 2, 128)),
    "llama4_rope": _rotary(_VISION, _IMAGES, (5, 1, 128)),
    "vision_rope": _rotary(_VISION, _IMAGES, (4, 4, 80)),
    "embedding": tuple(
        (n_tokens, vocab, n_cols)
        for vocab, n_cols in ((32000, 4096), (50257, 768), (128256, 2048), (151936, 1024), (32000, 1023))
        for n_tokens in (1, 4096, 17, 16384, 512, 131072, 1000, 32768)
    ),
    "multi_token_attention": tuple(
        (batch, seq_len, channels)
        for channels in (32, 8, 5)
        for batch, seq_len in ((1, 64), (4, 1024), (1, 511), (2, 256), (1, 2048), (4, 128), (1, 1000), (8, 512))
    )
    + tuple(
        (1, seq_len, 16)
        for seq_len in (1, 17, 64, 100, 128, 256, 333, 512, 768, 1024, 1025, 1536, 1792, 2048, 2500, 3000)
    ),
}
"""At least 40 problem sizes of each memory-bound op, in its `dims`."""

WIDTHS: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(
    ("rms_norm", "fused_add_rms_norm", "layer_norm"), tuple((8192, n_cols) for n_cols in range(1024, 16385, 128))
)
"""Every width a norm may have between powers of two, for the share of the floor as a curve."""

# -- running ---------------------------------------------------------------------------------------------------------


def warm(
    todo: Iterable[Case],
    device: torch.device | str,
    against: Sequence[str] = peers.DEFAULT,
    on_case: Callable[[Case], None] = lambda case: None,
) -> None:
    """Call every arm that compiles once for every case and time nothing: afterwards the compilers' caches on disk have
    what a timed run of the same cases needs. Many processes may do this on one device at once, each with one compiling
    thread.
    """
    from torch._inductor import config

    config.compile_threads = 1
    config.autotune_local_cache = False  # what Inductor picks among noisy neighbours must not be kept
    meter = Meter(device)
    for case in todo:
        on_case(case)
        for name in (peers.OURS, *against):
            if name in ("torch", "aten"):
                continue
            with contextlib.suppress(Exception):  # a timed run will say what is wrong
                function = peers.arm(name, case.op)
                sizes = [case.sizes]
                if not case.quick and name != "compile":
                    sizes.append(with_few_rows(case, 16))
                for one in sizes:
                    Work(function, [make_inputs(case, one, meter.device, 0)], backward=True).call()
        meter.forget()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", choices=("table", "many", "widths", "losses"))
    parser.add_argument("ops", nargs="*", metavar="OP")
    parser.add_argument(
        "--against", default="torch,compile,liger", help="peers, joined by commas (default %(default)s)"
    )
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator() or "cpu"))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--json", metavar="FILE", help="where the rows go, written after every case")
    parser.add_argument("--plot", metavar="FILE", help="draw each op's share of its floor over its columns")
    parser.add_argument("--step", type=int, default=128, help="of widths: columns between two (default %(default)s)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no new case after this long")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="commit to record (default: the checkout's)")
    parser.add_argument("--share", metavar="DIR", help="take cases off a list that other processes work on as well")
    parser.add_argument("--warm", action="store_true", help="time nothing: call each arm once, to fill the caches")
    told = parser.parse_args(argv)
    try:
        todo = cases_of(told.list, told.ops, DTYPES[told.dtype], told.step)
        budget = Budget(told.budget)
        shared = share.Share(told.share, todo, budget, "warm" if told.warm else "timed") if told.share else None
    except (ValueError, OSError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    against = told.against.split(",")
    if told.warm:
        with contextlib.suppress(OutOfBudget):
            warm(shared or todo, told.device, against, lambda case: _say(f"{budget.spent:.0f} s  {case}"))
        return 0
    with Meter(told.device) as meter:
        return _timed(told, todo, against, meter, budget, shared)


def _timed(told: Any, todo: list[Case], against: list[str], meter: Meter, budget: Budget, shared: Any) -> int:
    facts = report.machine(meter.device, told.commit)
    facts["copy_gb_s"] = meter.copy_rate()
    names = "device", "driver", "torch", "triton", "liger_hw", "commit", "date", "copy_gb_s"
    carried = {name: facts[name] for name in names}
    rows: list[dict[str, Any]] = []
    begun = itertools.count(1)
    ended = ""

    def begin(case: Case) -> None:
        number = shared.number + 1 if shared else next(begun)
        _say(f"[{number}/{len(todo)}] {budget.spent:.0f} s  {case}")
        if shared:  # an arm that hangs ends this process; started again, it goes on with the next case
            faulthandler.dump_traceback_later(CASE_LIMIT, exit=True, file=sys.__stderr__)

    def keep(found: list[dict[str, Any]]) -> None:
        found = [{**row, **carried} for row in found]
        rows.extend(found)
        faulthandler.cancel_dump_traceback_later()
        if shared:
            shared.keep(found)
        elif told.json:
            report.save(told.json, {"machine": facts, "rows": rows, "complete": False})

    try:
        options = {"against": against, "repeats": told.repeats, "budget": budget, "meter": meter}
        options |= {"copy_rate": facts["copy_gb_s"], "on_case": begin, "on_rows": keep}
        ops.bench(shared or todo, meter.device, **options)
    except (OutOfBudget, ops.DeviceLost) as stop:
        ended = str(stop)
    except KeyboardInterrupt:
        ended = "interrupted"
    faulthandler.cancel_dump_traceback_later()
    complete = shared.done() if shared else not ended
    rows = shared.rows() if shared else rows
    if told.json:
        report.save(told.json, {"machine": facts, "rows": rows, "complete": complete})
    print(report.as_text(rows))
    if told.plot:
        size_plots.share_by_width(rows, told.plot)
    if ended:
        print(f"stopped early: {ended}")
    failed = any(row["arm"] == peers.OURS and row["status"] == "error" for row in rows)
    return 130 if ended == "interrupted" else 1 if failed or "answering" in ended else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
