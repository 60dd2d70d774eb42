"""The stored configurations: formats, layers, staleness, broken files, many processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from liger_hw import registry
from liger_hw.autotune import journal, notes, store, tables
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.registry import Entry
from tests.autotune.fakes import H200, entry, other_config, tunable

KEY = (4096, 13, 2)
NAME = ("rms_norm", "fwd", KEY)


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch, tmp_path):
    """No table of the package answers here, whatever it has for KEY; `ship` puts one in their place."""
    monkeypatch.setattr(store, "shipped_folder", lambda vendor: tmp_path / "none" / vendor)


@pytest.fixture
def stored(clean_registry, caplog):
    """A user cache with one good entry for the H200: (tunable, configuration, its file)."""
    caplog.set_level(logging.WARNING, logger="liger_hw")
    fwd = tunable()
    config = other_config(fwd, H200, KEY)
    path = store.save(H200, NAME, entry(config, fwd))
    return fwd, config, path


def taken(target=H200, key=KEY, name="rms_norm.fwd"):
    return registry.choose(tunable(name), target, key)


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_saved_entry_answers_before_the_heuristic(stored):
    _, config, path = stored
    chosen = taken()
    assert (chosen.layer, chosen.config, chosen.source) == ("user", config, str(path))
    assert chosen.provenance["kind"] == "measured"
    assert path.parent.parent.name == "cuda-sm90-nvidia-h200-132mp"
    assert json.loads(path.read_text())["schema"] == store.SCHEMA


def test_another_device_does_not_see_it(stored):
    assert taken(replace(H200, name="NVIDIA H100 80GB HBM3")).layer == "heuristic"
    assert taken(replace(H200, multiprocessors=66)).layer == "heuristic"


def test_a_changed_kernel_rejects(stored):
    fwd, config, path = stored
    store.save(H200, NAME, replace(entry(config, fwd), version=99))
    path.unlink()
    registry.reload()
    assert taken().layer == "heuristic"
    explained = [
        c for c in registry.explain("rms_norm", (8192, 4096), _bf16(), H200)[0].candidates if c.layer == "user"
    ]
    assert "stored for version 99 of the kernel" in explained[0].rejected


def test_two_kernel_sources_share_a_cache(stored):
    """Two checkouts with different kernels do not undo each other's tuning."""
    fwd, config, path = stored
    other = replace(entry(fwd.safe(H200, KEY), fwd, date="2027-01-01T00:00:00Z"), version=99)
    assert store.save(H200, NAME, other) != path
    registry.reload()
    assert taken().config == config


def test_another_triton_minor_is_demoted_below_shipped(stored, monkeypatch, tmp_path):
    fwd, config, path = stored
    path.unlink()
    old = entry(config, fwd, triton="2.0.0")
    store.save(H200, NAME, old)
    registry.reload()
    assert taken().layer == "user", "better than no measurement"
    assert "demoted" in taken().source
    shipped = fwd.safe(H200, KEY)
    ship(monkeypatch, tmp_path, "sm90", {NAME: entry(shipped, fwd)})
    assert (taken().layer, taken().config) == ("shipped-arch", shipped)


def ship(monkeypatch, tmp_path: Path, stem: str, table, target=H200) -> Path:
    folder = tmp_path / "shipped" / target.vendor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(tables.render(store.header(target), table))
    monkeypatch.setattr(store, "shipped_folder", lambda vendor: tmp_path / "shipped" / vendor)
    registry.reload()
    return folder / f"{stem}.json"


def test_shipped_layers_in_order(clean_registry, monkeypatch, tmp_path):
    fwd = tunable()
    legal = [c for c in fwd.space(H200, KEY) if fwd.illegal(H200, KEY, c) is None and c != fwd.heuristic(H200, KEY)]
    ship(monkeypatch, tmp_path, "sm90", {NAME: entry(legal[0], fwd)})
    assert (taken().layer, taken().config) == ("shipped-arch", legal[0])
    ship(monkeypatch, tmp_path, "sm90-nvidia-h200", {NAME: entry(legal[1], fwd)})
    assert (taken().layer, taken().config) == ("shipped-device", legal[1])
    h100 = known_target("sm90")
    assert taken(h100).layer == "shipped-arch"
    store.save(H200, NAME, entry(legal[2], fwd))
    registry.reload()
    assert (taken().layer, taken().config) == ("user", legal[2])


