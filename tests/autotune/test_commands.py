"""`liger-hw autotune --dry-run`, `cache` and `lock`, and the sizes of models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from liger_hw import registry
from liger_hw.autotune import lock, models, store, tables
from liger_hw.backends import LaunchConfig
from liger_hw.cli import main
from tests.autotune.fakes import H200, entry, other_config, tunable

KEY = (4096, 13, 2)
NAME = ("rms_norm", "fwd", KEY)


@pytest.fixture
def cache(clean_registry):
    fwd = tunable()
    store.add(H200, [(NAME, entry(other_config(fwd, H200, KEY), fwd, median_us=12.5, gain=0.2))])
    return store.file_of(H200)


def run(capsys, *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    shown = capsys.readouterr()
    return shown.out if code != 2 else shown.err


# -- autotune --------------------------------------------------------------------------------------------------------


def test_a_dry_run_needs_no_device(clean_registry, capsys):
    words = ("--device", "gfx942", "--ops", "rms_norm,swiglu", "--shapes", "8192x4096", "--json")
    data = json.loads(run(capsys, "autotune", "--dry-run", *words))
    assert data["target"]["arch"] == "gfx942" and not data["problems"]
    assert {(j["op"], j["variant"]) for j in data["jobs"]} == {
        *(("rms_norm", v) for v in ("fwd", "bwd", "dw")),
        *(("swiglu", v) for v in ("fwd", "bwd")),
    }
    assert all(j["legal"] > 1 for j in data["jobs"])


def test_a_dry_run_of_a_model_lists_each_key_once(clean_registry, capsys):
    words = ("--model", "qwen3-8b", "llama-3-8b", "--seq", "4096,3000", "--batch", "1,2", "--json")
    data = json.loads(run(capsys, "autotune", "--dry-run", "--device", "sm90", "--ops", "rms_norm,rope", *words))
    places = [(j["op"], j["variant"], tuple(j["key"])) for j in data["jobs"]]
    assert len(places) == len(set(places))
    assert ("rms_norm", "fwd", (128, 17, 2)) in places, "qwen3 normalises its heads"
    assert ("rms_norm", "fwd", (4096, 12, 2)) in places


@pytest.mark.parametrize(
    "words, said",
    [
        (("--device", "cuda:7"), "is not in this machine"),
        (("--device", "nonsense"), "unknown architecture 'nonsense'; known: sm80"),
        (("--device", "cpu"), "nothing to tune"),
        (("--device", "cpu", "--dry-run"), "nothing to tune"),
        ((), "no GPU here"),
        (("--dry-run", "--device", "sm90", "--ops", "rms_nrm"), "did you mean rms_norm"),
        (("--dry-run", "--device", "sm90", "--model", "mistral-70z"), "did you mean mistral-7b?"),
        (("--dry-run", "--device", "sm90", "--ops", "rope", "--shapes", "1x2"), "rope (5)"),
        (("--shapes", "axb"), "is not a shape"),
        (("--budget", "-3"), "positive number of seconds"),
        (("--seq", "0"), "positive integers"),
        (("--dry-run", "--device", "sm90", "--seq", "2048"), "--batch and --seq go with --model"),
        (("--dry-run", "--device", "sm90", "--from-misses", "--shapes", "8x64"), "--from-misses says what to tune"),
    ],
)
def test_what_cannot_be_done_is_said(clean_registry, capsys, monkeypatch, words, said):
    import torch

    if torch.accelerator.is_available() or registry.interpreting():
        pytest.skip("for a machine without a GPU")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert said in run(capsys, "autotune", *words, code=2)


def test_only_rank_0_measures(clean_registry, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert main(["autotune", "--device", "cuda"]) == 0
    assert "only rank 0" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "head")  # set by another program
    assert json.loads(
        run(capsys, "autotune", "--dry-run", "--device", "gfx942", "--ops", "rms_norm", "--shapes", "8x64", "--json")
    )["jobs"]


# -- cache -----------------------------------------------------------------------------------------------------------


def test_list_names_every_entry_and_its_state(cache, capsys):
    out = run(capsys, "cache", "list")
    assert "rms_norm.fwd" in out and "4096,13,2" in out and "12.50" in out and "20.0%" in out and "current" in out
    data = json.loads(run(capsys, "cache", "list", "--json"))
    assert data[0]["entries"][0]["state"] == "current" and data[0]["device"] == cache.stem
    assert json.loads(run(capsys, "cache", "list", "--json", "--device", "h200")) == data
    assert "nothing is stored for 'h100'" in run(capsys, "cache", "list", "--device", "h100", code=2)
    store.add(replace(H200, name="NVIDIA H100 PCIe"), store.lines_of(H200))  # another H100 than the one that is known
    assert "h100-pcie" in json.loads(run(capsys, "cache", "list", "--json", "--device", "H100"))[0]["device"]


def test_verify_lists_what_is_broken_or_old(cache, capsys, monkeypatch, tmp_path):
    fwd, shipped = tunable(), tmp_path / "cuda" / "sm90.json"
    monkeypatch.setattr(store, "shipped_folder", lambda vendor: tmp_path / vendor)  # what ships may be out of date
    shipped.parent.mkdir()
    shipped.write_text(tables.render(store.header(H200), [(NAME, entry(fwd.safe(H200, KEY), fwd))]))
    assert "0 problems" in run(capsys, "cache", "verify")
    cache.with_name("torn.json").write_text("{")
    old = store.Entry(fwd.safe(H200, KEY), {"kind": "measured", "triton": "2.0.0"}, 99)
    failed = entry(fwd.safe(H200, KEY), fwd, kind="failed", reason="x")
    store.add(H200, [(NAME, old), (NAME, failed)])
    out = run(capsys, "cache", "verify", code=1)
    assert "3 lines of your own, 1 shipped entries" in out
    assert "2 problems" in out and "torn.json" in out and "stale: for version 99" in out


def test_export_is_the_shipped_format_and_comes_back(cache, capsys, tmp_path, monkeypatch):
    path = tmp_path / "sm90.json"
    run(capsys, "cache", "export", "-o", str(path))
    header, lines, problems = tables.load(path)
    assert header["arch"] == "sm90" and header["warp_size"] == 32 and header["family"] == "hopper" and not problems
    assert run(capsys, "cache", "export") == path.read_text()
    # shipped, it answers
    monkeypatch.setattr(store, "shipped_folder", lambda vendor: tmp_path)
    run(capsys, "cache", "clear", "--yes")
    registry.reload()
    assert registry.choose(tunable(), H200, KEY).layer == "shipped-arch"
    # imported, it answers from the user cache
    monkeypatch.setattr(registry, "target_named", lambda name: H200)
    assert "1 of 1" in run(capsys, "cache", "import", str(path), "--yes")
    registry.reload()
    chosen = registry.choose(tunable(), H200, KEY)
    assert chosen.layer == "user" and chosen.config == dict(lines)[NAME].config and chosen.provenance["gain"] == 0.2


def test_export_merges_and_leaves_old_kernels_out(cache, capsys, tmp_path):
    fwd = tunable()
    path = tmp_path / "sm90.json"
    run(capsys, "cache", "export", "-o", str(path))
    run(capsys, "cache", "clear", "--yes")
    other = ("rms_norm", "fwd", (2048, 13, 2))
    old = store.Entry(fwd.safe(H200, KEY), {"kind": "measured"}, 99)
    timed = entry(fwd.safe(H200, KEY), fwd, kind="timed", us=5.0)
    lines = [(other, entry(fwd.safe(H200, other[2]), fwd)), (("rms_norm", "fwd", (1024, 13, 2)), old)]
    store.add(H200, [*lines, (("rms_norm", "fwd", (512, 13, 2)), timed)])
    assert "1 out of date" in run(capsys, "cache", "export", "-o", str(path), "--merge")
    assert {name for name, _ in tables.load(path)[1]} == {NAME, other}


def test_import_refuses_another_vendor(cache, capsys, tmp_path):
    path = tmp_path / "t.json"
    run(capsys, "cache", "export", "-o", str(path))
    assert "Name the device" in run(capsys, "cache", "import", str(path), "--device", "gfx942", code=2)
    assert "sm80" in run(capsys, "cache", "import", str(path), "--device", "sm80", code=2)  # another architecture
    path.write_text("{}")
    assert "not a table" in run(capsys, "cache", "import", str(path), "--device", "sm90", code=2)


def test_import_shows_what_changes_and_then_asks(cache, capsys, tmp_path):
    path, fwd = tmp_path / "t.json", tunable()
    answer = registry.choose(fwd, H200, KEY).config
    another = next(c for c in fwd.space(H200, KEY) if c != answer and not fwd.illegal(H200, KEY, c))
    store.add(H200, [(NAME, entry(another, fwd))])
    run(capsys, "cache", "export", "-o", str(path))
    stored = cache.read_text()
    run(capsys, "cache", "clear", "--yes")
    registry.reload()
    words = "cache", "import", str(path), "--device", "h200"
    assert main(words) == 2  # there is no terminal to ask on
    said, error = capsys.readouterr()
    assert "rms_norm.fwd 4096,13,2: " in said and "->" in said and "add --yes" in error
    assert not cache.exists()
    run(capsys, *words, "--yes")
    assert cache.read_text() == stored
    registry.reload()
    assert "0 of 1 entries change" in run(capsys, *words, "--yes")
    wrong = {
        NAME: entry(LaunchConfig({"BLOCK_SIZE": 2**20, "ROWS": 1}, 4), fwd),
        ("_quarantine", "fwd", KEY): entry(fwd.safe(H200, KEY), fwd),
        ("rms_norm", "fwd", (1, 1, 1)): store.Entry(fwd.safe(H200, KEY), {"kind": "measured"}, 99),
    }
    path.write_text(tables.render(store.header(H200), wrong.items()))
    said = run(capsys, *words, "--yes", code=1)
    assert said.count("left out: ") == 3 and "0 of 3" in said and "unknown kernel" in said and "stale" in said
    assert cache.read_text() == stored


def test_clear_takes_what_it_is_told(cache, capsys):
    config, fwd = tunable().safe(H200, KEY), tunable()
    other = ("rms_norm", "fwd", (1024, 13, 2))
    notes = [(other, entry(config, fwd, kind=kind)) for kind in ("failed", "missed", "timed")]
    notes.append((other, entry(other_config(fwd, H200, KEY), fwd, kind="refused")))
    store.add(H200, notes)
    seen = []
    for option in ("--quarantine", "--misses", "--journal", "--entries"):
        run(capsys, "cache", "clear", "--yes", option)
        seen.append(sorted(one.kind for _, one in store.lines_of(H200)))
    assert seen == [["measured", "missed", "refused", "timed"], ["measured", "refused", "timed"], ["measured"], []]
    assert not cache.exists() and "nothing is stored" in run(capsys, "cache", "list")
    assert "cache export: nothing is stored" in run(capsys, "cache", "export", code=2)
    store.add(H200, notes)
    assert "nothing is stored for 'sm80'" in run(capsys, "cache", "clear", "--device", "sm80", code=2)
    assert "removed 4 lines" in run(capsys, "cache", "clear", "--yes", "--device", "sm90")
    assert not cache.exists()


def test_clear_asks_first(cache, capsys):
    assert "add --yes" in run(capsys, "cache", "clear", code=2)
    assert "--device is empty" in run(capsys, "cache", "clear", "--yes", "--device", "", code=2)
    assert cache.exists()


def test_clear_leaves_what_the_store_did_not_write(cache, capsys):
    others = [cache.with_name("notes.txt"), cache.with_name("mine.json")]
    for path in others:
        path.write_text('{"mine": 1}')
    out = run(capsys, "cache", "clear", "--yes")
    assert "removed 1 lines" in out and "mine.json" in out
    assert not cache.exists() and all(path.read_text() == '{"mine": 1}' for path in others)


# -- lock ------------------------------------------------------------------------------------------------------------


def test_lock_pins_a_model(cache, capsys, tmp_path):
    path = tmp_path / "liger-hw.lock"
    words = ("--model", "llama-3-8b", "--ops", "rms_norm,rope", "--seq", "8192", "--device", "sm90", "-o", str(path))
    data = json.loads(run(capsys, "lock", *words, "--json"))
    header, table = lock.read(path)
    assert data["digest"] == header["digest"] and data["entries"] == len(table) == 5
    assert run(capsys, "lock", "--check", str(path), "--device", "sm90")
    path.write_text(path.read_text().replace('"num_warps": 8', '"num_warps": 4'))
    assert "edited" in run(capsys, "lock", "--check", str(path), "--device", "sm90", code=1)


def test_kernels_an_op_shares_are_pinned_tuned_and_explained(clean_registry, capsys, tmp_path):
    """The fused linear loss launches cross entropy's sums and scaling too: all three commands cover them."""
    path, words = tmp_path / "l", ("--model", "mistral-7b", "--ops", "fused_linear_cross_entropy", "--seq", "2048")
    run(capsys, "lock", *words, "--device", "sm90", "-o", str(path))
    launched = {("cross_entropy", "stats", (11,))}
    launched |= {("cross_entropy", "bwd", key) for key in ((4096, 11, 2), (4096, 15, 2))}  # hidden states', the head's
    launched |= {("fused_linear_cross_entropy", "fwd", (32768, 2))}
    assert set(lock.read(path)[1]) == launched
    plan = json.loads(run(capsys, "autotune", "--dry-run", "--json", "--device", "sm90", *words))
    assert {(job["op"], job["variant"], tuple(job["key"])) for job in plan["jobs"]} == launched and not plan["problems"]
    for job in plan["jobs"]:
        of = tunable(f"{job['op']}.{job['variant']}")
        assert list(of.key(*job["sizes"], 2)) == job["key"]
    words = ("explain", "fused_linear_cross_entropy", "--shape", "2048x4096x32768", "--device", "sm90", "--json")
    rows = json.loads(run(capsys, *words))
    own = {("fused_linear_cross_entropy", "take", (2,))}  # explained as the op's, though so few tokens do without
    assert {(*row["tunable"].split("."), tuple(row["key"])) for row in rows} == launched | own


