"""The registry on top of the store: every layer, what fails at launch, quiet times, forks, threads, two devices."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from liger_hw import env, files, registry
from liger_hw.autotune import compile as aot
from liger_hw.autotune import lock, store
from liger_hw.backends import known_target
from liger_hw.cli import main
from tests.autotune.fakes import H200, entry, other_config, ship, tunable

KEY = (4096, 13, 2)
NAME = ("rms_norm", "fwd", KEY)
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_ships(tmp_path):
    """No table ships; this patch is undone after those of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "shipped_folder", lambda vendor: tmp_path / "nothing-ships")
        yield
    registry.reload()


@pytest.fixture
def h200(clean_registry, caplog):
    """Every device is an H200; the user cache is empty and nothing ships."""
    caplog.set_level(logging.WARNING, logger="liger_hw")
    tunable()
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs
        patch.setattr(registry, "target_of", lambda device: H200)
        yield clean_registry


def put(layer: str, config, monkeypatch, tmp_path: Path) -> None:
    """Make `layer` answer `config` for NAME."""
    fwd = tunable()
    made = entry(config, fwd)
    if layer == "lock":
        lock.write(tmp_path / "liger-hw.lock", {NAME: made}, {})
        monkeypatch.setenv("LIGER_HW_LOCK_FILE", str(tmp_path / "liger-hw.lock"))
    elif layer == "user":
        store.add(H200, [(NAME, made)])
    elif layer.startswith("shipped"):
        stems = {"shipped-device": "sm90-nvidia-h200", "shipped-arch": "sm90", "shipped-family": "sm90-other-device"}
        ship(monkeypatch, tmp_path, stems[layer], {NAME: made})
    elif layer == "explicit":
        monkeypatch.setenv("LIGER_HW_CONFIG_RMS_NORM__FWD", config.to_text())
    registry.reload()


@pytest.mark.parametrize("layer", registry.LAYERS[:6])
def test_a_config_that_fails_at_launch_is_set_aside_in_every_layer(h200, layer, monkeypatch, tmp_path, caplog):
    fwd = tunable()
    config = next(c for c in fwd.space(H200, KEY) if c not in (fwd.heuristic(H200, KEY), fwd.safe(H200, KEY)))
    put(layer, config, monkeypatch, tmp_path)
    plan = fwd.plan(DEVICE, KEY)
    assert (plan.layer, plan.config) == (layer, config)
    assert registry.quarantine(plan, RuntimeError("out of resource: shared memory"))
    following = fwd.plan(DEVICE, KEY)
    assert following.layer == "heuristic"
    said = [r.getMessage() for r in caplog.records if "quarantined" in r.getMessage()]
    assert len(said) == 1 and config.to_text() in said[0] and "rms_norm.fwd" in said[0] and "shared memory" in said[0]
    # another process: nothing in memory, the file says it
    registry.reset()
    assert fwd.plan(DEVICE, KEY).layer == "heuristic"
    shown = registry.explain("rms_norm", (8192, 4096), torch.bfloat16, H200)[0]
    assert any(c.layer == layer and "shared memory" in c.rejected for c in shown.candidates)
    assert fwd.plan(DEVICE, (4096, 14, 2)).layer != layer or layer == "explicit", "other keys are untouched"


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("too many blocks in cooperative launch")]
)
def test_the_machine_is_not_held_against_a_config(h200, error):
    fwd = tunable()
    plan = fwd.plan(DEVICE, KEY)
    assert registry.quarantine(plan, error)
    assert not store.lines_of(H200)


def test_quarantine_ends_with_the_kernel_or_the_compiler(h200, monkeypatch):
    fwd = tunable()
    registry.quarantine(fwd.plan(DEVICE, KEY), RuntimeError("x"))
    registry.reset()
    assert fwd.plan(DEVICE, KEY).layer == "safe"
    monkeypatch.setattr(store, "triton_version", lambda: "99.0.0")
    registry.reload()
    assert fwd.plan(DEVICE, KEY).layer == "heuristic"
    monkeypatch.undo()
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(store.root()))
    monkeypatch.setattr(fwd, "version", 99)
    registry.reload()
    assert fwd.plan(DEVICE, KEY).layer == "heuristic"


def test_misses_are_written_at_exit_not_before(h200):
    tunable().plan(DEVICE, KEY)
    assert not store.file_of(H200).exists()
    store.flush()
    assert store.misses(H200) == [NAME]


def test_what_is_pretended_leaves_no_trace_in_the_cache(clean_registry):
    fwd = tunable()
    with registry.pretend(H200):
        assert registry.quarantine(fwd.plan(DEVICE, KEY), RuntimeError("PTXAS error"))
        assert fwd.plan(DEVICE, KEY).layer == "safe"
        store.flush()
    store.flush()
    assert not store.file_of(H200).exists()