def test_family_answers_but_never_across_warp_sizes(clean_registry, monkeypatch, tmp_path):
    fwd = tunable()
    ampere, ada = known_target("sm80"), known_target("sm86")
    config = other_config(fwd, ampere, KEY)
    path = ship(monkeypatch, tmp_path, "sm80", {NAME: entry(config, fwd)}, ampere)
    assert ampere.family == ada.family and taken(ada).layer == "shipped-family"
    assert taken(H200).layer == "heuristic", "another family"
    wide = tables.render({**store.header(ampere), "warp_size": 64}, {NAME: entry(config, fwd)})
    path.write_text(wide)
    registry.reload()
    assert taken(ada).layer == "heuristic"


def test_shipped_can_be_switched_off(clean_registry, monkeypatch, tmp_path):
    fwd = tunable()
    ship(monkeypatch, tmp_path, "sm90", {NAME: entry(other_config(fwd, H200, KEY), fwd)})
    monkeypatch.setenv("LIGER_HW_DISABLE_SHIPPED", "1")
    registry.reload()
    assert taken().layer == "heuristic"


BROKEN = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "not json": lambda text: "\x00\x01\xff",
    "foreign": lambda text: '{"hello": "world"}',
    "a list": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "deep": lambda text: "[" * 100_000,
    "future schema": lambda text: text.replace('"schema": 2', '"schema": 99'),
    "another device": lambda text: text.replace("nvidia-h200", "nvidia-b300"),
    "unknown field": lambda text: text.replace('"num_warps"', '"num_wraps"'),
    "warps a string": lambda text: text.replace('"num_warps": ', '"num_warps": "x", "a": '),
    "key of strings": lambda text: text.replace("[4096, 13, 2]", '["4096", "13", "2"]'),
    "an op that is a path": lambda text: text.replace('"rms_norm"', '"../../rms_norm"'),
    "no provenance": lambda text: text.replace('"provenance"', '"province"'),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_entry_is_a_miss_with_one_warning(stored, caplog, damage):
    _, _, path = stored
    path.write_bytes(BROKEN[damage](path.read_text()).encode("latin-1"))
    (path.parent / "also-broken.json").write_text("{")
    registry.reload()
    assert taken().layer == "heuristic"
    taken(key=(2048, 13, 2))
    said = warnings(caplog)
    assert len(said) == 1 and "cannot be read" in said[0] and "cache verify" in said[0]


@pytest.mark.parametrize("key", [[[4096], 13, 2], [{"a": 1}], float("inf"), [float("inf")], "abc", None])
def test_broken_notes_are_passed_over_with_one_warning(stored, caplog, key):
    """A quarantine or a list of misses with a key that is none stops neither the launch nor what reads the others."""
    fwd, config, _ = stored
    notes.save_misses(H200, [NAME])
    notes.save_quarantined(H200, "rms_norm.fwd", KEY, config, "out of memory", fwd.version)
    (quarantine,), (missed,) = (list((store.home(H200) / what).iterdir()) for what in ("_quarantine", "_misses"))
    for path, name in ((quarantine, "key"), (missed, "misses")):
        data = json.loads(path.read_text())
        data[name] = key if name == "key" else [["rms_norm", "bwd", [1]], ["rms_norm", "fwd", key]]
        (path.parent / "broken.json").write_text(json.dumps(data))
    registry.reload()
    assert taken().layer == "heuristic", "the good quarantine still counts"
    assert notes.read_misses(H200) == [NAME]
    assert len(warnings(caplog)) == 1 and "broken.json" in warnings(caplog)[0]


def test_an_unreadable_entry_is_a_miss(stored, caplog):
    _, _, path = stored
    path.unlink()
    path.mkdir()  # reading it fails even for root
    registry.reload()
    assert taken().layer == "heuristic"
    assert len(warnings(caplog)) == 1


