"""`interpreting.faster` changes nothing that a kernel computes, and hides no error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import python

HERE = Path(__file__).resolve().parent

SCRIPT = """
import sys
import interpreting
import pytest
import torch
import triton
import triton.language as tl

if sys.argv[1] == "faster":
    interpreting.faster(pytest.MonkeyPatch())


@triton.jit
def kernel(X, Y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(X + i, mask=i < n, other=0)
    square = (x * 5)[:, None] + i[None, :]
    tl.store(Y + i, x * 5, mask=i < n)
    tl.store(Y + B + i, x.to(tl.int8) + x.to(tl.int8), mask=i < n)
    tl.store(Y + 2 * B + i, (x.to(tl.uint32) - 5).to(tl.int64), mask=i < n)
    tl.store(Y + 3 * B + i, x // 3 + x % 3, mask=i < n)
    tl.store(Y + 4 * B + i, tl.sum(tl.trans(tl.reshape(tl.reshape(square, [B * B]), [B, B])), 0), mask=i < n)
    tl.store(Y + 5 * B + i, tl.cumsum(x, 0) + tl.argmax(x, 0), mask=i < n)
    small = tl.where(i[:, None] < i[None, :], 1, square.to(tl.float16) * 0.5)
    tl.store(Y + 6 * B + i, tl.sum(tl.dot(small, small), 1).to(tl.int64, bitcast=False), mask=i < n)


@triton.jit
def misfit(X, A: tl.constexpr, B: tl.constexpr):
    tl.store(X + tl.arange(0, A), tl.load(X + tl.arange(0, A)) + tl.arange(0, B))


@triton.jit
def wider_than_its_pointers(X):
    tl.store(X + tl.arange(0, 16), tl.load(X + tl.arange(0, 16))[None, :])


@triton.jit
def not_a_power_of_two(X):
    tl.store(X + tl.arange(0, 12), 1)


x = torch.tensor([2**30, -(2**31), 100, 127, -128, 3, 7, 2**31 - 1, 0, 1, 2, 3, 4, 5, 6, 9], dtype=torch.int32)
y = torch.zeros(7 * 16, dtype=torch.int64)
kernel[(1,)](x, y, 15, 16)
print(y.tolist())
for wrong, sizes in ((misfit, (16, 8)), (wider_than_its_pointers, ()), (not_a_power_of_two, ()), (misfit, (16, 8))):
    try:
        wrong[(1,)](x, *sizes)
    except Exception as error:
        print(error)
"""


def test_faster_computes_and_refuses_the_same(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    printed = [python(script, how, env=environment) for how in ("plain", "faster")]
    numbers, *errors = printed[0].splitlines()
    assert numbers.startswith(f"[{5 * 2**30 - 2**32}, {2**31 - 2**32}, 500,"), "int32 does not wrap"
    assert len(errors) == 4
    assert printed[1] == printed[0]
