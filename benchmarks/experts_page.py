"""The tables of docs/moe.md, for readme.py."""

from __future__ import annotations

import statistics
from typing import Any

import published

LAYERS = {
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_30b_a3b_8k": "Qwen3-30B-A3B",
    "qwen3_next": "Qwen3-Next",
    "gpt_oss_20b": "gpt-oss-20b",
    "deepseek_v3_quarter": "DeepSeek-V3, a quarter",
    "mixtral_8x7b": "Mixtral 8x7B",
}
MODELS = {"qwen3_moe": "Qwen3-30B-A3B", "gpt_oss": "gpt-oss-20b", "mixtral": "Mixtral-8x7B"}
MODELS |= {"qwen3_next": "Qwen3-Next-80B-A3B"}
LIGER_APART = ("qwen3_moe",)
"""Models whose step with Liger was timed in a run of its own."""


def _run(name: str) -> dict[str, Any]:
    return next(run for run in published.read("moe")["runs"] if run["name"] == name)


def _timed(name: str) -> dict[tuple[int, ...], dict[str, dict[str, Any]]]:
    """Sizes -> arm -> row of a run of `moe.py`, without what failed."""
    found: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
    for row in _run(name)["rows"]:
        if row["status"] == "ok":
            found.setdefault(tuple(row["sizes"]), {})[row["arm"]] = row
    return found


def _ms(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['ms']['median']:.3g}"


def _rate(row: dict[str, Any]) -> str:
    n_tokens, hidden, inner, _, top_k = row["sizes"]
    return f"{18 * n_tokens * top_k * hidden * inner / row['ms']['median'] / 1e9:.3g}"


def layers_table() -> str:
    """Forward and backward of a layer's experts, uniform and skewed routing, beside transformers' default."""
    found, skewed = {**_timed("large layers"), **_timed("layers")}, _timed("skewed")
    titles = "sizes of", "tokens", "ms", "skewed, ms", "`grouped_mm`, ms", "of its GEMMs"
    titles += "peak, MiB", "`grouped_mm`", "kept, MiB", "`grouped_mm`"
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for workload, title in LAYERS.items():
        sizes, arms = next((key, arms) for key, arms in found.items() if arms["liger_hw"]["workload"] == workload)
        ours, theirs = arms["liger_hw"], arms.get("grouped_mm")
        cells = [title, str(sizes[0]), _ms(ours), _ms(skewed.get(sizes, {}).get("liger_hw")), _ms(theirs)]
        cells.append(f"{ours['share']:.0%}")
        for what in ("peak_mib", "kept_mib"):
            cells += ["-" if row is None else f"{row[what]:.0f}" for row in (ours, theirs)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tokens_table() -> str:
    """The layer of Qwen3-30B-A3B from few tokens to many."""
    lines = [
        "| tokens | ms | `grouped_mm`, ms | TFLOP/s | `grouped_mm` | of its GEMMs | `grouped_mm` |",
        "|---" * 7 + "|",
    ]
    for sizes, arms in sorted(_timed("tokens").items()):
        pair = arms["liger_hw"], arms["grouped_mm"]
        cells = [str(sizes[0]), *map(_ms, pair), *map(_rate, pair), *(f"{row['share']:.0%}" for row in pair)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tried_table() -> str:
    """The whole op under other configurations, over its time as it was: of each layer the median of three turns."""
    run = _run("configurations")
    titles = {"now": "as it was, ms", "best": "the best of each product", "rule": "persistent"}
    lines = ["| tokens x hidden x inner x experts x top-k | " + " | ".join(titles.values()) + " |", "|---" * 4 + "|"]
    for layer, sizes in run["layers"].items():
        ms = {arm: [row["ms"] for row in run["ops"] if (row["shape"], row["arm"]) == (layer, arm)] for arm in titles}
        if not ms["now"]:
            continue
        now, *others = (statistics.median(times) for times in ms.values())
        cells = ["x".join(map(str, sizes)) + (", skewed" if layer.endswith("_skewed") else "")]
        cells += [f"{now:.3g}", *(f"{one / now - 1:+.0%}" for one in others)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def models_table() -> str:
    """Models end to end, everything patched."""
    titles = "layers of", "Hugging Face, tokens/s", "Liger", "liger_hw", "gain", "over Liger"
    titles += "peak, GiB", "Liger", "liger_hw", "losses apart"
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for model, title in MODELS.items():
        run = published.read(f"e2e-experts-{model}")
        arms = {row["arm"]: row for row in run["summary"]}
        if "liger" not in arms and model in LIGER_APART:
            rows = published.read(f"e2e-experts-{model}-liger")["summary"]
            arms["liger"] = next(row for row in rows if row["arm"] == "liger")
        hf, liger, ours = (arms.get(arm) for arm in ("hf", "liger", "liger_hw"))
        cells = [f"{title}, {run['plan']['layers']} of {run['shape']['layers']}"]
        cells += ["-" if arm is None else f"{arm['tokens_per_second']:,.0f}" for arm in (hf, liger, ours)]
        for other in (hf, liger):
            gain = None if other is None else ours["tokens_per_second"] / other["tokens_per_second"] - 1
            cells.append("-" if gain is None else f"{gain:+.0%}")
        cells += ["-" if arm is None else f"{arm['peak_gib']:.1f}" for arm in (hf, liger, ours)]
        lines.append("| " + " | ".join([*cells, f"{ours['largest_loss_difference']:.4f}"]) + " |")
    return "\n".join(lines)


TABLES = {
    "layers": layers_table,
    "tokens": tokens_table,
    "tried": tried_table,
    "experts end to end": models_table,
}
