"""docs/distributed-matrix.md, from records of tests/distributed/test_matrix.py; no cell is typed by hand.

    bash ci/distributed.sh                               runs the matrix and leaves its records in a folder ($MATRIX)
    python ci/distributed_page.py collect FOLDER COMMIT  keep a run's records, with versions; write the page
    python ci/distributed_page.py                        write the page
    python ci/distributed_page.py --check                say whether it is current; status 1 if not

A cell that the kept run does not have is shown as not run.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "distributed-matrix.md"
KEPT = {
    "CPU, gloo": ROOT / "benchmarks" / "results" / "distributed-matrix-cpu.json",
    "NCCL": ROOT / "benchmarks" / "results" / "distributed-matrix-cuda.json",
}
"""Where a run's records are kept, by what carried its collectives."""
BEGIN, END = "<!-- matrix: python ci/distributed_page.py -->\n", "<!-- end of matrix -->\n"
KERNELS = {
    "rms_norm": "rms_norm_fwd",
    "swiglu": "swiglu_fwd",
    "rope": "rope",
    "head": "fused_linear_cross_entropy_fwd",
    "head, split": "fused_linear_cross_entropy_tp_fwd",
    "head, DPO or GRPO": "chunked_loss",
    "log-probabilities, split": "fused_linear_log_probs_fwd|fused_linear_log_probs_keep",
    "experts": "fused_moe_fwd",
}
"""Name in the table -> operators whose calls are counted."""


def load_matrix() -> Any:
    """tests/distributed/test_matrix.py, which says what engines there are and what each must do."""
    path = ROOT / "tests" / "distributed" / "test_matrix.py"
    spec = importlib.util.spec_from_file_location("test_matrix", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collect(folder: Path, commit: str) -> dict[str, dict[str, Any]]:
    """Device (cpu, cuda) -> what is kept of the records in a folder. Raises `ValueError` where there are none."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise ValueError(f"no records of the matrix in {folder}; MATRIX={folder} makes the tests leave them there")
    about, kept = {"date": datetime.date.today().isoformat(), "commit": commit}, {}
    for device in sorted({record["device"] for record in records}):
        mine = [record for record in records if record["device"] == device]
        versions = {json.dumps(record.pop("versions")): None for record in mine}
        if len(versions) > 1:
            raise ValueError(f"{folder} has records of several environments: {' and '.join(versions)}; collect one's")
        kept[device] = {**about, "versions": json.loads(next(iter(versions))), "records": mine}
    return kept


def table(runs: dict[str, dict[str, Any] | None], matrix: Any) -> str:
    """The section between the marks. runs: what carried the collectives -> what is kept of that run, or None."""
    found = {
        (kind, record["compute"], record["engine"], record["adapter"]): record
        for kind, run in runs.items()
        for record in (run or {"records": ()})["records"]
    }
    lines = []
    for kind, run in runs.items():
        if run is None:
            lines.append(f"- {kind}: not run.")
        else:
            versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            lines.append(f"- {kind}: run on {run['date']} at commit {run['commit'][:12]}, with {versions}.")
    lines += [
        "",
        "| engine | trained | ranks | on | losses | gradients | peak MiB, unpatched "
        "| calls of our kernels, all ranks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for engine in matrix.ENGINES:
        for cell in matrix.cells_of(engine) + matrix.more_cells_of(engine):
            adapter = cell.partition(":")[2]
            for kind in [kind for kind, run in runs.items() if run is not None] or ["-"]:
                cells = _cells(found.get((kind, "float32", engine, adapter)), matrix)
                lines.append(f"| {engine} | {adapter} | {cells[0]} | {kind} | {' | '.join(cells[1:])} |")
                if half := found.get((kind, "bfloat16", engine, adapter)):
                    cells = _cells(half, matrix)
                    lines.append(f"| {engine} | {adapter} | {cells[0]} | {kind}, bf16 | {' | '.join(cells[1:])} |")
    return "\n".join([*lines, ""])


def _cells(record: dict[str, Any] | None, matrix: Any) -> list[str]:
    """Ranks, losses, gradients, memory and kernels of one record.

    Of bf16 the unpatched engine's errors are told too.
    """
    if record is None:
        return ["-", "not run", "not run", "-", "not run"]
    if "failed" in record:
        return [str(record.get("ranks", "-")), f"**failed**: {record['failed'].splitlines()[0][:120]}", "-", "-", "-"]
    wrong = matrix.wrong(record)
    unpatched = record.get("unpatched", {})
    errors, halves = [], record["compute"] != "float32"
    for name in ("loss", "gradient"):
        word = "**wrong**" if name in wrong else "as near" if halves else "same"
        own = f", unpatched {unpatched[f'{name}_error']:.0e}" if halves else ""
        errors.append(f"{word} ({record[f'{name}_error']:.0e}{own})")
    memory = f"{record['peak_mib']:.0f}, {unpatched['peak_mib']:.0f}" if "peak_mib" in record else "-"
    counts = {n: sum(record["kernels"].get(op, 0) for op in ops.split("|")) for n, ops in KERNELS.items()}
    calls = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    kernels = (f"**{wrong['kernels']}**; " if "kernels" in wrong else "") + (calls or "none")
    return [str(record["ranks"]), *errors, memory, kernels]


def page() -> str:
    """docs/distributed-matrix.md with its table written anew."""
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no matrix: {BEGIN.strip()} and {END.strip()} must stand around it")
    runs = {kind: json.loads(path.read_text()) if path.exists() else None for kind, path in KEPT.items()}
    return f"{before}{BEGIN}\n{table(runs, load_matrix())}\n{END}{after}"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["collect"] and len(arguments) == 3:
        for device, run in collect(Path(arguments[1]), arguments[2]).items():
            path = KEPT["CPU, gloo" if device == "cpu" else "NCCL"]
            path.write_text(json.dumps(run, indent=1) + "\n")
    elif arguments == ["--check"]:
        if PAGE.read_text() == page():
            return 0
        print("docs/distributed-matrix.md is older than the records it is made from: python ci/distributed_page.py")
        return 1
    elif arguments:
        print(__doc__)
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