def test_a_check_compares_with_the_machines_own_choice(cache, capsys, tmp_path, monkeypatch):
    """Also if LIGER_HW_LOCK_FILE names the file, which would then answer for itself."""
    path = tmp_path / "l"
    words = ("--model", "llama-3-8b", "--ops", "rms_norm", "--seq", "8192", "--device", "sm90", "-o", str(path))
    run(capsys, "lock", *words)
    words = ("lock", "--check", str(path), "--device", "gfx942", "--json")
    differ = json.loads(run(capsys, *words))["other"]
    monkeypatch.setenv("LIGER_HW_LOCK_FILE", str(path))
    registry.reload()
    assert json.loads(run(capsys, *words))["other"] == differ > 0


def test_lock_says_what_is_missing(clean_registry, capsys):
    assert "say what to pin" in run(capsys, "lock", "--device", "sm90", code=2)


@pytest.mark.parametrize(
    "content", [b"no", b"[1]", b"\xff", b"[" * 100_000, None], ids=["text", "list", "bytes", "deep", "folder"]
)
def test_a_file_that_cannot_be_used_is_named(clean_registry, capsys, tmp_path, content):
    path = tmp_path / "x.json"
    path.mkdir() if content is None else path.write_bytes(content)
    said = run(capsys, "cache", "import", str(path), "--device", "sm90", code=2)
    assert str(path) in said and "`liger-hw cache export` writes a table" in said
    assert str(path) in run(capsys, "lock", "--check", str(path), "--device", "sm90", code=1)


