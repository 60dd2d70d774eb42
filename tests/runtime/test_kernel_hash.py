"""A kernel's identity follows what it computes, not how it is written."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from liger_hw.runtime import kernel_hash as subject

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
        return subject.kernel_hash((module.kernel,))

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
def test_a_change_of_words_keeps_the_hash(hashed, old, new):
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
        assert subject.kernel_hash(kernels) == tunable.kernel_hash(), tunable.name