SPECIAL = {
    "a FIFO": os.mkfifo,
    "an endless device": lambda path: os.symlink("/dev/zero", path),
    "200 MB": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 200_000_000),
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_special_file_in_the_cache_neither_hangs_nor_fills_memory(clean_registry, kind):
    """In a process of its own, with little memory and time: each of these once took all of either."""
    folder = store.home(H200)
    paths = [folder / "rms_norm" / f"{'a' * 24}.json", folder / "_misses" / "b.json", folder / "_quarantine" / "c.json"]
    paths.append(folder / "_journal.jsonl")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        SPECIAL[kind](path)
    script = (
        "import resource, sys; from liger_hw.autotune import journal, lock_file, notes, store\n"
        "from pathlib import Path; from tests.autotune.fakes import H200\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30)); problems = []\n"
        "assert not store.read_user(H200, problems) and len(problems) == 1, problems\n"
        "notes.read_misses(H200), list(notes.read_quarantined(H200)), journal.Past(journal.Journal(None), '')\n"
        "list(journal.Journal(store.home(H200) / '_journal.jsonl').read())\n"
        "try: lock_file.read(Path(sys.argv[1]))\n"
        "except ValueError as error: print('refused:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(paths[0])], capture_output=True, text=True)
    assert done.returncode == 0 and "refused: cannot be read" in done.stdout, done.stderr


def test_nothing_is_written_or_removed_through_a_link_out_of_the_cache(clean_registry, tmp_path, caplog):
    fwd, outside = tunable(), tmp_path / "outside"
    outside.mkdir()
    made = entry(fwd.safe(H200, KEY), fwd)
    folder = store.home(H200)
    path = store.entry_path(H200, NAME, made)
    for link in (folder, folder / "rms_norm"):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        (outside / path.name).write_text("theirs")
        assert store.save(H200, NAME, made) is None
        store.discard(H200, NAME, made)
        assert [p.name for p in outside.iterdir()] == [path.name] and (outside / path.name).read_text() == "theirs"
        assert any("leads out of the cache" in said for said in warnings(caplog))
        link.unlink()
    folder.rmdir()
    folder.symlink_to(outside)
    notes.save_misses(H200, [NAME])
    notes.save_quarantined(H200, fwd.name, KEY, made.config, "failed", fwd.version)
    journal.Journal(folder / "_journal.jsonl").write({"stage": "done"})
    assert [p.name for p in outside.iterdir()] == [path.name]


def test_a_journal_that_is_a_link_is_not_written(clean_registry, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    path = store.home(H200) / "_journal.jsonl"
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    journal.Journal(path).write({"stage": "done"})
    assert victim.read_text() == "precious\n"


def test_a_journal_behind_a_link_is_not_among_the_stores_files(clean_registry, tmp_path):
    folder = store.home(H200)
    folder.mkdir(parents=True)
    (folder / "_journal.jsonl").write_text('{"stage": "done"}\n')
    assert store.written_files(folder, ["journal"]) == ([folder / "_journal.jsonl"], [])
    folder.parent.rename(tmp_path / "outside")
    folder.parent.symlink_to(tmp_path / "outside")
    assert store.written_files(folder, ["journal"]) == ([], [])


@pytest.mark.parametrize("line", ['"my stage"', '["stage"]', "stage", "1"])
def test_a_journal_of_somebody_elses_is_not_among_the_stores_files(clean_registry, line):
    path = store.home(H200) / "_journal.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(line + "\nprecious\n")
    assert store.written_files(path.parent, ["journal"]) == ([], [path])


def test_a_cache_that_is_a_link_itself_is_used(clean_registry, monkeypatch, tmp_path):
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "large-disk")
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / "cache"))
    registry.reload()
    fwd = tunable()
    assert store.save(H200, NAME, entry(fwd.safe(H200, KEY), fwd)).exists() and taken().layer == "user"


@pytest.mark.parametrize("field", ["provenance", "config"])
def test_deep_nesting_is_a_miss(stored, caplog, field):
    """Short of what JSON's reader refuses, yet too deep for what reads it: `cache list --json` ended in an error."""
    _, _, path = stored
    data = json.loads(path.read_text())
    nested = json.loads("[" * 600 + "]" * 600)
    data[field]["vendor"] = {"x": nested}
    path.write_text(json.dumps(data))
    registry.reload()
    assert taken().layer == "heuristic" and "nested more than" in warnings(caplog)[0]


