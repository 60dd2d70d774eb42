"""Commands as people use them: widths, progress, refusals, output."""

from __future__ import annotations

import json
import sys

import pytest
from harness import printed, said

from liger_hw import registry, text
from liger_hw.cli import arguments

# -- widths and progress ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("info",),
        ("explain", "rms_norm", "--shape", "2x4096", "--device", "h200"),
        ("plan", "--model", "mistral-7b", "--batch", "1", "--seq", "4096", "--memory", "80GiB", "--shards", "8"),
        ("autotune", "--dry-run", "--device", "xpu", "--ops", "softmax"),
        ("cache", "verify"),
        ("check", "mistral"),
        ("explain", "rms_norm", "--shape", "2x4096", "--device", "cpu"),
        ("bench", "relu_squared", "--device", "cpu", "--sizes", "8x16", "--against", "torch", "--repeats", "1"),
        ("autotune", "--device", "no-such-device"),
        ("check", "/no/such/folder/config.json"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else words,
)
def test_nothing_is_wider_than_the_terminal(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = said(capsys, *words)
    wide = [line for line in (out + err).splitlines() if len(line) > 80]
    assert code in (0, 1, 2) and out + err and not wide


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_help_is_wider_than_the_terminal(capsys, monkeypatch, columns):
    from liger_hw.cli import COMMANDS

    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        code, out, _ = said(capsys, *words)
        assert code == 0 and out and [line for line in out.splitlines() if len(line) > columns] == [], words
        assert not [line for line in out.splitlines() if line.endswith("-")], f"{words}: a name is cut at a hyphen"


def test_a_table_is_folded_and_loses_nothing(monkeypatch):
    rows = [("name", "what it says"), ("a" * 30, "word " * 20), ("b", "")]
    monkeypatch.setenv("COLUMNS", "50")
    shown = text.table(rows)
    assert max(map(len, shown.splitlines())) <= 50 and shown.count("word") == 20 and shown.count("a" * 5) >= 4
    monkeypatch.delenv("COLUMNS")
    assert len(text.table(rows).splitlines()) == 4, "what goes to a file is not folded"


def test_progress_says_how_much_is_left(capsys, monkeypatch):
    clock = iter([0.0, 0.0, 30.0, 30.0, 60.0, 60.0, 400.0, 400.0])
    monkeypatch.setattr(text.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    screen = text.StatusLine()
    for done in (0, 3, 4):
        screen.progress(done, 20, "rms_norm")
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith("[5/20] rms_norm, ") and shown[-1].endswith(" left")


def test_check_reports_its_progress(capsys, tmp_path, monkeypatch):
    """It takes seconds: transformers is imported, and every module of the model is built."""
    pytest.importorskip("transformers")
    from transformers import Qwen3Config

    monkeypatch.setattr(text.StatusLine, "EVERY", 0.0)
    Qwen3Config(num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=128).save_pretrained(tmp_path)
    code, out, err = said(capsys, "check", str(tmp_path), "--json")
    assert code == 0 and json.loads(out)["model"] == "Qwen3ForCausalLM"
    stages = [line for line in err.splitlines() if line.startswith("[")]
    assert [line.split()[:2] for line in stages] == [
        ["[1/3]", "importing"],
        ["[2/3]", "building"],
        ["[3/3]", "running"],
    ]
    assert "Qwen3Config" in stages[1] and "Qwen3ForCausalLM" in stages[2]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_lock_overwrites_only_when_told_to(capsys, tmp_path):
    file = tmp_path / "liger-hw.lock"
    words = ("lock", "--model", "mistral-7b", "--ops", "softmax,relu_squared,rms_norm", "--seq", "512", "-o", str(file))
    assert "nothing is launched on a CPU" in printed(capsys, *words, code=2) and not file.exists()
    assert said(capsys, *words, "--device", "sm90")[0] == 0
    code, out, _ = said(capsys, "lock", "--check", str(file))
    assert code == 0 and "0 differ from the configurations that NVIDIA H100" in out, "the device of the file is used"
    before = file.read_text()
    assert "--force" in printed(capsys, *words, "--device", "gfx942", code=2) and file.read_text() == before
    code, _, err = said(capsys, *words[:-1], str(tmp_path), "--device", "gfx942")
    assert code == 2 and "is a folder; -o names the file to write" in " ".join(err.split()) and "--force" not in err
    assert said(capsys, *words, "--device", "gfx942", "--force")[0] == 0 and file.read_text() != before


@pytest.mark.parametrize("more", [("--model", "mistral-7b"), ("--force",)])
def test_a_check_of_a_lock_file_refuses_options_for_making_one(capsys, more):
    code, out, err = said(capsys, "lock", "--check", "a.lock", "--device", "sm90", *more)
    assert (code, out) == (2, "") and err.endswith(f"and takes no {more[0]}\n")


def test_a_cache_under_a_file_is_named(clean_registry, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / "file" / "cache"))
    clean_registry.reset()
    code, _, err = said(capsys, "cache", "list")
    assert code == 2 and f"set LIGER_HW_CACHE_DIR to one: {tmp_path / 'file'}" in " ".join(err.split())


def test_a_sequence_length_may_be_written_in_k(capsys):
    words = ("plan", "--model", "mistral-7b", "--batch", "1", "--memory", "80GiB", "--json", "--seq")
    assert said(capsys, *words, "8k") == said(capsys, *words, "8192")
    for wrong in ("k", "0k", "1.5k", "8m", "-1k"):
        code, _, err = said(capsys, *words[:-1], f"--seq={wrong}")
        assert code == 2 and "write positive integers such as 65536, or 64k for 64 * 1024" in err
    assert arguments.listed(arguments.tokens)("512,4k") == [512, 4096]


@pytest.mark.parametrize(
    "words, package",
    [
        (("check", "mistral"), "transformers"),
        (("compile", "--target", "sm90", "--ops", "rms_norm"), "triton"),
        (("autotune", "--device", "xpu", "--ops", "rms_norm"), "triton"),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(capsys, monkeypatch, words, package):
    from liger_hw import cli

    found = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name, *more: None if name == package else found(name))
    code, out, err = said(capsys, *words)
    assert code == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"liger-hw: {words[0]}: needs {package}: pip install 'liger_hw[")


def test_a_failed_import_names_the_extra(capsys, monkeypatch):
    from liger_hw.cli import machine

    def fails(arguments):
        raise ModuleNotFoundError("No module named 'transformers.models'", name="transformers.models")

    monkeypatch.setattr(machine, "run_info", fails)
    expected = "liger-hw: info: needs transformers: pip install 'liger_hw[transformers]'\n"
    assert printed(capsys, "info", code=2) == expected


# -- what commands say -----------------------------------------------------------------------------------------------


def test_plan_names_what_it_does_not_count_with_shards(capsys):
    words = ("plan", "--model", "mistral-7b", "--batch", "1", "--seq", "512")
    shared = said(capsys, *words, "--shards", "8")[1]
    assert "fsdp2 divides the model's state; what it gathers and its buffers are counted." in shared
    assert "Not in it: activations split over devices" in shared
    assert "Not in it" not in said(capsys, *words)[1]


def test_plan_names_the_models_longest_sequence(capsys):
    words = ("plan", "--model", "llama-3-8b", "--batch", "1", "--memory", "80GiB", "--seq")
    assert "at most 8192 tokens" in " ".join(said(capsys, *words, "65536")[1].split())
    assert "at most" not in said(capsys, *words, "8192")[1]


def test_check_says_what_would_be_patched(capsys, tmp_path):
    pytest.importorskip("transformers")
    from transformers import OPTConfig, Qwen3Config

    Qwen3Config(num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=128).save_pretrained(tmp_path)
    code, out, _ = said(capsys, "check", str(tmp_path), "--json")
    found = json.loads(out)
    assert code == 0 and found["call"] == "liger_hw.transformers.apply_liger_kernel_to_qwen3"
    assert {row["kernel"] for row in found["rows"] if row["state"] == "patched"} >= {"rms_norm", "swiglu", "rope"}
    file = tmp_path / "config.json"
    assert "apply_liger_kernel_to_qwen3()" in printed(capsys, "check", str(file))
    sizes = {"hidden_size": 32, "ffn_dim": 32, "vocab_size": 64, "word_embed_proj_dim": 32, "num_attention_heads": 4}
    OPTConfig(num_hidden_layers=1, **sizes).save_pretrained(tmp_path)
    assert "liger_hw.patch(model)" in printed(capsys, "check", str(tmp_path))


def test_check_of_a_path_that_is_not_there(capsys, tmp_path):
    for path in (tmp_path / "nosuch.json", tmp_path / "nosuch"):
        code, _, err = said(capsys, "check", str(path))
        assert code == 2 and "no such file (looked in" in err and "Repo id" not in err and err.count("\n") == 1


def test_check_offline_names_the_type_to_ask_for(capsys, monkeypatch):
    """One request decides that there is no hub; the name says which model type to give instead."""
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for model, kind in {"Qwen/Qwen3-8B": "qwen3", "openai/gpt-oss-20b": "gpt_oss", "some/thing": "mistral"}.items():
        code, _, err = said(capsys, "check", model)
        assert code == 2 and "cannot be reached" in err and err.endswith(f"liger-hw check {kind}\n")


def test_doctor_finds_a_wrong_op(capsys, monkeypatch):
    from liger_hw import registry

    few = {name: registry.get_op(name) for name in ("softmax", "relu_squared")}
    monkeypatch.setattr(registry, "ops", lambda: few)
    code, out, _ = said(capsys, "doctor", "--device", "cpu")
    assert code == 0 and "2 of 2 agree" in out and "all is well" in out and "liger_hw  " in out
    from dataclasses import replace

    few["softmax"] = replace(few["softmax"], reference=lambda x, *more: x.softmax(-1) * 1.01)
    code, out, _ = said(capsys, "doctor", "--device", "cpu")
    assert code == 1 and "1 of 2 agree" in out and "PROBLEM       softmax: result 0: relative error" in out


@pytest.mark.parametrize("beneath", ["file", "file/below", ""])
def test_doctor_tries_to_write_the_cache(capsys, monkeypatch, tmp_path, beneath):
    from liger_hw.autotune import store

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(registry, "ops", lambda: {})
    monkeypatch.setattr(store, "root", lambda: tmp_path / beneath / "cache" if beneath else tmp_path / "new" / "cache")
    code, out, _ = said(capsys, "doctor", "--device", "cpu")
    assert code == (1 if beneath else 0) and ("all is well" in out) == (not beneath)
    assert ("cannot be written (Not a directory)" in " ".join(out.split())) == bool(beneath)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_doctor_names_the_commit_and_the_shim(capsys, monkeypatch):
    from liger_hw import compat
    from liger_hw.bench import report

    monkeypatch.setattr(registry, "ops", lambda: {})
    monkeypatch.setattr(report, "git_commit", lambda: "0123abcd+")
    _, out, _ = said(capsys, "doctor", "--device", "cpu")
    assert "commit        0123abcd+" in out and "shim          not in use: " in out
    monkeypatch.setattr(compat, "use", lambda: "in use")
    found = json.loads(said(capsys, "doctor", "--device", "cpu", "--json")[1])
    assert found["shim"] == "in use" and found["commit"] == "0123abcd+"


def test_autotune_chooses_for_every_architecture_of_a_vendor(capsys, monkeypatch, tmp_path):
    """Intel's, which the stock Triton brings to TTIR: each known architecture is planned, nothing is measured."""
    from liger_hw import registry
    from liger_hw.backends import backend

    pytest.importorskip("triton")
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path))
    registry.reload()
    try:
        words = ("autotune", "--device", "xpu", "--ops", "relu_squared", "--candidates", "2", "--workers", "1")
        code, out, err = said(capsys, *words, "--json")
        documents = json.loads(out)
        assert code == 0 and [d["target"]["arch"] for d in documents] == list(backend("xpu").known_archs())
        assert all(len(d["results"]) == 2 and not any(r["error"] for r in d["results"]) for d in documents)
        assert "Nothing is measured" in err and f"winners go to {tmp_path}" in err and "[8/8]" in err
    finally:
        monkeypatch.undo()
        registry.reload()


def test_autotune_refuses_an_unwritable_cache(capsys, clean_registry, monkeypatch, tmp_path):
    from liger_hw.autotune import store

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(store, "root", lambda: tmp_path / "file" / "cache")
    words = ("autotune", "--device", "gfx942", "--ops", "relu_squared.fwd", "--shapes", "8x64")
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "") and "cannot be written (Not a directory)" in err and "Nothing is measured" not in err
    assert said(capsys, *words, "--dry-run")[0] == 0


def test_autotune_answers_a_misspelt_device(capsys):
    code, _, err = said(capsys, "autotune", "--device", "mi300", "--ops", "rms_norm")
    assert code == 2 and "unknown architecture 'mi300'" in err and "gfx942" in err and "mi300x" in err


def test_bench_runs_at_small_sizes_on_a_cpu(capsys):
    code, out, err = said(capsys, "bench", "relu_squared", "--device", "cpu", "--against", "torch", "--repeats", "1")
    small = "x".join(map(str, registry.get_op("relu_squared").small_sizes))
    assert code == 0 and f" {small} " in out and "reference path" in out
