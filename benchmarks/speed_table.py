"""README's speed table in one process, on one commit, at the default level of the memory dial.

    python benchmarks/speed_table.py OUT.json [--budget 240] [--models mistral,llama3]

Nine models at published widths, layers, batch and length being the defaults of `end_to_end.py --model NAME`;
three arms each, of Mixtral two: Liger tunes its experts in its first step, which has not ended in 290 s. A row that the
budget ends, or whose arm does not fit the device, says so. `readme.py` reads the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import end_to_end
import torch
from training import MODELS, Schedule

from liger_hw.bench import report, timing

ORDER = ("llama3", "mistral", "qwen3", "phi3", "granite", "olmo2", "qwen2", "gemma2", "mixtral")


def compact(results: dict[str, Any]) -> dict[str, Any]:
    """What the tables show of a model, few enough figures to be printed in a line."""
    arms = {row["arm"]: row for row in results["summary"]}
    failed = {run["arm"]: run["note"] for run in results["runs"] if run["status"] != "ok"}
    return {
        "layers": results["plan"]["layers"],
        "of": results["shape"]["layers"],
        "batch": results["plan"]["batch"],
        "seq": results["plan"]["seq"],
        "arms": {
            arm: {
                "tokens_per_second": round(row["tokens_per_second"], 1),
                "peak_gib": round(row["peak_gib"] or 0.0, 3),
                "first_step_seconds": round(row["first_step_seconds"], 2),
                "losses_apart": float(f"{row['largest_loss_difference']:.2g}"),
            }
            for arm, row in arms.items()
        },
        **({"failed": failed} if failed else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no arm is started")
    parser.add_argument("--models", default=",".join(ORDER))
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    device, budget = torch.device("cuda", 0), timing.Budget(options.budget)
    small = torch.cuda.get_device_properties(device).total_memory < 100 * 2**30
    table: dict[str, Any] = {
        "machine": report.machine(device, os.environ.get("LIGER_COMMIT")),
        "steps": options.steps,
        "models": {},
    }
    for model in options.models.split(","):
        start, batch = time.perf_counter(), 1 if small and model == "gemma2" else 2  # its logits fill an 80 GB device
        arms = ("hf", "liger_hw") if model == "mixtral" else ("hf", "liger", "liger_hw")
        schedule = Schedule(model, MODELS[model].trained, batch, 4096, options.steps, arms)
        table["models"][model] = compact(end_to_end.measure(schedule, device, budget))
        table["models"][model]["seconds"] = round(time.perf_counter() - start, 1)
        Path(options.out).write_text(json.dumps(table, indent=1) + "\n")
        print(json.dumps({model: table["models"][model]}), flush=True)
    print(json.dumps(table["machine"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
