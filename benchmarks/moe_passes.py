"""Each product of a layer's experts alone: `torch._grouped_mm` and the kernels with each tile, ms and TFLOP/s.

    python benchmarks/moe_passes.py [--layers NAMES] [--routing skewed] [--json results/moe-passes-<device>.json]
    python benchmarks/moe_passes.py --device cpu --tiny          does it run? (the interpreter: TRITON_INTERPRET=1)

The library's time includes copying gathered rows, as the op calls it. Routing, gate and sums are timed too. What wins
is what the heuristic of kernels/moe/products.py should choose. bf16 on a device, fp32 with --tiny.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable

import torch

from liger_hw.bench import report, timing
from liger_hw.bench.cases import make_inputs
from liger_hw.bench.moe import ROUTINGS, layers
from liger_hw.kernels.moe import gates, products, routing, sums
from liger_hw.kernels.moe.fused_moe import WORKLOADS
from liger_hw.kernels.moe.reference import Gate
from liger_hw.registry import backend, override
from liger_hw.text import first_line, table

TILES = {
    "rows": (
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (64, 256, 64, 8, 4),
        (64, 128, 64, 4, 4),
    ),
    "weights": ((128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3)),
    "tiny": ((16, 32, 16, 4, 1),),
}
"""(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages)"""


def passes(
    tensors: tuple[torch.Tensor, ...], where: routing.Routing
) -> tuple[dict[str, Callable], dict[str, Callable]]:
    """(the six products, what is between them) of a layer, each as a call on tensors that lie ready."""
    x, up, down, index, weights = (t.detach() for t in tensors)
    key = products.product_key(*x.shape, down.shape[2], down.shape[0], index.shape[1], x.itemsize)
    z, act, y = (x.new_empty(index.numel(), n).normal_() for n in (up.shape[1], down.shape[2], x.shape[1]))
    gate = index, Gate(), where, down.shape[0]
    rows, of_weights = products.rows_product, products.weights_product
    found = {
        "up": lambda: rows(products.UP, key, x, up, 2, True, where),
        "down": lambda: rows(products.DOWN, key, act, down, 2, False, where),
        "down_bwd": lambda: rows(products.DOWN_BWD, key, x, down, 1, True, where),
        "up_bwd": lambda: rows(products.UP_BWD, key, z, up, 1, False, where),
        "up_weights": lambda: of_weights(products.UP_WEIGHTS, key, z, x, (False, True), where),
        "down_weights": lambda: of_weights(products.DOWN_WEIGHTS, key, x, act, (True, False), where),
    }
    parts = {
        "routing": lambda: routing.route(index, down.shape[0]),
        "gather": lambda: x.index_select(0, where.token),
        "gate": lambda: gates.gated(z, None, weights, *gate),
        "gate_bwd": lambda: gates.gated_bwd(act, z, weights, x, None, *gate),
        "combine": lambda: sums.combine(y, weights, None, index, where),
    }
    return found, parts


def measure(case: Any, meter: timing.Meter, tiny: bool) -> list[dict[str, Any]]:
    """Rows {layer, pass, engine, tile, ms, tflops} of one layer."""
    tensors = make_inputs(case, case.sizes, meter.device, 0).args
    n_tokens, hidden, inner, n_experts, top_k = case.sizes
    calls, parts = passes(tensors, routing.route(tensors[3], n_experts))
    times = 1 if tiny else 20

    def row(name: str, engine: str, tile: list[int], call: Callable[[], Any]) -> dict[str, Any]:
        try:
            for _ in range(0 if tiny else 2):
                call()
            ms = sorted(meter.each(times, call, meter.flush))[times // 2]
        except Exception as error:  # a tile that does not fit is a row, not the end
            return {"layer": case.label, "pass": name, "engine": engine, "tile": tile, "note": first_line(error)}
        rate = None
        if name in calls:
            rate = 2 * n_tokens * top_k * hidden * inner * (2 if name.startswith("up") else 1) / ms / 1e9
        return {"layer": case.label, "pass": name, "engine": engine, "tile": tile, "ms": ms, "tflops": rate}

    found = [row(name, "", [], call) for name, call in parts.items()]
    for tunable in products.TUNABLES:
        plan = tunable.plan(meter.device, products.product_key(*case.sizes, tensors[0].itemsize))
        tiles = TILES["tiny" if tiny else "weights" if tunable.variant.endswith("weights") else "rows"]
        engines = [(products.KERNELS, "kernels")]
        if backend(plan.target.vendor).has_grouped_gemm(plan.target):
            engines.insert(0, (products.LIBRARY, "library"))
        for engine, name in engines:
            for m, n, k, warps, stages in tiles[:1] if engine == products.LIBRARY else tiles:
                blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8, "ENGINE": engine}
                config = type(plan.config)(blocks, warps, stages)
                with override(tunable.name, config):
                    tile = [] if engine == products.LIBRARY else [m, n, k, warps, stages]
                    found.append(row(tunable.variant, name, tile, calls[tunable.variant]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(WORKLOADS), help="workloads, or sizes such as 8192x2048x768x128x8")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a layer of a few rows, to try the script")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    sizes = ["4x32x16x3x2"] if arguments.tiny else arguments.layers.split(",")
    rows: list[dict[str, Any]] = []
    with timing.Meter(arguments.device) as meter:
        facts = report.machine(meter.device)
        for case in layers(sizes, (), arguments.routing, torch.float32 if arguments.tiny else torch.bfloat16):
            rows += measure(case, meter, arguments.tiny)
            meter.forget()
            if arguments.json:
                report.save(arguments.json, {"machine": facts, "routing": arguments.routing, "rows": rows})
    cells = [("layer", "pass", "engine", "tile", "ms", "TFLOP/s")]
    for one in rows:
        result = (
            (f"{one['ms']:.4f}", f"{one['tflops']:.0f}" if one["tflops"] else "") if "ms" in one else (one["note"], "")
        )
        cells.append((one["layer"], one["pass"], one["engine"], "x".join(map(str, one["tile"])), *result))
    print(table(cells))


if __name__ == "__main__":
    main()
