"""benchmarks/end_to_end.py at toy size on the CPU: arms, budget, what is put back."""

from __future__ import annotations

import json
import sys

import end_to_end
import pytest
import torch
import training

from liger_hw.bench.timing import Budget

pytest.importorskip("transformers")
CPU = torch.device("cpu")


def toy(**more) -> training.Schedule:
    base = {"layers": 1, "batch": 2, "seq": 16, "steps": 3, "arms": ("hf",), "dtype": "float32", "hidden": 32}
    return training.Schedule(**{**base, **more})


@pytest.mark.parametrize("model", sorted(training.MODELS))
def test_every_model_trains(model):
    if model == "qwen3_5":
        pytest.importorskip("transformers.models.qwen3_5", reason="transformers 4 has no Qwen3.5")
    results = end_to_end.measure(toy(model=model, checkpointing=True), CPU)
    (run,) = results["runs"]
    assert run["status"] == "ok" and run["steps"] == 3 and len(run["losses"]) == 3
    assert run["tokens_per_second"] > 0 and run["peak_gib"] is None
    assert all(4 < loss < 7 for loss in run["losses"])  # about log 256 from random weights


@pytest.mark.parametrize("model", sorted(training.MODELS))
def test_tokens_are_in_the_vocabulary(model, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(128)) * 128 + bytes(range(127, -1, -1)) * 2)  # up to the last token, 32767
    schedule = training.Schedule(model=model, text=str(text))
    tokens = training.to_tokens(training.read_text(schedule.text), schedule.shape.vocab)
    assert tokens.min() >= 0 and tokens.max() < schedule.shape.vocab and len(tokens.unique()) > 120


def test_experts_are_built_and_layers_are_reported():
    schedule = toy(model="mixtral")
    experts = [p for n, p in training.build(schedule, CPU).named_parameters() if n.endswith("experts.down_proj")]
    if experts:  # transformers 4 has a module for each expert
        assert [p.shape[0] for p in experts] == [8]
    results = end_to_end.measure(toy(model="mixtral", arms=("hf", "liger_hw")), CPU)
    assert [run["status"] for run in results["runs"]] == ["ok", "ok"], results["runs"]
    assert results["summary"][1]["largest_loss_difference"] < 1e-4
    assert end_to_end.as_text(results).startswith("mixtral, 1 of 32 layers, 32 wide, batch 2 x 16")


def test_arms_see_the_same_data_and_start_from_the_same_weights():
    results = end_to_end.measure(toy(arms=("hf", "liger_hw"), rounds=2), CPU)
    assert [(run["arm"], run["round"]) for run in results["runs"]] == [
        ("hf", 0),
        ("liger_hw", 0),
        ("hf", 1),
        ("liger_hw", 1),
    ]
    assert {run["status"] for run in results["runs"]} == {"ok"}, results["runs"]
    first, ours, again, _ = results["runs"]
    assert first["losses"] == again["losses"]
    ours_summary = results["summary"][1]
    assert ours_summary["against"] == "hf" and ours_summary["largest_loss_difference"] < 1e-4
    assert "liger_hw" in end_to_end.as_text(results)
    assert "%" not in end_to_end.as_text(results), "a CPU's speed is no gain: torch's reference path runs there"
    assert "%" in end_to_end.as_text({**results, "device": "cuda"})


def test_float8_beside_other_libraries(monkeypatch):
    """Linears run in FP8 in their arm alone; a missing package is reported as absent."""
    for package in ("torchao.float8", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    arms = ("liger_hw", "float8", "float8-tensorwise", "torchao", "te", "hf")
    results = end_to_end.measure(toy(model="llama3", arms=arms, hidden=64, steps=4), CPU)
    assert [run["status"] for run in results["runs"]] == ["ok", "ok", "ok", "absent", "absent", "ok"], results["runs"]
    losses = {run["arm"]: run["losses"] for run in results["runs"] if run["status"] == "ok"}
    assert losses["float8"] != losses["liger_hw"] and losses["float8"] != losses["float8-tensorwise"]
    for arm in ("float8", "float8-tensorwise"):
        assert all(abs(a - b) < 0.05 for a, b in zip(losses[arm], losses["liger_hw"]))
    assert all(abs(a - b) < 1e-4 for a, b in zip(losses["hf"], losses["liger_hw"]))


def test_adapters_alone_train():
    pytest.importorskip("peft")
    results = end_to_end.measure(toy(arms=("liger_hw", "float8", "float8-kept"), hidden=64, lora=True), CPU)
    assert [run["status"] for run in results["runs"]] == ["ok"] * 3, results["runs"]
    assert ", LoRA" in end_to_end.as_text(results)
    model = training.build(toy(lora=True), CPU)
    assert all(("lora_" in name) == p.requires_grad for name, p in model.named_parameters())


def test_a_failed_arm_is_reported_and_the_others_run(monkeypatch):
    real = training.build

    def fails_first(*_):
        monkeypatch.setattr(training, "build", real)
        raise torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(training, "build", fails_first)
    kept = []
    results = end_to_end.measure(toy(rounds=2), CPU, keep=lambda results: kept.append(len(results["runs"])))
    assert [run["status"] for run in results["runs"]] == ["error", "ok"] and kept[:2] == [1, 2]
    assert "tried to allocate 9 GiB" in end_to_end.as_text(results)


def test_a_spent_budget_is_reported():
    results = end_to_end.measure(toy(), CPU, Budget(0.0))
    assert results["runs"][0]["status"] == "skipped" and results["summary"] == [] and results["ended"]


def test_a_patch_without_a_way_back_is_undone():
    from transformers.models.mistral import modeling_mistral as module

    original, before = training.Original("mistral"), module.MistralMLP.forward
    module.MistralMLP.forward, module.MistralMLP.extra, module.rotate_half = print, print, print
    assert len(original.differences()) == 3
    original.restore()
    assert module.MistralMLP.forward is before and not original.differences()


@pytest.mark.parametrize(
    "words, text",
    [
        (("--device", "cpu"), "a small one: --hidden 64"),
        (("--device", "gpu7"), "cannot use --device gpu7"),
        (("--model", "gpt5"), "unknown model 'gpt5'"),
        (("--arms", ""), "write names joined by commas"),
        (("--arms", "x"), "unknown arm"),
        (("--hidden", "33"), "multiple of 32"),
        (("--hidden", "64", "--text", "no/such.txt"), "cannot read --text no/such.txt: No such file"),
    ],
)
def test_mistakes_are_explained(capsys, words, text):
    with pytest.raises(SystemExit) as stop:
        end_to_end.main(list(words))
    assert stop.value.code == 2 and text in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_every_figure(tmp_path, capsys):
    path = tmp_path / "out.json"
    sizes = "--hidden 32 --layers 1 --batch 1 --seq 16 --steps 3 --dtype fp32 --device cpu".split()
    assert end_to_end.main([*sizes, "--arms", "hf,liger_hw", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(path.read_text())
    assert "round 1 liger_hw:" in err and out.startswith("mistral, 1 of 32 layers, 32 wide, batch 1 x 16, float32")
    assert [row["arm"] for row in document["summary"]] == ["hf", "liger_hw"] and document["machine"]["torch"]
