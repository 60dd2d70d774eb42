"""The tables of docs/losses.md, for readme.py."""

from __future__ import annotations

from typing import Any

import published

SHOWN = {
    "cross_entropy": ("8192x32768", "8192x131072"),
    **dict.fromkeys(("kl_div", "jsd", "tvd"), ("4096x131072 fp32",)),
    "fused_ce_tvd": ("4096x131072",),
    "vocab_parallel_cross_entropy": ("8192x32768",),
    "fused_linear_cross_entropy": ("8192x4096x32768", "8192x4096x131072", "1024x4096x131072"),
    "fused_linear_scaled_cross_entropy": ("8192x4096x131072",),  # as runs before 2026-11-23 name the next one
    "fused_linear_log_probs": ("8192x4096x131072",),
    **dict.fromkeys(("fused_linear_jsd", "fused_linear_kl_div"), ("4096x4096x128256",)),
    **dict.fromkeys(("orpo", "cpo", "simpo", "kto", "dpo", "grpo", "grpo_sequence"), ("8x1024x4096x131072",)),
    **dict.fromkeys(("jsd_distillation", "cosine_distillation"), ("4x1024x4096x131072",)),
}
"""`python benchmarks/sweep.py losses`, in the order of the table."""

PEERS = {"liger": "Liger 0.8.5", "compile": "torch.compile", "torch": "torch", "quack": "quack 0.6.5"}
PEERS |= {"cce": "CCE 25.1.1", "cce_exact": "CCE, exact"}


def losses_table() -> str:
    rows, whole = published.measured(published.ALL_LOSSES), (published.RESULTS / published.ALL_LOSSES).exists()
    lines = [
        f"| loss | sizes | floor | liger_hw | {' | '.join(PEERS.values())} | MiB | error, loss | error, gradient |",
        "|---" * (7 + len(PEERS)) + "|",
    ]
    for op, sizes in SHOWN.items():
        for size in sizes:
            if (op, size, "liger_hw") not in rows:
                continue
            ours, others = rows[op, size, "liger_hw"], [rows.get((op, size, arm)) for arm in PEERS]
            share = f"{ours['floor_ms'] / ours['ms']['median']:.0%}"
            old = [row["mark"] if whole and row else "" for row in (ours, *others)]
            cells = [op, size, f"{ours['floor_ms']:.3g}", f"**{published.cell(ours)}{old[0]}** ({share})"]
            cells += [published.cell(row) + mark for row, mark in zip(others, old[1:])]
            three = [ours, *others[:2]]
            cells.append(" / ".join(map(published.memory, three)))
            cells += [" / ".join(_error(row, kind) for row in three) for kind in ("error_out", "error_grad")]
            lines.append("| " + " | ".join(cells) + " |")
    if any("†" in line for line in lines):
        lines += ["", f"† of another run than the rest (`{published.TABLE}`)."]
    return "\n".join(lines)


def _error(row: dict[str, Any] | None, kind: str) -> str:
    return "-" if row is None or row.get(kind) is None else f"{row[kind]:.0e}".replace("e-0", "e-")


def sweep_text() -> str:
    """The plot of head_sweep.py and what it says at the worst."""
    if (found := published.found("head-sweep")) is None:
        return published.not_yet("head_sweep.py")
    points = found["points"]
    rows = [
        sorted((p for p in points if p["vocab"] == v), key=lambda p: p["tokens"]) for v in {p["vocab"] for p in points}
    ]
    steps = [(b["share"] / a["share"], a, b) for row in rows for a, b in zip(row, row[1:])]
    least = min(points, key=lambda p: p["share"])
    many = [p["share"] for p in points if p["tokens"] >= 1024]
    text = (
        f"![share of the products by tokens and vocabulary](head-sweep.png)\n\n{len(points)} points; the least share "
    )
    text += f"{least['share']:.0%}, {least['tokens']} tokens x {least['vocab']} words ({least['ms']:.3g} ms)"
    text += f", from 1024 tokens {min(many):.0%}" if many else ""
    if steps:
        ratio, a, b = min(steps, key=lambda step: step[0])
        text += f"; the largest fall from one count of tokens to the next {a['share']:.0%} to {b['share']:.0%}, from "
        text += f"{a['tokens']} to {b['tokens']} x {b['vocab']}"
    if before := [run for p in points if (run := p.get("commit") or p.get("from"))]:
        text += f"; {len(before)} of them from runs before ({', '.join(sorted(set(before)))})"
    left: dict[int, list[str]] = {}
    for tokens, vocab in found["left_out"]:
        left.setdefault(vocab, []).append(str(tokens))
    missed = "; ".join(f"{vocab} words at {', '.join(tokens)}" for vocab, tokens in left.items())
    return text + "." + (f" Not reached in the time: {missed} tokens." if left else "")


