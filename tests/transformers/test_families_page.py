"""benchmarks/families.py and models_page.py: rows, the pages made of them, and answers to bad requests."""

from __future__ import annotations

import json

import families
import models_page
import pytest
import transformers

from liger_hw.cli import UsageError


@pytest.mark.skipif(not hasattr(transformers, "Gemma4AssistantForCausalLM"), reason="this transformers has no Gemma 4")
def test_rows_and_page(tmp_path, capsys):
    assert families.main(["llama", "gemma4_assistant", "--json"]) == 0
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


def test_a_family_whose_patched_step_raises_is_a_row_that_differs(monkeypatch, capsys):
    def raises(*args, **kwargs):
        raise ZeroDivisionError("in its step")

    monkeypatch.setattr(families, "check_step", raises)
    assert families.main(["llama", "--named", "--json"]) == 1
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["outcome"] == "differs" and row["reason"] == "ZeroDivisionError: in its step" and row["named"]


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="no causal LM family 'lama'"):
        list(families.jobs_of({"llama": "LlamaForCausalLM"}, ["lama"], False))


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
    with pytest.raises(SystemExit, match="no.json: .*`benchmarks/families.py --json > FILE` writes one"):
        models_page.main(["no.json", "--output", str(page)])


def test_a_bad_device_is_answered_before_anything_is_built():
    with pytest.raises(UsageError, match="cannot use --device nope"):
        families.main(["llama", "--device", "nope"])
