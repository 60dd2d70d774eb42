"""`liger-hw models`: rows from its worker process, the page it writes, and its answers to bad requests."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from liger_hw.cli import UsageError, main, models

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.cpu

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "models_page.py"
SPEC = importlib.util.spec_from_file_location("models_page", SCRIPT)
models_page = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(models_page)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4AssistantForCausalLM"), reason="this transformers has no Gemma 4")
def test_rows_and_page(tmp_path, capsys):
    assert main(["models", "llama", "gemma4_assistant", "--json"]) == 0
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [(row["family"], row["named"]) for row in rows] == [
        ("llama", True),
        ("gemma4_assistant", False),
        ("llama", False),
    ]
    assert [row["outcome"] for row in rows] == ["verified", "cannot be built", "verified"]
    assert rows[2]["patched"]["rms_norm (llama)"] == 9 and rows[2]["calls"]["fused_linear_cross_entropy"] == 1
    (tmp_path / "rows.jsonl").write_text(printed)
    page = tmp_path / "models.md"
    assert models_page.main([str(tmp_path / "rows.jsonl"), "--output", str(page)]) == 0
    text = page.read_text()
    assert "2 of 3 verified" in text and "| llama | LlamaForCausalLM | verified |" in text
    assert text.count("\n## ") == 2 and "liger_hw" in text


def test_a_family_that_hangs_or_dies_is_one_row(monkeypatch, capsys):
    monkeypatch.setattr(models._Checker, "module", "tests.cli.fake_families")
    monkeypatch.syspath_prepend(str(SCRIPT.parents[1]))
    call = models._Checker.call

    def patient(worker, *args, seconds):  # only the family that hangs meets its limit, however busy the machine is
        return call(worker, *args, seconds=seconds if "hangs" in args else 600)

    monkeypatch.setattr(models._Checker, "call", patient)
    assert main(["models", "one", "hangs", "two", "dies", "three", "--timeout", "1", "--json"]) == 0
    rows = {row["family"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name for name, row in rows.items() if row["outcome"] == "verified"} == {"one", "two", "three"}
    assert "hung for 1 s" in rows["hangs"]["reason"] and "crashed: its last words" in rows["dies"]["reason"]
    assert rows["dies"]["model_class"] == "X" and rows["dies"]["named"] is False


def test_unknown_families_and_no_transformers(monkeypatch, capsys):
    with pytest.raises(UsageError, match="no causal LM family 'lama'"):
        list(models._jobs({"llama": "LlamaForCausalLM"}, ["lama"], False))
    monkeypatch.setattr(models._Checker, "module", "no_such_module")
    assert main(["models", "llama"]) == 2
    assert "cannot be asked for its families: the process crashed: ModuleNotFoundError" in capsys.readouterr().err


def test_one_page_of_trainings_in_several_places(tmp_path, capsys):
    base = {"model_class": "X", "outcome": "verified", "reason": "", "converge": True, "loss_error": 0.5}
    for number, (device, dtype) in enumerate((("cpu", "float32"), ("cuda", "bfloat16"), ("cuda", "bfloat16"))):
        row = {**base, "family": f"f{number}", "device": device, "dtype": dtype, "device_name": device.upper()}
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
    page = tmp_path / "page.md"
    files = [str(tmp_path / f"{number}.jsonl") for number in range(3)]
    assert models_page.main([*files, "--output", str(page)]) == 0
    text = page.read_text()
    assert (
        text.index("## float32 on CPU")
        < text.index("| f0 |")
        < text.index("## bfloat16 on CUDA")
        < text.index("| f1 |")
    )
    assert "2 of 2 verified" in text and "3 of 3 verified" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no.json: .*`liger-hw models --json > FILE` writes one"):
        models_page.main(["no.json", "--output", str(page)])


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--device", "nope"), "cannot use --device nope"),
        (("--timeout", "-1"), "'-1' is not a positive number of seconds"),
    ],
)
def test_bad_requests_are_answered_before_anything_is_built(argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["models", "llama", *argv]) == 2
    assert re.search(message, capsys.readouterr().err)