def largest_table() -> str:
    if (found := published.found("largest-head")) is None:
        return published.not_yet("largest_head.py")
    cases = {case: other for line in found["results"] if (case := line.get("case")) for other in [line["other"]]}
    titles = {"tokens": "most tokens at {} words", "vocab": "most words at {} tokens"}
    lines = [
        f"| | {' | '.join(titles[case].format(other) for case, other in cases.items())} |",
        "|---" * (1 + len(cases)) + "|",
    ]
    by = {(line["arm"], line["case"]): line for line in found["results"] if "case" in line}
    stopped = {line["arm"] for line in found["results"] if line.get("error") == "the time was spent"}
    for arm in dict.fromkeys(line["arm"] for line in found["results"]):
        cells = [_largest(by.get((arm, case)), case) for case in cases]
        cells = ["not reached in the time" if cell == "-" and arm in stopped else cell for cell in cells]
        lines.append(f"| {PEERS.get(arm, arm)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _largest(line: dict[str, Any] | None, case: str) -> str:
    if line is None or line.get("found") is None:
        return "-"
    best = line["found"]
    what = f"{'' if line['exact'] else 'at least '}{best[case]:,}, {best['peak_gib']:.1f} GiB, {best['seconds']:.2f} s"
    return what + (f"; then {line['ended_by'].split(': ', 1)[1][:60]}" if "ended_by" in line else "")


def options_table() -> str:
    found = published.found("head-options")
    if found is None:
        return published.not_yet("head_options.py")
    lines = ["| | ms | of | share | MiB |", "|---" * 5 + "|"]
    for row in (*found["runs"], *found["few"]):
        of = (row["floor"], f"{row['share']:.0%}", f"{row['peak_mib']:.0f}") if "floor" in row else ("", "", "")
        lines.append(
            f"| {row['arm']} | {row['ms']:.2f} | {' | '.join(of)} |".replace("|  |", "| |").replace("|  |", "| |")
        )
    return "\n".join(lines)


def first_call_table() -> str:
    if (found := published.found("first-call")) is None:
        return published.not_yet("first_call.py")
    runs = {(run["op"], run["arm"]): run for run in found["runs"]}
    lines = ["| op | sizes | liger_hw: import, first, second call | Liger 0.8.5 |", "|---" * 4 + "|"]
    for op in dict.fromkeys(run["op"] for run in found["runs"]):
        cells = []
        for arm in ("liger_hw", "liger"):
            run = runs.get((op, arm), {})
            build = f"{run['build_s']:.2f} + " if run.get("build_s", 0) > 0.005 else ""  # 0: it was there before
            cells.append(f"{build}{run['first_s']:.2f} s, {1e3 * run['second_s']:.1f} ms" if "first_s" in run else "-")
        lines.append(
            f"| {op} | {next(run['sizes'] for run in found['runs'] if run['op'] == op)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


HEADS = ("fused_linear_scaled_cross_entropy", "fused_linear_kl_div", "fused_linear_jsd")
"""Losses whose way through a head is newer than the run of `losses_table`."""


def heads_table() -> str:
    """What a run of the heads' own has of HEADS: the products they need, each of them counted once."""
    found = published.found("heads-trial")
    assert found is not None
    lines = ["| loss | sizes | floor | liger_hw | all logits kept | Liger 0.8.5 | torch.compile |", "|---" * 7 + "|"]
    for op in HEADS:
        for case in (case for case in found["cases"] if case["op"] == op):
            arms = case["arms"]
            floor = arms.get("floor of three", arms["floor"])["median"]
            cells = [op, "x".join(map(str, case["sizes"])), f"{floor:.1f}"]
            for name in ("new", "all kept", "liger", "compile"):
                row = arms.get(name)
                share = "" if row is None or name in ("liger", "compile") else f" ({floor / row['median']:.0%})"
                cells.append("-" if row is None else f"{row['median']:.1f}{share}, {row['peak_mib']:.0f} MiB")
            lines.append("| " + " | ".join(cells) + " |")
    text = f"{found['device']}, {found['date']}, commit {found['commit']}, graph replay, all arms in turn; "
    text += "memory beyond the inputs."
    return "\n".join([*lines, "", text])


TABLES = {
    "losses": losses_table,
    "heads": heads_table,
    "sweep": sweep_text,
    "largest": largest_table,
    "options": options_table,
    "first call": first_call_table,
}
"""Mark of docs/losses.md -> what stands there."""
