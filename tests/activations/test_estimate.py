"""`liger-hw estimate` against what was measured: six models on one H200, one whole model on two and four."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import printed
from training import MODELS

from liger_hw.autotune.models import Model, find
from liger_hw.cli import main
from liger_hw.recompute.estimate import GPUS, estimates

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
H200 = (GPUS["h200"][0], 4800)
NAMES = ("mistral", "llama3", "qwen3", "gemma2", "phi3", "mixtral")
UNSEEN = ("qwen2", "olmo2")
"""Measured as well, and not among those that the rates were fitted to."""
ARMS = ("hf", "liger", "liger_hw")


def recorded(name: str) -> dict:
    return json.loads((RESULTS / f"{name}-h200.json").read_text())


def measured(name: str) -> tuple[Model, dict[str, dict]]:
    """The model as it was timed, 2 x 4096, and the row of each arm."""
    if name == "mixtral":  # Liger's row is of another run
        record = recorded("e2e-experts-mixtral")
        layers, batch, seq = (record["plan"][key] for key in ("layers", "batch", "seq"))
        rows = {row["arm"]: row for row in (*recorded("e2e-mixtral")["summary"], *record["summary"])}
    else:
        record = recorded("speed-table")["models"][name]
        layers, batch, seq, rows = (record[key] for key in ("layers", "batch", "seq", "arms"))
    assert (batch, seq) == (2, 4096)
    shape, gemma = MODELS[name], name == "gemma2"
    sizes = (shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab)
    model = Model(
        name,
        *sizes,
        layers=layers,
        qk_norm=name in ("qwen3", "olmo2"),
        tied=gemma,
        sandwich=gemma,
        softcap=gemma,
        experts=shape.experts,
        top_k=shape.top_k if shape.experts else 0,
    )
    return model, rows


@pytest.mark.parametrize("name", NAMES + UNSEEN)
def test_within_ten_percent_of_each_measured_model(name):
    model, rows = measured(name)
    for arm, row in zip(ARMS, estimates(model, 2, 4096, *H200)):
        assert row.tokens_per_second == pytest.approx(rows[arm]["tokens_per_second"], rel=0.1), arm
        assert row.peak / 2**30 == pytest.approx(rows[arm]["peak_gib"], rel=0.1), arm


def test_how_far_off_the_changelog_says_that_granite_is():
    model, rows = measured("granite")
    one = estimates(model, 2, 4096, *H200)
    ratios = [e.tokens_per_second / rows[arm]["tokens_per_second"] for arm, e in zip(ARMS, one)]
    assert ratios == pytest.approx([1.32, 1.44, 0.99], abs=0.01)


@pytest.mark.parametrize("gpus", (2, 4))
def test_within_ten_percent_of_a_whole_model_over_several_gpus(gpus):
    record = json.loads((RESULTS / f"distributed-training-{gpus}xh200.json").read_text())
    rows = [row for row in record["rows"] if row["layers"] == 32]
    assert len(rows) >= 3
    for row in rows:
        options = {"gpus": gpus, "engine": row["engine"]}
        arms = dict(zip(("huggingface", "liger", "liger_hw"), estimates(find("llama-3-8b"), 2, 4096, *H200, **options)))
        one = arms[row["arm"]]
        assert one.tokens_per_second == pytest.approx(row["tokens_per_second"], rel=0.1), row
        assert one.peak / 2**30 == pytest.approx(row["peak_GiB"], rel=0.1), row


def test_within_ten_percent_of_lora():
    row = recorded("float8-llama3-lora-32-layers")["runs"][0]
    one = estimates(find("llama-3-8b"), 2, 4096, *H200, lora=True)[2]
    assert row["arm"] == "liger_hw" and one.tokens_per_second == pytest.approx(row["tokens_per_second"], rel=0.1)
    assert one.peak / 2**30 == pytest.approx(row["peak_gib"], rel=0.1)


def test_the_command_prints_three_arms_and_what_it_does_not_know(capsys):
    command = ["estimate", "llama-3-8b", "--gpu", "h100", "--batch", "2", "--seq", "4k", "--gpus", "8", "--lora"]
    text = printed(capsys, *command)
    assert re.search(r"\+ liger_hw +[\d,]+ +\+\d+% +\d", text) and "Hugging Face" in text and "Liger 0.8.5" in text
    for words in ("h100 was not timed", "speed of LoRA", "more GPUs than the four timed"):
        assert words in " ".join(text.split())
    assert len(json.loads(printed(capsys, *command, "--json"))["estimates"]) == 3


@pytest.mark.parametrize(
    "options", ("", "--layers 40", "--gpus 8", "--gpus 2 --engine zero3", "--gpus 2 --layers 60 --lora")
)
def test_an_estimate_above_the_memory_names_the_plan_of_the_same_step(options, capsys):
    command = ["estimate", "qwen3-8b", "--gpu", "h100", "--batch", "4", "--seq", "8192", *options.split()]
    estimate = json.loads(printed(capsys, *command, "--json"))["estimates"][2]
    text = " ".join(printed(capsys, *command).split())
    plan = re.search(r"More than h100's 79 GiB: Hugging Face, Liger 0.8.5, liger_hw. `liger-hw (plan .*?)`", text)[1]
    assert "--memory 77GiB" in plan
    main([*plan.split(), "--json"])
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["default"]["peak_bytes"] == pytest.approx(estimate["peak"], rel=1e-3)


def test_an_estimate_that_fits_names_no_plan(capsys, tmp_path):
    text = printed(capsys, "estimate", "qwen3-8b", "--gpu", "mi300x", "--batch", "1", "--seq", "4096")
    assert "More than" not in text and "none of its kernels has run there" in " ".join(text.split())
    experts = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    experts |= {"num_hidden_layers": 32, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    assert main(["estimate", str(tmp_path), "--gpu", "h100", "--batch", "1", "--seq", "4096"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "More than h100's" in text and f"`liger-hw plan --model {tmp_path} --batch 1" in text


def test_an_engine_without_several_gpus_is_refused(capsys):
    command = ["estimate", "llama-3-8b", "--gpu", "h200", "--batch", "2", "--seq", "4096", "--engine", "zero3"]
    assert "--gpus" in printed(capsys, *command, code=2)
