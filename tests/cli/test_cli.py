"""`liger-hw` itself, `info` and `explain`: exit codes, messages and the JSON they promise."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import python, said

import liger_hw
from liger_hw import registry
from liger_hw.cli import COMMANDS, machine, main, parser_of


def test_version(capsys):
    assert said(capsys, "--version") == (0, f"liger-hw {liger_hw.__version__}\n", "")


def test_help_names_every_command(capsys):
    code, out, _ = said(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


def test_without_a_command_help_goes_to_stderr(capsys):
    code, out, err = said(capsys)
    assert (code, out) == (2, "") and "COMMAND" in err


@pytest.mark.parametrize("typed, hint", [("exlpain", "did you mean 'explain'"), ("zzz", "known: info")])
def test_an_unknown_command_is_answered_with_a_hint(capsys, typed, hint):
    code, out, err = said(capsys, typed)
    assert code == 2 and out == "" and hint in err


def _arguments(parser: argparse.ArgumentParser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _arguments(sub)
        else:
            yield action


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_has_help_that_names_its_default(command):
    for action in _arguments(parser_of(command)):
        assert action.help, action.dest
        if action.default in (None, False, [], argparse.SUPPRESS):
            continue
        assert "default" in action.help, f"{action.dest}: {action.help}"
        if type(action.default) in (int, float) and action.dest != "workers":  # those follow the cores
            assert f"{action.default:g}" in action.help, f"{action.dest}: {action.help}"


def test_importing_the_command_line_imports_nothing_heavy():
    script = (
        "import sys, liger_hw.cli; liger_hw.cli.main(['--version']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'triton', 'transformers')))"
    )
    python("-c", script)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, code, line",
    [
        (OSError(28, "No space left on device", "/x"), 2, "No space left on device: /x"),
        (MemoryError(), 2, "MemoryError"),
        (RecursionError("too deep\nmore"), 2, "RecursionError: too deep"),
        (KeyError("BLOCK\x1b[2J"), 3, "this is a bug in liger_hw: KeyError: 'BLOCK\\x1b[2J'"),
    ],
)
def test_every_error_is_one_line_and_one_document(capsys, monkeypatch, set_env, error, code, line):
    def fails(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(machine, "run_info", fails)
    got, out, err = said(capsys, "info", "--json")
    assert got == code and err.startswith(f"liger-hw: {line}") and err.count("\n") == 1
    assert json.loads(out)["error"] in err
    set_env("LIGER_HW_DEBUG", 1)
    assert ("Traceback" in said(capsys, "info")[2]) == (code == 3)


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense", "--json"),
        ("info", "--no-such", "--json"),
        ("lock", "--check", "/no/such", "--json", "--device", "sm90"),
        ("plan", "--json", "--model", "mistral-7b", "--batch", "1" + "0" * 30, "--seq", "1"),
        ("cache", "list", "--json", "--device", ""),
        ("lock", "--model", "mistral-7b", "--ops", "rms_norm", "--seq", "512", "--device", "sm90", "--json", "-o", "/"),
    ],
)
def test_json_is_one_valid_document_on_an_error(capsys, words):
    code, out, _ = said(capsys, *words)
    assert code in (1, 2) and json.loads(out)["error"]


def test_commands_run_where_kernels_are_interpreted():
    """Triton was imported before the variable was looked at: a traceback."""
    words = "-m", "liger_hw", "explain", "rms_norm", "--device", "cpu", "--shape", "8x64"
    out = python(*words, env={"LIGER_HW_INTERPRET": "1"})
    assert ": taken" in out and "would be taken" not in out, "its kernels run"


def test_a_full_output_is_one_line():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "liger_hw", "cache", "list"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "liger-hw: No space left on device\n"


@pytest.mark.parametrize("words, code", [(["cache", "list"], 0), (["explain", "nothing", "--json"], 2)])
@pytest.mark.parametrize("output", [">&-", "| true", "2>&-", "2>/dev/full"])
def test_an_output_that_nothing_reads_changes_no_exit_code(words, code, output):
    command = " ".join([sys.executable, "-m", "liger_hw", *words, output])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr


# -- info ------------------------------------------------------------------------------------------------------------


def test_info_json(capsys):
    code, out, _ = said(capsys, "info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["liger_hw"] == liger_hw.__version__
    assert {"version", "cuda", "hip", "xpu"} <= set(facts["torch"])
    assert {"version", "distributions", "warning"} <= set(facts["triton"])
    cpu = next(device for device in facts["devices"] if device["device"] == "cpu")
    assert cpu["backend"] == "cpu" and cpu["target"]["arch"] == "cpu"


def test_info_opens_with_what_matters(capsys):
    code, out, _ = said(capsys, "info")
    assert code == 0 and len(out.splitlines()) <= 14 and "torch's reference path" in out
    for word in ("liger_hw ", "torch ", "triton ", "cpu ", "cache ", "packages "):
        assert any(line.startswith(word) for line in out.splitlines()), word


def test_missing_requirements_as_json(capsys, monkeypatch):
    for missing in (["torch sees no cuda device"], []):
        monkeypatch.setattr(machine, "lacking", lambda vendor, missing=missing: missing)
        assert main(["info", "--require", "cuda", "--json"]) == len(missing)
        out, err = capsys.readouterr()
        assert json.loads(out) == {"require": "cuda", "missing": missing} and not err


def test_info_warns_of_a_misspelt_variable(capsys, monkeypatch):
    monkeypatch.setenv("LIGER_HW_CACHEDIR", "/tmp")
    assert "LIGER_HW_CACHEDIR is set, but" in said(capsys, "info")[1]


@pytest.fixture
def installed(monkeypatch):
    """Pretend exactly these distributions provide `import triton`, and that it imports as the given version."""

    def pretend(distributions: dict[str, str], imports: str | None) -> dict:
        def version(name: str) -> str:
            if name not in distributions:
                raise metadata.PackageNotFoundError(name)
            return distributions[name]

        def import_module(name: str) -> SimpleNamespace:
            if imports is None:
                raise ImportError("No module named 'triton'")
            return SimpleNamespace(__version__=imports)

        monkeypatch.setattr(machine.metadata, "version", version)
        monkeypatch.setattr(machine.metadata, "packages_distributions", lambda: {"triton": list(distributions)})
        monkeypatch.setattr(machine.importlib, "import_module", import_module)
        return machine.triton_facts()

    return pretend


@pytest.mark.parametrize(
    "names, imports, words",
    [
        *(([name], "3.7.1", []) for name in ("triton", "pytorch-triton-rocm", "triton-xpu")),
        (["triton", "triton-xpu"], "3.7.1", ["triton 3.7.1 and triton-xpu 3.7.1", "overwrite"]),
        (["triton"], None, ["fails"]),
    ],
)
def test_the_distributions_of_triton_and_what_is_wrong_with_them(installed, names, imports, words):
    facts = installed(dict.fromkeys(names, "3.7.1"), imports)
    assert facts["distributions"] == [{"name": name, "version": "3.7.1"} for name in names]
    assert bool(facts["warning"]) == bool(words) and all(word in facts["warning"] for word in words)


def test_an_older_triton_is_warned_of():
    script = "import triton; triton.__version__ = '3.3.1'; from liger_hw.cli import main; main(['info'])"
    assert "need Triton 3.4 or newer (this is 3.3.1)" in python("-c", script)


def test_info_runs_without_triton_and_transformers():
    script = (
        "import sys; sys.modules['triton'] = sys.modules['transformers'] = None;"
        "from liger_hw.cli import main; sys.exit(main(['info']))"
    )
    assert "does not import" in python("-c", script)


# -- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sm90", "h200", "gfx942"])
def test_explain_json_agrees_with_the_registry(capsys, device):
    import torch

    code, out, _ = said(
        capsys, "explain", "rms_norm", "--shape", "8192x4096", "--dtype", "bf16", "--device", device, "--json"
    )
    rows = json.loads(out)
    expected = registry.explain("rms_norm", (8192, 4096), torch.bfloat16, device)
    assert code == 0
    assert [row["tunable"] for row in rows] == [one.tunable for one in expected]
    assert [row["config"] for row in rows] == [one.chosen.config.to_json() for one in expected]
    assert all(row["shape"] == [8192, 4096] and row["target"]["arch"] == expected[0].target.arch for row in rows)


def test_explain_of_a_device_that_is_not_here_reads_its_table(capsys):
    """What ships for the H200 stands in the answer for `--device h200`, and is another device's for `h100`."""
    from liger_hw.autotune import store, tables

    _, lines, _ = tables.load(store.shipped_folder("cuda") / "sm90-nvidia-h200.json")
    (op, variant, _), entry = lines[0]
    sizes = "x".join(map(str, entry.provenance["sizes"]))
    for device, layer in (("h200", "shipped-device"), ("h100", "shipped-family")):
        _, out, _ = said(capsys, "explain", op, "--shape", sizes, "--device", device, "--json")
        (row,) = (row for row in json.loads(out) if row["tunable"] == f"{op}.{variant}")
        assert row["target"]["name"].startswith(f"NVIDIA {device.upper()}")
        assert [c["config"] for c in row["candidates"] if c["layer"] == layer] == [entry.config.to_json()]


