"""The stored configurations: formats, the order of tables, staleness, broken files, many processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from liger_hw import files, registry
from liger_hw.autotune import store, tables
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.registry import Entry
from tests.autotune.fakes import H200, entry, other_config, ship, tunable

KEY = (4096, 13, 2)
NAME = ("rms_norm", "fwd", KEY)


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch, tmp_path):
    """No table ships; `ship` adds one."""
    monkeypatch.setattr(store, "shipped_folder", lambda vendor: tmp_path / "none" / vendor)


@pytest.fixture
def stored(clean_registry, caplog):
    """A user cache with one good entry for the H200: (tunable, configuration, the cache's file)."""
    caplog.set_level(logging.WARNING, logger="liger_hw")
    fwd = tunable()
    config = other_config(fwd, H200, KEY)
    assert store.add(H200, [(NAME, entry(config, fwd))])
    return fwd, config, store.file_of(H200)


def taken(target=H200, key=KEY, name="rms_norm.fwd"):
    return registry.choose(tunable(name), target, key)


def note(kind: str, config: LaunchConfig, version: int = 1, **more) -> Entry:
    return Entry(config, {"kind": kind, "triton": store.triton_version(), **more}, version)


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def changed(path: Path, change) -> None:
    """Change the first line of a file of the cache."""
    data = json.loads(path.read_text())
    change(data["entries"][0])
    path.write_text(json.dumps(data))


def test_a_saved_entry_answers_before_the_heuristic(stored):
    _, config, path = stored
    chosen = taken()
    assert (chosen.layer, chosen.config, chosen.source) == ("user", config, f"{path}:2")
    assert chosen.provenance["kind"] == "measured"
    assert path.name == "cuda-sm90-nvidia-h200-132mp.json" and path.parent.name == f"v{store.SCHEMA}"
    header, lines, problems = tables.load(path)
    assert header["schema"] == store.SCHEMA and header["arch"] == "sm90" and len(lines) == 1 and not problems
    assert len(path.read_text().splitlines()) == 3, "one line an entry, as in the tables that ship"


def test_another_device_does_not_see_it(stored):
    assert taken(replace(H200, name="NVIDIA H100 80GB HBM3")).layer == "heuristic"
    assert taken(replace(H200, multiprocessors=66)).layer == "heuristic"


def test_a_newer_version_of_the_kernel_rejects(stored, monkeypatch):
    fwd, config, _ = stored
    monkeypatch.setattr(fwd, "version", 2)
    registry.reload()
    assert taken().layer == "heuristic"
    candidates = registry.explain("rms_norm", (8192, 4096), torch.bfloat16, H200)[0].candidates
    (refused,) = [one for one in candidates if one.layer == "user"]
    assert refused.rejected == "stored for version 1 of the kernel, this is version 2"


def test_two_versions_of_a_kernel_share_a_cache(stored):
    """Two checkouts with different kernels do not undo each other's tuning."""
    fwd, config, _ = stored
    assert store.add(H200, [(NAME, replace(entry(fwd.safe(H200, KEY), fwd, date="2027-01-01T00:00:00Z"), version=99))])
    registry.reload()
    assert taken().config == config and len(store.lines_of(H200)) == 2


def test_a_later_line_takes_the_place_of_an_earlier_one(stored):
    fwd, config, _ = stored
    safe = fwd.safe(H200, KEY)
    assert store.add(H200, [(NAME, note("static", safe))])
    registry.reload()
    assert taken().config == safe and len(store.lines_of(H200)) == 1


def test_the_end_of_a_search_takes_the_lines_of_its_candidates_away(clean_registry):
    fwd = tunable()
    configs = list(fwd.space(H200, KEY))[:3]
    lines = [(NAME, note("missed", configs[0]))]
    lines += [(NAME, note(kind, config)) for kind, config in zip(("timed", "refused", "failed"), configs)]
    assert store.add(H200, lines)
    kinds = {one.kind for _, one in store.lines_of(H200)}
    assert kinds == {"missed", "timed", "refused", "failed"} and store.misses(H200) == [NAME]
    registry.reload()
    assert taken().layer == "heuristic"
    other = note("measured", configs[0], version=2)
    assert store.add(H200, [(NAME, other)]) and len(store.lines_of(H200)) == 5, "of another version of the kernel"
    assert store.misses(H200) == [NAME]
    assert store.add(H200, [(NAME, note("static", configs[0]))])
    assert {one.kind for _, one in store.lines_of(H200)} == kinds - {"missed"} | {"static", "measured"}
    assert store.add(H200, [(NAME, note("heuristic", configs[0]))])
    assert sorted(one.kind for _, one in store.lines_of(H200)) == ["failed", "heuristic", "measured"]
    assert not store.misses(H200)


def test_another_triton_minor_is_demoted_below_shipped(clean_registry, monkeypatch, tmp_path):
    fwd = tunable()
    config = other_config(fwd, H200, KEY)
    assert store.add(H200, [(NAME, entry(config, fwd, triton="2.0.0"))])
    assert taken().layer == "user", "better than no measurement"
    assert "demoted" in taken().source
    shipped = fwd.safe(H200, KEY)
    ship(monkeypatch, tmp_path, "sm90", {NAME: entry(shipped, fwd)})
    assert (taken().layer, taken().config) == ("shipped-arch", shipped)


def test_shipped_layers_in_order(clean_registry, monkeypatch, tmp_path):
    fwd = tunable()
    legal = [c for c in fwd.space(H200, KEY) if fwd.illegal(H200, KEY, c) is None and c != fwd.heuristic(H200, KEY)]
    ship(monkeypatch, tmp_path, "sm90", {NAME: entry(legal[0], fwd)})
    assert (taken().layer, taken().config) == ("shipped-arch", legal[0])
    ship(monkeypatch, tmp_path, "sm90-nvidia-h200", {NAME: entry(legal[1], fwd)})
    assert (taken().layer, taken().config) == ("shipped-device", legal[1])
    h100 = known_target("sm90")
    assert taken(h100).layer == "shipped-arch"
    store.add(H200, [(NAME, entry(legal[2], fwd))])
    registry.reload()
    assert (taken().layer, taken().config) == ("user", legal[2])


def test_family_answers_but_never_across_warp_sizes(clean_registry, monkeypatch, tmp_path):
    fwd = tunable()
    ampere, ada = known_target("sm80"), known_target("sm86")
    config = other_config(fwd, ampere, KEY)
    path = ship(monkeypatch, tmp_path, "sm80", {NAME: entry(config, fwd)}, ampere)
    assert ampere.family == ada.family and taken(ada).layer == "shipped-family"
    assert taken(H200).layer == "heuristic", "another family"
    wide = tables.render({**store.header(ampere), "warp_size": 64}, [(NAME, entry(config, fwd))])
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
    "truncated": lambda text: text[: len(text) // 2],
    "not json": lambda text: "\x00\x01\xff",
    "foreign": lambda text: '{"hello": "world"}',
    "null": lambda text: "null",
    "deep": lambda text: "[" * 100_000,
    "future schema": lambda text: text.replace('"schema": 2', '"schema": 99'),
    "another device": lambda text: text.replace("nvidia-h200", "nvidia-b300"),
    "unknown field": lambda text: text.replace('"num_warps"', '"num_wraps"'),
    "key of strings": lambda text: text.replace("[4096, 13, 2]", '["4096", "13", "2"]'),
    "an op that is a path": lambda text: text.replace('"rms_norm"', '"../../rms_norm"'),
    "no provenance": lambda text: text.replace('"provenance"', '"province"'),
    "a version of text": lambda text: text.replace('"version": 1', '"version": "1"'),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_cache_is_a_miss_with_one_warning(stored, caplog, damage):
    fwd, config, path = stored
    path.write_bytes(BROKEN[damage](path.read_text()).encode("latin-1"))
    registry.reload()
    assert taken().layer == "heuristic"
    taken(key=(2048, 13, 2))
    said = warnings(caplog)
    assert len(said) == 1 and "ignored what cannot be read" in said[0] and "cache verify" in said[0]
    assert store.add(H200, [(NAME, entry(config, fwd))]), "a writer is not stopped by it either"
    registry.reload()
    assert taken().layer == "user"


def test_a_broken_line_costs_itself_only(stored, caplog):
    fwd, config, path = stored
    assert store.add(H200, [(("rms_norm", "fwd", (2048, 13, 2)), entry(config, fwd))])
    changed(path, lambda record: record.update(key=[[4096], 13, 2]))
    registry.reload()
    layers = [taken(key=key).layer for key in (KEY, (2048, 13, 2))]
    assert sorted(layers) == ["heuristic", "user"] and len(warnings(caplog)) == 1
    assert store.add(H200, [(NAME, note("failed", config))]) and len(store.load(path)[1]) == 2
    assert store.remove(path, ["measured"]) == 1 and len(store.load(path)[1]) == 1


@pytest.mark.parametrize("kind", ["a folder", "200 MB"])
def test_what_is_no_table_at_all_is_a_miss(stored, caplog, kind):
    _, _, path = stored
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            os.truncate(file.fileno(), 200_000_000)
    registry.reload()
    assert taken().layer == "heuristic"
    assert len(warnings(caplog)) == 1


def test_a_read_only_cache_costs_one_warning(stored, caplog, monkeypatch):
    fwd, config, _ = stored

    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files, "replace_file", refuse)
    for op in ("rms_norm", "rope", "swiglu"):
        assert not store.add(H200, [((op, "fwd", KEY), note("failed", config))])
    assert len(warnings(caplog)) == 1 and "Read-only" in warnings(caplog)[0]
    assert taken().layer == "user", "reading still works"


def test_a_relative_cache_home_is_ignored(clean_registry, monkeypatch, tmp_path):
    """It would be another cache in each working directory."""
    monkeypatch.delenv("LIGER_HW_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        registry.reload()
        assert store.root() == tmp_path / ".cache" / "liger_hw"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registry.reload()
    assert store.root() == tmp_path / "cache" / "liger_hw"


@pytest.mark.parametrize("folder", [None, "~no_such_user/cache"])
def test_no_home_is_no_cache(clean_registry, monkeypatch, folder):
    """No folder of that name is made."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if folder:
        monkeypatch.setenv("LIGER_HW_CACHE_DIR", folder)
    else:
        monkeypatch.delenv("LIGER_HW_CACHE_DIR")

        def homeless(path):
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(store.Path, "expanduser", homeless)
    registry.reload()
    assert store.root() is None and taken().layer == "heuristic"
    assert not store.add(H200, [(NAME, entry(tunable().safe(H200, KEY), tunable()))])


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(stored, monkeypatch):
    fwd, config, path = stored
    before = path.read_text()
    monkeypatch.setattr(files.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert not store.add(H200, [(NAME, entry(fwd.safe(H200, KEY), fwd))])
    assert path.read_text() == before
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", path.name]


def test_shipped_format_is_canonical(tmp_path):
    fwd = tunable()
    table = {
        ("rms_norm", "fwd", (2048, 9, 2)): entry(fwd.safe(H200, KEY), fwd),
        NAME: entry(fwd.heuristic(H200, KEY), fwd),
        ("rms_norm", "fwd", (512, 9, 2)): entry(fwd.safe(H200, KEY), fwd),
    }
    text = tables.render(store.header(H200), table.items())
    assert text == tables.render(store.header(H200), reversed(table.items()))
    assert len(text.splitlines()) == 2 + len(table), "one line an entry"
    (path := tmp_path / "table.json").write_text(text)
    header, lines, problems = tables.load(path)
    assert not problems and header["arch"] == "sm90"
    assert [name[2][0] for name, _ in lines] == [512, 2048, 4096], "sorted by the size of a number"
    assert {n: e.config for n, e in lines} == {n: e.config for n, e in table.items()}
    assert tables.render(header | {"schema": 2}, lines) == text


def test_nothing_is_pickled():
    for path in Path(store.__file__).parent.parent.rglob("*.py"):
        assert "import pickle" not in path.read_text(), path


WRITER = """
import sys
from liger_hw.autotune import store
from liger_hw.backends import LaunchConfig
from liger_hw.registry import Entry
from tests.autotune.fakes import H200
number = int(sys.argv[1])
for turn in range(10):
    config = LaunchConfig({"BLOCK_SIZE": 4096, "ROWS": 1}, 1 << (turn % 5), vendor={"pad": "x" * 400})
    lines = [(("rms_norm", "fwd", (4096, turn, key)), Entry(config, {"kind": "measured"})) for key in (0, number)]
    assert store.add(H200, lines)
    _, lines, problems = store.load(store.file_of(H200))
    assert not problems and all(len(one.config.vendor["pad"]) == 400 for _, one in lines)
"""


def test_processes_that_write_at_once_lose_nothing(clean_registry, tmp_path):
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "LIGER_HW_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", WRITER]
    running = [subprocess.Popen([*command, str(number)], env=environment) for number in range(1, 7)]
    assert [process.wait() for process in running] == [0] * 6
    names = {name for name, _ in store.lines_of(H200)}
    assert names == {("rms_norm", "fwd", (4096, turn, key)) for turn in range(10) for key in range(7)}
    assert {p.name for p in store.file_of(H200).parent.iterdir()} == {".lock", store.file_of(H200).name}
