"""Mistakes in variables and arguments: each gives one message that names it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from liger_hw import env, registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.cli import main

CONFIG = LaunchConfig({"BLOCK_SIZE": 1024, "ROWS": 1}, 4)
KEY = (1024, 3, 2)
SM90, GFX942 = known_target("sm90"), known_target("gfx942")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: registry.override(3, CONFIG), "scope must be the name of an op or variant.*got int: 3"),
        (lambda: registry.override("rms_norm", {"num_warps": 4}), "config must be a LaunchConfig .*got dict"),
        (lambda: registry.pretend("sm90"), "target must be a Target .*got str: 'sm90'"),
        (lambda: registry.explain(None, (8, 8), torch.float32), "op must be the name of an op, got NoneType"),
        (lambda: registry.explain("rms_norm", 8, torch.float32), "shape must be a tuple of sizes, got int"),
        (lambda: registry.explain("rms_norm", (8, "8"), torch.float32), "each size must be an int, got str"),
        (lambda: registry.explain("rms_norm", (8, 8), "bf16"), "dtype must be a torch.dtype.*got str: 'bf16'"),
        (lambda: registry.explain("rms_norm", (8, 8), torch.float32, 0), "device must be a torch device.*got int: 0"),
        (lambda: registry.set_deterministic("no"), "on must be True, False or None, got str"),
    ],
)
def test_another_type_is_named(clean_registry, call, said):
    with pytest.raises(TypeError, match=said):
        held = call()
        if hasattr(held, "__enter__"):
            with held:
                pass
    assert not registry.overrides() and registry.pretended() is None


def test_values_no_configuration_has_are_named(clean_registry):
    with pytest.raises(ValueError, match="num_warps must be an integer, got '4'"):
        with registry.override("rms_norm", LaunchConfig({"BLOCK_SIZE": 1024}, "4")):
            pass
    with pytest.raises(ValueError, match="sizes are positive"):
        registry.explain("rms_norm", (0, 8), torch.float32)


def test_contexts_may_end_in_any_order(clean_registry):
    """As in generators and threads: of the open ones the last opened counts."""
    tunable = registry.get_op("rms_norm").tunables[0]
    device = torch.device("cpu")

    def arch():
        return tunable.plan(device, KEY).target.arch

    one, two, same = registry.pretend(SM90), registry.pretend(GFX942), registry.pretend(SM90)
    one.__enter__(), two.__enter__(), same.__enter__()
    assert arch() == "sm90"
    one.__exit__(None, None, None)
    assert arch() == "sm90"
    same.__exit__(None, None, None)
    assert arch() == "gfx942"
    two.__exit__(None, None, None)
    assert arch() == "cpu" and registry.pretended() is None

    first, second = registry.override("rms_norm", CONFIG), registry.override("rms_norm", CONFIG)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert tunable.plan(device, KEY).layer == "explicit"
    second.__exit__(None, None, None)
    assert tunable.plan(device, KEY).layer == "heuristic"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LIGER_HW_DETERMINSTIC", "did you mean LIGER_HW_DETERMINISTIC?"),
        ("LIGER_HW_CONFIG_RMS_NROM", "did you mean LIGER_HW_CONFIG_RMS_NORM?"),
        ("LIGER_HW_CONFIG_RMS_NROM__FWD", "did you mean LIGER_HW_CONFIG_RMS_NORM__FWD?"),
        ("LIGER_HW_ZZZ", "means nothing"),
    ],
)
def test_a_variable_that_means_nothing_is_warned_of_once(clean_registry, monkeypatch, caplog, name, said):
    monkeypatch.setenv(name, "1")
    registry.reload()
    with caplog.at_level(logging.WARNING, "liger_hw"):
        assert not env.LIGER_HW_DISABLE_SHIPPED and not env.LIGER_HW_DETERMINISTIC
    (warning,) = [r.getMessage() for r in caplog.records]
    assert name in warning and said in warning


def test_a_variant_that_no_op_has_is_warned_of_once(clean_registry, monkeypatch, caplog):
    monkeypatch.setenv("LIGER_HW_CONFIG_RMS_NORM__FORWARD", CONFIG.to_text())
    registry.reload()
    with caplog.at_level(logging.WARNING, "liger_hw"):
        for tunable in registry.get_op("rms_norm").tunables[:2]:
            assert tunable.plan(torch.device("cpu"), KEY).layer == "heuristic"
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "LIGER_HW_CONFIG_RMS_NORM__FORWARD" in warning and "fwd, bwd" in warning


def test_a_known_configuration_variable_is_not_warned_of(clean_registry, monkeypatch, caplog):
    monkeypatch.setenv("LIGER_HW_CONFIG_RMS_NORM", CONFIG.to_text())
    monkeypatch.setenv("LIGER_HW_CONFIG_RMS_NORM__BWD", CONFIG.to_text())
    registry.reload()
    with caplog.at_level(logging.WARNING, "liger_hw"):
        assert env.LIGER_HW_DISABLE_SHIPPED is False
    assert not caplog.records and env.unknown() == []


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e300", "soon"])
def test_a_time_that_no_clock_counts_is_refused(clean_registry, monkeypatch, text):
    monkeypatch.setenv("LIGER_HW_SYNC_SECONDS", text)
    registry.reload()
    with pytest.raises(env.SettingError, match=f"LIGER_HW_SYNC_SECONDS='{text}': expected a number of seconds"):
        _ = env.LIGER_HW_SYNC_SECONDS


def test_a_folder_that_cannot_be_looked_at_is_no_crash(clean_registry, monkeypatch, tmp_path, caplog):
    """stat fails for a name that is too long, as for another user's folder."""
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / ("a" * 300)))
    registry.reload()
    assert main(["explain", "rms_norm", "--shape", "8x8", "--device", "sm90"]) == 0
    assert main(["cache", "list"]) == 2  # one line that says why, not "nothing is stored"
    assert any("cannot be read" in r.getMessage() for r in caplog.records)


def test_a_bad_value_is_reported_wherever_it_would_be_used(clean_registry, monkeypatch, capsys):
    """On a CPU too, which needs no chunks, and at import, before the first step."""
    monkeypatch.setenv("LIGER_HW_LOSS_MEMORY_MIB", "2GiB")
    registry.reload()
    with pytest.raises(
        env.SettingError,
        match="LIGER_HW_LOSS_MEMORY_MIB='2GiB': expected a positive number of MiB.* a fused linear loss",
    ):
        _ = env.LIGER_HW_DISABLE_SHIPPED
    assert main(["explain", "rms_norm", "--shape", "8x8", "--device", "sm90"]) == 2
    assert "LIGER_HW_LOSS_MEMORY_MIB='2GiB'" in capsys.readouterr().err
    code = "from liger_hw.kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy"
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode and "LIGER_HW_LOSS_MEMORY_MIB='2GiB'" in done.stderr
