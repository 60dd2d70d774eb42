"""Parts of tests/fuzz/device.py that can be tested without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import shutil
import subprocess
import sys

import pytest
import torch

from liger_hw import registry
from liger_hw.autotune import compile as ahead
from liger_hw.backends import known_target
from tests.fuzz import sweep


@pytest.mark.lanes("cpu")
def test_the_sweep_launches_every_kernel_of_an_op_on_an_h200(lane, op):
    left = {tunable.name for tunable in op.tunables}
    for _, sizes, dtype, options in sweep.cases([op]):
        left -= {launch.tunable for launch in ahead.trace(op.name, sizes, dtype, known_target("h200"), options)}
        if not left:
            break
    assert not left


def test_a_nan_behind_a_tensor_that_reaches_a_result_is_a_failure():
    op = registry.get_op("relu_squared")
    wrong = dataclasses.replace(op, function=lambda x: torch.where(x == x.flatten()[0], math.nan, x))
    case = (op, (3, 5), torch.float32, {})
    sweep.run_case(case, "cpu")
    with pytest.raises(AssertionError, match="result 0: 1 of 15 are NaN"):
        sweep.run_case((wrong, *case[1:]), "cpu")


_RUNTIME = """
#include <stdlib.h>
#include <string.h>
int cudaMalloc(void **p, size_t n) { *p = calloc(n + 16, 1); return 0; }
int cudaMemsetAsync(void *p, int value, size_t n, void *stream) { memset(p, value, n); return 0; }
int cudaFree(void *p) { free(p); return 0; }
"""
"""A CUDA runtime with host memory."""


_ALLOCATE = """
import ctypes, sys

library = ctypes.CDLL(sys.argv[1])
library.rounded_malloc.restype = ctypes.c_void_p
library.rounded_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
for size, whole in ((1, 16), (16, 16), (61 * 4, 256)):
    memory = ctypes.string_at(library.rounded_malloc(size, 0, None), whole + 16)
    assert memory == b"\\xff" * whole + b"\\0" * 16, (size, memory)
assert library.rounded_malloc(0, 0, None) is None
"""
"""Run in another process, since a torch for CUDA has loaded the real runtime's names."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")
def test_memory_for_the_checker_ends_at_16_bytes_and_is_nan(tmp_path):
    (tmp_path / "runtime.c").write_text(_RUNTIME)
    runtime = tmp_path / "libruntime.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "runtime.c"), "-o", str(runtime)], check=True)
    ctypes.CDLL(str(runtime))
    assert sweep.loaded_library("libruntime.so") == str(runtime)
    library = sweep.build_allocator(tmp_path, str(runtime))
    subprocess.run([sys.executable, "-c", _ALLOCATE, str(library)], check=True)
    with pytest.raises(RuntimeError, match="has not loaded libnothing"):
        sweep.loaded_library("libnothing.so")