# -- models ----------------------------------------------------------------------------------------------------------


def test_known_models_match_the_ops_own_workloads():
    for name, workload in (
        ("mistral-7b", "mistral_7b"),
        ("llama-3-8b", "llama3_8b"),
        ("qwen3-8b", "qwen3_8b"),
        ("gemma-2-2b", "gemma2_2b"),
    ):
        model = models.find(name)
        rows, vocab = registry.get_op("cross_entropy").workloads[workload]
        assert models.sizes_of("cross_entropy", model, 1, rows) == [(rows, vocab)]
    assert models.sizes_of("swiglu", models.find("gemma-2-2b"), 1, 8) == []
    assert models.sizes_of("geglu", models.find("google/gemma-2-2b"), 1, 8) == [(8, 9216)]


@pytest.mark.parametrize(
    "kind, norms", [("qwen3", [(8, 64), (64, 16), (16, 16)]), ("olmo2", [(8, 64), (8, 128), (8, 32)])]
)
def test_norms_of_q_and_k_are_over_one_head_or_all_of_them(kind, norms):
    config = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    model = models.from_config(config | {"vocab_size": 128, "rms_norm_eps": 1e-6}, kind)
    assert models.sizes_of("rms_norm", model, 1, 8) == norms


def test_a_config_file_is_a_model(tmp_path):
    data = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 100,
        "rms_norm_eps": 1e-6,
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    for name in (tmp_path, tmp_path / "config.json"):
        model = models.find(str(name))
        assert (model.kv_heads, model.head_dim, model.rms_norm) == (4, 16, True)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": data}))
    assert models.find(str(tmp_path)).vocab == 100
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ValueError, match="num_attention_heads"):
        models.find(str(tmp_path))


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000], ids=["list", "torn", "bytes", "deep"])
def test_a_file_that_is_no_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match="config.json is no config"):
        models.find(str(tmp_path))


@pytest.mark.parametrize("name", ["no.json", "./there/config.json"])
def test_a_path_to_no_file_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        models.find(name)


def test_an_unreachable_hub_is_asked_once(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(
        ValueError, match="'some/model' is no file.* http://127.0.0.1:9 cannot be reached.* give the path of a config"
    ):
        models.find("some/model")
