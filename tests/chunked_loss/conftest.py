"""Uninitialised memory holds NaN here too, and a configuration that fails is a failed test."""

from kernels.conftest import no_failed_configuration, poisoned_memory  # noqa: F401  fixtures