def test_nothing_is_opened_while_a_graph_is_captured(h200, monkeypatch, tmp_path):
    fwd = tunable()
    config = fwd.safe(H200, KEY)
    store.add(H200, [(NAME, entry(config, fwd))])
    registry.reload()
    registry.forced_config(fwd)  # what the first ordinary launch reads
    assert not registry.env.LIGER_HW_DETERMINISTIC and registry.env.LIGER_HW_FAST_LAUNCH
    opened: list[str] = []
    monkeypatch.setattr(registry, "is_capturing_or_tracing", lambda: True)
    for module, name in ((os, "open"), (Path, "open"), (files, "read_text"), (files, "locked"), (os, "replace")):
        monkeypatch.setattr(
            module, name, lambda *a, _n=name, **k: opened.append(_n) or (_ for _ in ()).throw(OSError(_n))
        )
    reads = []
    monkeypatch.setattr(
        registry.env.os.environ.__class__, "get", lambda self, key, default=None: reads.append(key) or default
    )
    plan = fwd.plan(DEVICE, KEY)
    assert plan.layer == "heuristic" and not opened and not reads
    assert registry.quarantine(plan, RuntimeError("failed during capture")) and not opened
    monkeypatch.undo()
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / "cache"))
    assert fwd.plan(DEVICE, KEY).layer == "user", "the tables answer as soon as they may be read"


