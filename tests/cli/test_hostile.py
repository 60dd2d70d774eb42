"""Foreign or broken files and unwritable outputs give one line and status 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import printed, said

from liger_hw import registry
from liger_hw.autotune import lock, store, tables
from liger_hw.recompute import planner
from tests.autotune.fakes import H200, entry, tunable

KEY = (4096, 13, 2)
NAME = ("rms_norm", "fwd", KEY)
SMALL = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


# -- a config.json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"intermediate_size": 96.5}, "intermediate_size is 96.5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_plan_refuses_a_configuration_that_is_no_model(capsys, tmp_path, wrong, named):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **wrong}))
    words = ("plan", "--model", str(tmp_path), "--batch", "1", "--seq", "8", "--memory", "1GiB", "--json")
    code, out, err = said(capsys, *words)
    assert code == 2 and named in json.loads(out)["error"] and len(err.splitlines()) == 1


def test_plan_refuses_more_layers_and_more_memory_than_there_are(capsys):
    words = ["plan", "--model", "mistral-7b", "--batch", "1", "--seq", "8"]
    code, _, err = said(capsys, *words, "--memory", "1GiB", "--layers", "2000000000")
    assert code == 2 and f"at most {planner.MOST_LAYERS}" in err
    assert "is no size" in printed(capsys, *words, "--memory", f"{'9' * 400}GiB", code=2)


@pytest.mark.parametrize("architectures", [5, [1, None], ["pipeline"], ["set_seed", "Trainer"]])
def test_check_calls_nothing_of_transformers_but_a_model(capsys, tmp_path, monkeypatch, architectures):
    import transformers

    def called(*_):
        raise AssertionError("called with a configuration")

    for name in ("pipeline", "set_seed", "Trainer"):
        monkeypatch.setattr(transformers, name, called)
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": architectures}))
    code, out, _ = said(capsys, "check", str(tmp_path), "--json")
    if code == 2:  # transformers 5.17 takes a list of strings only, and says so
        assert "architectures" in json.loads(out)["error"]
    else:
        assert code == 0 and json.loads(out)["model"] == "MistralForCausalLM"


def test_check_runs_no_code_of_a_configuration(tmp_path):
    """It does not ask either whether to run it."""
    mark = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    config = {"model_type": "own-type", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "liger_hw", "check", str(tmp_path)]
    done = subprocess.run(command, input="y\ny\n", capture_output=True, text=True)
    assert done.returncode == 2 and not mark.exists()
    assert "[y/N]" not in done.stdout + done.stderr


# -- what a terminal would obey --------------------------------------------------------------------------------------


@pytest.fixture
def hostile_cache(clean_registry):
    """Lines and broken files in the user cache whose names and text would drive a terminal."""
    fwd = tunable()
    config = fwd.safe(H200, KEY)
    missed = ("rms_norm", "fwd", (1024, 13, 2))
    store.add(H200, [(NAME, entry(config, fwd, note="\x1b[31m")), (missed, entry(config, fwd, kind="missed"))])
    path = store.file_of(H200)
    path.with_name("\x1b[32mbroken\u202e.json").write_text("{")
    data = json.loads(path.read_text())
    data["entries"] += [{**data["entries"][0], "variant": "\x1b[33m"}, "\x1b[34m"]
    path.write_text(json.dumps(data))
    registry.reload()


@pytest.mark.parametrize(
    "words",
    [
        ("cache", "list"),
        ("cache", "verify"),
        ("explain", "rms_norm", "--shape", "8192x4096", "--device", "h200"),
        ("doctor",),
        ("autotune", "--device", "h200", "--dry-run", "--from-misses"),
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_names_and_text_from_a_cache_are_escaped(hostile_cache, capsys, words):
    _, out, err = said(capsys, *words)
    assert out + err and "\x1b" not in out + err and "\u202e" not in out + err


@pytest.mark.parametrize("key", [(-1, 2, 3), (4096, 2**62, 2), (7, 12, 2, 1, 1, 1), ()])
def test_an_entry_for_an_impossible_key_is_left_out(clean_registry, capsys, tmp_path, key):
    """A heuristic raises 2 to the power of a part of a key, which may take all memory or no end."""
    fwd = tunable()
    table = {("rms_norm", "fwd", key): entry(fwd.safe(H200, KEY), fwd)}
    (tmp_path / "a.json").write_text(tables.render(store.header(H200), table.items()))
    code, out, err = said(capsys, "cache", "import", str(tmp_path / "a.json"), "--device", "h200", "--yes")
    assert code == 1 and "left out: rms_norm.fwd" in out, err
    header = {"kind": "lock", "digest": lock.digest(table), "device": H200.name}
    (tmp_path / "a.lock").write_text(tables.render(header, table.items()))
    code, _, err = said(capsys, "lock", "--check", str(tmp_path / "a.lock"), "--device", "h200")
    assert code in (0, 1) and not err


@pytest.mark.parametrize("words", [("-o", ""), ("--check", ""), ("-o", "results/")], ids=" ".join)
def test_an_empty_file_name_is_refused(clean_registry, capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    given = () if "--check" in words else ("--model", "mistral-7b", "--seq", "512", "--ops", "rms_norm")
    code, _, _ = said(capsys, "lock", "--device", "h200", *given, *words)
    assert code in (1, 2) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--batch", "1", "--seq", "512", "--model", ""),
        ("lock", "--device", "h200", "--model", ""),
        ("autotune", "--device", "h200", "--dry-run", "--model", " "),
        ("check", ""),
    ],
    ids=lambda words: words[0],
)
def test_an_empty_model_is_refused(capsys, tmp_path, monkeypatch, words):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 128, **sizes}))
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "") and "the model's name is empty" in err


def test_an_export_into_no_folder_makes_none(clean_registry, capsys, tmp_path):
    fwd = tunable()
    assert store.add(H200, [(NAME, entry(fwd.safe(H200, KEY), fwd))])
    path = tmp_path / "nodir" / "table.json"
    code, _, err = said(capsys, "cache", "export", "--device", "h200", "-o", str(path))
    assert code == 2 and f"there is no folder {path.parent}" in err and not path.parent.exists()
    path.parent.mkdir()
    assert said(capsys, "cache", "export", "--device", "h200", "-o", str(path))[0] == 0 and path.exists()


# -- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["mps", "mps:0", "meta:3"])
def test_a_device_that_no_vendor_serves_is_refused(capsys, device):
    code, _, err = said(capsys, "doctor", "--device", device)
    assert code == 2 and f"cannot use --device {device}: liger_hw has no backend" in err


def test_a_size_that_torch_does_not_take_is_one_line(capsys):
    words = ("explain", "rms_norm", "--shape", "99999999999999999999x4", "--device", "h200")
    code, out, err = said(capsys, *words)
    assert code == 0 and "heuristic" in out and len(err.splitlines()) == 1 and "frame #0" not in err
