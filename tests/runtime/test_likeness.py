"""Launches are alike for our launcher exactly where Triton compiles one kernel for them."""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_hw.autotune.compile import driver_stub
from liger_hw.kernels.losses.cross_entropy_rows import _cross_entropy_fwd_kernel, _cross_entropy_stats_kernel
from liger_hw.kernels.rotary.rotary_kernels import AngleStrides, Strides, _rotary_kernel
from liger_hw.runtime.launch import compile_key

compiler = pytest.importorskip("triton.backends.compiler")

BEGINS = (0, 1, 2, 16)  # elements into an allocation
NUMBERS = (1, 7, 16, 1 << 33)


def _stats(begin: int, n_rows: int, n_cols: int, ignore_index: int) -> tuple:
    labels, stats, ok = torch.empty(64, dtype=torch.int64)[begin:], torch.empty(5), torch.empty(1, dtype=torch.int32)
    return labels, None, stats, ok, n_rows, n_cols, ignore_index


def _fwd(begin: int, row_stride: int, n_cols: int, ignore_index: int) -> tuple:
    labels, x = torch.empty(64, dtype=torch.int64)[begin:], torch.empty(8, 8, dtype=torch.bfloat16)
    tensors = x, labels, None, None, torch.empty(5), None, torch.empty(8), None, None, x
    return *tensors, row_stride, row_stride, n_cols, ignore_index


def _rotary(begin: int, batch_stride: int, token_stride: int, n_q_heads: int) -> tuple:
    x = torch.empty(64, dtype=torch.bfloat16)[begin:]
    strides = Strides(batch_stride, 16, token_stride)
    none = Strides(0, 0, 0)
    return x, None, x, x, x, None, strides, none, strides, none, AngleStrides(0, 1), 7, 7, n_q_heads, 0


@pytest.mark.parametrize(
    "kernel, arguments",
    [(_cross_entropy_stats_kernel, _stats), (_cross_entropy_fwd_kernel, _fwd), (_rotary_kernel, _rotary)],
)
def test_alike_is_what_triton_specialises_alike(kernel, arguments):
    def specialised(args: tuple) -> str:
        constants = (0,) * (len(kernel.params) - len(args))
        with driver_stub(compiler.GPUTarget("cuda", 90, 32), "likeness") as stub:
            binder = kernel.device_caches[stub.get_current_device()][-1]
            return str(binder(*args, *constants)[1])

    calls = [arguments(*values) for values in itertools.product(BEGINS, NUMBERS, NUMBERS, (-100, 1))]
    alike: dict[tuple, set[str]] = {}
    for args in calls:
        alike.setdefault(compile_key(kernel, args, ()), set()).add(specialised(args))
    assert all(len(found) == 1 for found in alike.values())
    assert len(alike) == len(set().union(*alike.values())) > 1


def test_labels_of_one_sequence_launch_the_kernel_of_a_batchs():
    """Shifted by one, they begin 8 bytes into an allocation where no copy makes them contiguous."""
    assert len({compile_key(_cross_entropy_fwd_kernel, _fwd(begin, 64, 64, -100), ()) for begin in BEGINS}) == 1
