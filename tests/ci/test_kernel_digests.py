"""A kernel does not change unnoticed: its digest follows what it computes, not how it is written."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest

from ci import kernel_digests as subject
from liger_hw import registry
from liger_hw.autotune import store, tables
from liger_hw.backends import VENDORS

ROOT = Path(__file__).resolve().parents[2]

PLAIN = """
LIMIT = 4

def _scale(value, factor):
    return value * factor

def kernel(X_ptr, n_cols, BLOCK: "tl.constexpr"):
    x = X_ptr + n_cols
    return _scale(x, LIMIT) + BLOCK
"""

_numbers = itertools.count()


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """The hash of `kernel` in a module with the given text."""

    def of(text: str) -> str:
        path = tmp_path / f"made_up_{next(_numbers)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"liger_hw.{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return subject.digest((module.kernel,))

    return of


@pytest.mark.parametrize(
    "old, new",
    [
        ("    x = X_ptr + n_cols\n    return _scale(x,", "    total = X_ptr + n_cols\n    return _scale(total,"),
        ("_scale", "multiplied"),
        ("LIMIT", "FACTOR"),
        ("n_cols", "width"),
        ("    x = X_ptr", '    """Say what."""\n    x  =  X_ptr'),
        ("    return value * factor", "    return  value * factor  # why"),
        ("_scale(x, LIMIT)", "_scale(x, factor=LIMIT)"),
        ("def _scale(value, factor)", "def _scale(value: int, factor: int) -> int"),
    ],
)
def test_a_change_of_words_keeps_the_digest(hashed, old, new):
    assert hashed(PLAIN.replace(old, new)) == hashed(PLAIN)


@pytest.mark.parametrize(
    "old, new",
    [
        ("value * factor", "value + factor"),
        ("LIMIT = 4", "LIMIT = 5"),
        ("X_ptr, n_cols, BLOCK", "n_cols, X_ptr, BLOCK"),
        (' BLOCK: "tl.constexpr"', " BLOCK"),
        ("_scale(x, LIMIT)", "_scale(LIMIT, x)"),
    ],
)
def test_a_change_of_the_computation_changes_it(hashed, old, new):
    assert old in PLAIN
    assert hashed(PLAIN.replace(old, new)) != hashed(PLAIN)


def test_a_helper_that_is_reached_need_not_be_listed(op):
    for tunable in op.tunables:
        kernels = [kernel for kernel in tunable.kernels if kernel.fn.__name__.endswith("_kernel")]
        assert subject.digest(kernels) == subject.digest(tunable.kernels), tunable.name


def test_no_kernel_changed_without_a_decision_about_its_version():
    changed = subject.changed(subject.recorded(), registry.tunables().values())
    assert not changed, (
        f"the code of {', '.join(changed)} has changed since its digest was recorded. Where configurations measured "
        "for the earlier code may no longer be the best, raise `version=` in its Tunable (its stored entries are then "
        f"no longer used, and are to be measured again). In any case record the new digest: {subject.COMMAND}"
    )


def test_every_kernel_with_a_shipped_entry_is_recorded():
    paths = [path for vendor in VENDORS for path in store.shipped_folder(vendor).glob("*.json")]
    stored = {f"{op}.{variant}" for path in paths for (op, variant, _), _ in tables.load(path)[1]}
    missing = stored - subject.recorded().keys()
    assert not missing, f"record the digests of {sorted(missing)}: {subject.COMMAND}"


def test_a_change_is_noticed_until_the_version_or_the_record_follows(monkeypatch):
    tunable = registry.get_tunable("rms_norm.fwd")
    now = subject.current([tunable])
    earlier = {tunable.name: {**now[tunable.name], "digest": "0" * 16}}
    assert subject.changed(now, [tunable]) == [] and subject.changed({}, [tunable]) == []
    assert subject.changed(earlier, [tunable]) == [tunable.name]
    monkeypatch.setattr(tunable, "version", tunable.version + 1)
    assert subject.changed(earlier, [tunable]) == []
