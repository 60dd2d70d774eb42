"""The minimal op file of docs/adding-an-op.md runs: its kernels, in the interpreter, agree with its reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHECK = """
import sys
import torch
import liger_hw.kernels.pointwise as family

family.__path__.append(sys.argv[1])
from liger_hw.autotune.check import against_reference
from liger_hw.kernels.pointwise import softsign

for sizes in ((3, 7), (5, 1024)):
    wrong = against_reference(softsign.OP, sizes, torch.float32, torch.device("cpu"))
    assert not wrong, wrong
sample = softsign.OP.sample((3, 7), torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
sample.args[0].data[0] = torch.nan
assert softsign.liger_softsign(sample.args[0])[0].isnan().all()
for call in (
    lambda: softsign.liger_softsign(torch.ones(3, dtype=torch.int64)),
    lambda: softsign.SoftsignFunction.apply(torch.ones(3, dtype=torch.int64)),
    lambda: torch.ops.liger_hw.softsign_bwd(torch.ones(1, 8), torch.ones(4, 8)),
):
    try:
        call()
    except ValueError as error:
        assert str(error).startswith("liger_softsign"), error
    else:
        raise AssertionError("not refused")
print("agree")
"""


def run(folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LIGER_HW_INTERPRET": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", CHECK, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_minimal_file_runs_and_a_wrong_kernel_is_found(tmp_path):
    pytest.importorskip("triton")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-an-op.md").read_text(), re.DOTALL)
    (tmp_path / "softsign.py").write_text(code)
    right = run(tmp_path)
    assert right.stdout.strip() == "agree", right.stderr[-2000:]
    assert code.count("y = x / (1.0 + tl.abs(x))") == 1
    (tmp_path / "softsign.py").write_text(code.replace("y = x / (1.0 + tl.abs(x))", "y = x / (1.01 + tl.abs(x))"))
    assert "AssertionError: result 0: relative error" in run(tmp_path).stderr