@pytest.mark.parametrize("name", ["\x1b[31m", "../x", "", None, ["fwd"]])
def test_a_miss_whose_name_is_no_name_is_left_out(clean_registry, name):
    folder = store.home(H200) / "_misses"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps({"schema": 2, "misses": [["rms_norm", name, [4096, 9, 2]]]}))
    assert notes.read_misses(H200) == []


@pytest.mark.parametrize("wrong", ["Infinity", "NaN", "1e999", "1" + "0" * 400])
def test_a_number_that_no_json_may_have_is_refused(stored, caplog, wrong):
    _, _, path = stored
    data = json.loads(path.read_text())
    data["provenance"]["median_us"] = "here"
    path.write_text(json.dumps(data).replace('"here"', wrong))
    registry.reload()
    assert taken().layer == "heuristic" and "not finite" in warnings(caplog)[0]


def test_hostile_text_is_escaped(stored):
    fwd, config, _ = stored
    hostile = "\x1b[2J\u202e\ud800\n"
    store.save(H200, NAME, Entry(config, {"kind": f"me{hostile}", "date": hostile}, fwd.version))
    shown = store.read_user(H200, [])[0][1].provenance
    assert shown["kind"] == "me\\x1b[2J\\u202e\\ud800\\n" and shown["date"].isprintable()


def test_an_illegal_entry_is_refused_with_its_reason(stored):
    fwd, config, path = stored
    store.save(H200, NAME, entry(replace(config, num_warps=64), fwd))
    registry.reload()
    assert taken().layer == "heuristic"
    explained = registry.explain("rms_norm", (8192, 4096), _bf16(), H200)[0]
    assert any("2048 threads" in c.rejected for c in explained.candidates if c.layer == "user")


def test_a_read_only_cache_costs_one_warning(stored, caplog, monkeypatch):
    fwd, config, _ = stored

    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store.files, "replace_file", refuse)
    for op in ("rms_norm", "rope", "swiglu"):
        assert store.save(H200, (op, "fwd", KEY), entry(config, fwd)) is None
    notes.save_misses(H200, [NAME])
    assert len(warnings(caplog)) == 1 and "Read-only" in warnings(caplog)[0]
    assert taken().layer == "user", "reading still works"