@pytest.mark.parametrize("shipped", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layer", ["lock", "user", "shipped-arch"])
def test_a_trace_asks_the_tables_it_is_told_to(h200, layer, shipped, own, monkeypatch, tmp_path):
    config = other_config(tunable(), H200, KEY)
    put(layer, config, monkeypatch, tmp_path)
    asked = shipped if layer == "shipped-arch" else own
    launch = aot.trace("rms_norm", (8192, 4096), torch.bfloat16, H200, shipped=shipped, user=own)[0]
    assert launch.key == KEY and (launch.config == config) is asked
    assert launch.layer == (layer if asked else "heuristic")


def test_compiling_and_capturing_are_noticed(monkeypatch):
    assert not registry.is_capturing_or_tracing()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert registry.is_capturing_or_tracing()
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert registry.is_capturing_or_tracing()


def test_fork_after_import_works(h200):
    fwd = tunable()
    store.add(H200, [(NAME, entry(fwd.safe(H200, KEY), fwd))])
    registry.reload()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, fwd.plan(DEVICE, KEY).layer.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"user"


def test_two_devices_in_one_process_resolve_by_their_own_target(clean_registry, monkeypatch):
    fwd = tunable()
    devices = {torch.device("cuda", 0): H200, torch.device("cuda", 1): known_target("gfx942")}
    monkeypatch.setattr(registry, "target_of", devices.__getitem__)
    store.add(H200, [(NAME, entry(fwd.safe(H200, KEY), fwd))])
    registry.reload()
    nvidia, amd = (fwd.plan(device, KEY) for device in devices)
    assert (nvidia.layer, amd.layer) == ("user", "heuristic")
    assert nvidia.target.warp_size == 32 and amd.target.warp_size == 64
    assert fwd.plan(torch.device("cuda", 0), KEY) is nvidia


@pytest.mark.parametrize("name", ["rms_norm.fwd", "rms_norm.bwd", "swiglu.fwd", "cross_entropy.fwd"])
def test_deterministic_makes_two_caches_compute_the_same_bits(h200, name):
    """With each configuration of the space in the table, the options that may change bits are the heuristic's."""
    of = tunable(name)
    key = of.key(8192, 4096, 2)
    heuristic = of.heuristic(H200, key)
    registry.set_deterministic(True)
    try:
        for config in list(of.space(H200, key))[::7]:
            registry.set_table(H200, {(of.op, of.variant, key): [replace(entry(config, of), layer="user")]})
            chosen = of.plan(DEVICE, key).config
            for knob in ("num_warps", "num_stages", "ctas_per_mp", "hint", "vendor"):
                if knob not in of.neutral:
                    assert getattr(chosen, knob) == getattr(heuristic, knob), knob
            for block, size in chosen.blocks.items():
                assert size == (config if block in of.neutral else heuristic).blocks[block]
    finally:
        registry.set_deterministic(None)


class TestLock:
    def test_it_pins_heuristics_too_and_survives_tuning(self, h200, monkeypatch, tmp_path):
        fwd = tunable()
        plan = fwd.plan(DEVICE, KEY)
        mark = lock.save(tmp_path / "liger-hw.lock")
        monkeypatch.setenv("LIGER_HW_LOCK_FILE", str(tmp_path / "liger-hw.lock"))
        store.add(H200, [(NAME, entry(fwd.safe(H200, KEY), fwd))])
        registry.reload()
        again = fwd.plan(DEVICE, KEY)
        assert (again.layer, again.config) == ("lock", plan.config)
        header, table = lock.read(tmp_path / "liger-hw.lock")
        assert header["digest"] == mark == lock.digest(table)

    def test_saving_before_the_first_launch_is_warned_of(self, h200, tmp_path, caplog):
        lock.save(tmp_path / "early.lock")
        assert "nothing was launched so far" in caplog.text and "pins nothing" in caplog.text

    def test_it_answers_on_another_machine_and_for_another_kernel_source(self, h200, monkeypatch, tmp_path):
        fwd = tunable()
        config = fwd.safe(H200, KEY)
        lock.write(
            tmp_path / "l",
            {("rms_norm", "fwd", KEY): lock.pinned(registry.choose(fwd, H200, KEY))}
            | {NAME: replace(entry(config, fwd), version=99)},
            {},
        )
        monkeypatch.setenv("LIGER_HW_LOCK_FILE", str(tmp_path / "l"))
        registry.reload()
        for arch in ("sm80", "sm120"):
            assert registry.choose(fwd, known_target(arch), KEY).config == config

    def test_an_entry_that_is_illegal_on_the_device_is_named(self, h200, monkeypatch, tmp_path):
        """It is an error; the heuristic does not answer in its place."""
        fwd, path = tunable(), tmp_path / "l"
        config = replace(fwd.safe(H200, KEY), vendor={"maxnreg": 64})  # NVIDIA's word
        table = {NAME: entry(config, fwd)}
        lock.write(path, table, {"device": H200.name})
        monkeypatch.setenv("LIGER_HW_LOCK_FILE", str(path))
        registry.reload()
        assert registry.choose(fwd, H200, KEY).layer == "lock"
        assert registry.choose(fwd, known_target("cpu"), KEY).layer == "heuristic"  # nothing is launched there
        for _ in range(2):
            with pytest.raises(env.SettingError, match=r"1 of its 1 entries.*rms_norm.fwd \(4096, 13, 2\): .*maxnreg"):
                registry.choose(fwd, known_target("gfx942"), KEY)

    def test_what_it_pins_is_not_left_out_silently(self, h200, monkeypatch, tmp_path, caplog):
        """An entry of another version stays pinned; there is a warning for one that failed at launch before."""
        fwd, path = tunable(), tmp_path / "l"
        config = other_config(fwd, H200, KEY)
        lock.write(path, {NAME: replace(entry(config, fwd), version=99)}, {})
        monkeypatch.setenv("LIGER_HW_LOCK_FILE", str(path))
        registry.reload()
        chosen = registry.choose(fwd, H200, KEY)
        assert (chosen.layer, chosen.config) == ("lock", config)
        store.add(H200, [(NAME, entry(config, fwd, kind="failed", reason="failed at launch: shared memory"))])
        registry.reload()
        assert registry.choose(fwd, H200, KEY).layer != "lock"
        assert "rms_norm.fwd: lock configuration ignored: failed at launch: shared memory" in caplog.text

    @pytest.mark.parametrize("damage", ["missing", "torn", "edited", "a table"])
    def test_a_bad_one_stops_the_first_launch(self, h200, damage, monkeypatch, tmp_path, capsys):
        """A run that asks for pinned configurations must not go on without them."""
        path, fwd = tmp_path / "l", tunable()
        lock.write(path, {NAME: entry(fwd.safe(H200, KEY), fwd)}, {})
        text = path.read_text()
        if damage == "missing":
            path.unlink()
        else:
            data = json.loads(text)
            data["entries"][0]["config"]["num_warps"] = 1
            changed = {"torn": text[:100], "edited": json.dumps(data), "a table": text.replace('"lock"', '"table"')}
            path.write_text(changed[damage])
        monkeypatch.setenv("LIGER_HW_LOCK_FILE", str(path))
        registry.reload()
        for _ in range(2):  # and every later one
            with pytest.raises(env.SettingError, match="LIGER_HW_LOCK_FILE.*Nothing would be pinned.*unset"):
                fwd.plan(DEVICE, KEY)
        assert main(["explain", "rms_norm", "--shape", "8x8", "--device", "sm90"]) == 2
        assert "LIGER_HW_LOCK_FILE" in capsys.readouterr().err
        words = ("--model", "mistral-7b", "--ops", "rms_norm", "--seq", "64", "--device", "sm90", "--force")
        assert main(["lock", *words, "-o", str(path)]) == 0  # what repairs it
        registry.reload()
        assert registry.explain("rms_norm", (64, 4096), torch.bfloat16, "sm90")[0].chosen.layer == "lock"
