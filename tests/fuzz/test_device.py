"""What runs on a GPU alone does what it says: the sweep launches every kernel, its memory ends at 16 bytes, a soak's
pieces are one record. `bash benchmarks/faults.sh` runs it there."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch

from liger_hw import registry
from liger_hw.autotune import compile as ahead
from liger_hw.backends import known_target
from tests.fuzz import soak, sweep


@pytest.mark.lanes("cpu")
def test_the_sweep_launches_every_kernel_of_an_op_on_an_h200(lane, op):
    """Traced for the described device: nothing runs."""
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
"""A CUDA runtime that has host memory."""


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
"""In a process of its own: a torch that was built for CUDA brings the names of the real runtime."""


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


def _piece(number: int, calls: int, rows: int, host_mib: float, **more) -> dict:
    points = [{"host_mib": host_mib - 1, "allocated_mib": 8.0}, {"host_mib": host_mib, "allocated_mib": 8.0}]
    grown = {"host_growth_mib": 1.0, "host_growth_of_second_half_mib": 1.0, "device_growth_mib": 0.0}
    return {
        **{"piece": number, "finished": True, "held": True, "points": points, "seconds": 480, "calls": calls},
        **{"rows": {"rms_norm": hex(rows)}, **grown, **more},
    }


def test_pieces_of_a_soak_are_one_record():
    found = soak.record([_piece(0, 10, 0b0111, 900.0), _piece(1, 20, 0b1110, 901.5)])
    assert found["held"] and (found["seconds"], found["calls"], found["shapes"]) == (960, 30, 4)
    assert found["host_growth_across_pieces_mib"] == 1.5
    assert not soak.record([_piece(0, 10, 1, 900.0), _piece(1, 10, 1, 900.0 + soak.HOST_MIB)])["held"]
    assert not soak.record([_piece(0, 10, 1, 900.0, held=False), _piece(1, 10, 1, 900.0)])["held"]


def test_a_piece_that_was_cut_is_done_again(tmp_path, monkeypatch):
    state = tmp_path / "soak.json"
    done, cut = _piece(0, 10, 1, 900.0), _piece(1, 5, 2, 900.0, finished=False, held=False)
    state.write_text(json.dumps({"pieces": [done, cut]}))
    asked = []

    def run_piece(number, seconds, dry, keep):
        asked.append(number)
        return _piece(number, 20, 4, 900.0)

    monkeypatch.setattr(soak, "run_piece", run_piece)
    found = soak.soak(argparse.Namespace(state=str(state), seconds=480.0, dry=False), lambda found: None)
    assert asked == [1] and found["held"] and found["calls"] == 30
    assert json.loads(state.read_text()) == found