def test_a_relative_cache_home_is_ignored(clean_registry, monkeypatch, tmp_path):
    """It would be another cache in every folder that a run begins in."""
    monkeypatch.delenv("LIGER_HW_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        registry.reload()
        assert store.root() == tmp_path / ".cache" / "liger_hw"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registry.reload()
    assert store.root() == tmp_path / "cache" / "liger_hw"


def test_no_home_is_no_cache(clean_registry, monkeypatch):
    monkeypatch.delenv("LIGER_HW_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(store.Path, "home", homeless)
    registry.reload()
    assert store.root() is None and taken().layer == "heuristic"
    assert store.save(H200, NAME, entry(tunable().safe(H200, KEY), tunable())) is None


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(stored, monkeypatch):
    fwd, config, path = stored
    before = path.read_text()
    monkeypatch.setattr(store.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert store.save(H200, NAME, entry(fwd.safe(H200, KEY), fwd)) is None
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_shipped_format_is_canonical():
    fwd = tunable()
    table = {
        ("rms_norm", "fwd", (2048, 9, 2)): entry(fwd.safe(H200, KEY), fwd),
        NAME: entry(fwd.heuristic(H200, KEY), fwd),
    }
    text = tables.render(store.header(H200), table)
    assert text == tables.render(store.header(H200), dict(reversed(table.items())))
    assert len(text.splitlines()) == 2 + len(table), "one line an entry"
    header, entries, problems = tables.parse(text, "x")
    assert not problems and header["arch"] == "sm90"
    assert {n: e.config for n, e in entries.items()} == {n: e.config for n, e in table.items()}
    assert tables.render(header | {"schema": 2}, entries) == text


def test_nothing_is_pickled():
    for path in Path(store.__file__).parent.parent.rglob("*.py"):
        assert "import pickle" not in path.read_text(), path


WATCHED = """
import sys
from pathlib import Path
folder, starts = Path(sys.argv[1]), []

def watch(event, args):
    # Python's own import of a module from its __pycache__, whose file is watched below as it is opened
    if event == "marshal.loads" and sys._getframe(1).f_code.co_filename == "<frozen importlib._bootstrap_external>":
        return
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "marshal.loads"):
        starts.append(event)
    elif event in ("exec", "compile", "import", "ctypes.dlopen", "open") and str(folder) in str(args):
        if event != "open" or not str(args[0]).endswith((".json", ".lock", ".jsonl")):
            starts.append(f"{event} {args}")

from liger_hw import registry
from liger_hw.cli import main
from tests.autotune.fakes import H200, tunable
fwd = tunable()
main(["cache", "list"])
registry.reload()
sys.addaudithook(watch)
print(registry.choose(fwd, H200, (4096, 13, 2)).layer)
for words in (["list"], ["verify"], ["import", str(folder / "t.json"), "--device", "h200", "--yes"]):
    main(["cache", *words])
main(["lock", "--check", str(folder / "l.lock"), "--device", "h200"])
print(starts)
"""
"""What Python itself reports of code that starts, while a cache, a table and a lock file are read."""


def test_nothing_executes_from_a_cache_a_table_or_a_lock_file(stored, tmp_path):
    """Files that Python would run if anything imported, unpickled or evaluated them."""
    code = "open('/tmp/liger_hw-was-run', 'w')"
    folder = store.home(H200)
    for name in ("__init__.py", "sitecustomize.py", "conftest.py", "rms_norm/__init__.py", "rms_norm/a.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    (folder / "rms_norm" / "b.json").write_bytes(b"cos\nsystem\n(S'touch /tmp/liger_hw-was-run'\ntR.")
    record = {**tables.to_record(NAME, entry(tunable().safe(H200, KEY), tunable())), "op": f"__import__({code!r})"}
    for name in ("t.json", "l.lock"):
        (tmp_path / name).write_text(json.dumps({"schema": 2, **store.header(H200), "entries": [record]}))
    environment = {**os.environ, "LIGER_HW_CACHE_DIR": str(store.root())}
    command = [sys.executable, "-c", WATCHED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and not os.path.exists("/tmp/liger_hw-was-run")


WRITER = """
import json, os, sys
from dataclasses import replace
from liger_hw import registry
from liger_hw.autotune import store
from liger_hw.backends import LaunchConfig
from liger_hw.registry import Entry
from tests.autotune.fakes import H200
number = int(sys.argv[1])
torn = 0
for turn in range(40):
    config = LaunchConfig({"BLOCK_SIZE": 4096, "ROWS": 1}, 1 << (turn % 5), vendor={"pad": "x" * 4000})
    entry = Entry(config, {"kind": "measured", "writer": number})
    assert store.save(H200, ("rms_norm", "fwd", (4096, turn % 4, 2)), entry)
    problems = []
    entries = store.read_user(H200, problems)
    torn += len(problems)
    assert all(len(e.config.vendor["pad"]) == 4000 for _, e in entries)
print(torn)
"""


def test_sixteen_processes_never_see_a_torn_entry(clean_registry, tmp_path):
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "LIGER_HW_CACHE_DIR": str(tmp_path / "shared"),
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", WRITER]
    running = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True) for i in range(16)
    ]
    assert [p.communicate()[0].strip() for p in running] == ["0"] * 16
    assert all(p.returncode == 0 for p in running)
    left = [p.name for p in (tmp_path / "shared").rglob("*") if p.is_file()]
    assert len(left) == 4 and not any(name.endswith(".tmp") for name in left)


def test_misses_are_kept_once(clean_registry):
    names = [("rms_norm", "fwd", KEY), ("rms_norm", "bwd", KEY)]
    notes.save_misses(H200, names)
    notes.save_misses(H200, list(reversed(names)))
    notes.save_misses(H200, names[:1])
    assert notes.read_misses(H200) == sorted(names)
    assert len(list((store.home(H200) / "_misses").iterdir())) == 2


def _bf16():
    import torch

    return torch.bfloat16


def test_an_entry_round_trips_vendor_options(clean_registry):
    config = LaunchConfig({"BLOCK_SIZE": 64, "ROWS": 2}, 4, 2, 3, "keep", {"maxnreg": 64})
    store.save(H200, NAME, Entry(config, {"kind": "static"}))
    assert store.read_user(H200, [])[0][1].config == config