def test_explain_says_what_is_launched(capsys):
    """By rms_norm's launchers: the gradient of the weight is summed by a second kernel where rows are many."""
    said_of = {}
    for rows in (2, 8192):
        _, out, _ = said(capsys, "explain", "rms_norm", "--shape", f"{rows}x4096", "--device", "h200", "--json")
        found = {row["tunable"]: row["launched"] for row in json.loads(out)}
        said_of[rows] = [name.split(".")[1] for name, launched in found.items() if launched]
        assert [one["kernel"] for one in found["rms_norm.fwd"]] == ["_norm_fwd_kernel"]
    assert said_of == {2: ["fwd", "bwd"], 8192: ["fwd", "bwd", "dw"]}
    _, out, _ = said(capsys, "explain", "rms_norm", "--shape", "2x4096", "--device", "h200")
    assert "(4096, 1, 2): _norm_fwd_kernel of 2 programs\n" in out
    for block in out.split("rms_norm.")[1:]:
        assert (": would be taken" in block) == (": not launched at this size\n" in block) != (": taken" in block)


def test_explain_says_what_it_cannot_tell(capsys, monkeypatch):
    from liger_hw import registry
    from liger_hw.autotune import compile as aot
    from liger_hw.runtime import triton_import as _triton

    words = ("explain", "rms_norm", "--shape", "2x4096", "--device")
    assert "the cpu runs the op's reference in torch" in said(capsys, *words, "cpu")[1]
    with monkeypatch.context() as patch:
        patch.setattr(aot, "trace", lambda *args, **kwargs: 1 / 0)
        code, out, err = said(capsys, *words, "h200")
        assert code == 0 and "launchers failed, see stderr" in out and "unknown: ZeroDivisionError" in err
        assert "Triton" not in out.splitlines()[-1]
    with monkeypatch.context() as patch:
        patch.setattr(registry, "interpreting", lambda: True)
        assert "while kernels are interpreted" in said(capsys, *words, "h200")[1]
    monkeypatch.setattr(_triton, "AVAILABLE", False)
    assert "install Triton to see which" in said(capsys, *words, "h200")[1]
    code, out, err = said(capsys, *words, "h200", "--json")
    assert code == 0 and not err and {row["launched"] for row in json.loads(out)} == {None}


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "fused_linear_cross_entropy", "--shape", "8192x4096x131072"),
        pytest.param(
            ("lock", "--model", "llama-3-8b", "--ops", "fused_linear_cross_entropy", "--seq", "8192", "-o", "lock"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_kernels_of_other_ops_are_found(words, tmp_path):
    """In a fresh process, where their files are not imported yet: embedding sorts for the head's gradient."""
    environment = {"LIGER_HW_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(liger_hw.__file__).parents[1])}
    out = python("-m", "liger_hw", *words, "--device", "h200", env=environment, cwd=tmp_path)
    assert "embedding.sort" in out or '"variant": "sort"' in (tmp_path / "lock").read_text()


def test_explain_without_a_shape_shows_the_workloads(capsys):
    code, out, _ = said(capsys, "explain", "rms_norm", "--device", "gfx942")
    assert code == 0
    assert all(f"workload {name}" in out for name in registry.get_op("rms_norm").workloads)


@pytest.mark.parametrize(
    "argv, message",
    [
        (("rms_nrom",), "did you mean rms_norm"),
        (("rms_norm", "--shape", "8192"), "takes 2 sizes"),
        (("rms_norm", "--shape", "8192*4096"), "sizes joined by x"),
        (("rms_norm", "--shape", "0x4096"), "sizes are positive"),
        (("rms_norm", "--dtype", "int8"), "expected fp32, bf16 or fp16"),
        (("rms_norm", "--device", "gfx9999"), "unknown architecture 'gfx9999'"),
    ],
)
def test_explain_answers_a_mistake(capsys, argv, message):
    code, out, err = said(capsys, "explain", *argv)
    assert code == 2 and out == "" and message in err
