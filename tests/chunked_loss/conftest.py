"""Uninitialised memory holds NaN here too, and a configuration that fails is a failed test."""

import pytest

from tests.kernels.conftest import poisoned_memory  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def _no_failed_configuration(no_failed_configuration):
    """Every test here."""
