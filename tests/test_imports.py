"""Importing the package loads no Triton and no transformers, makes no GPU context, and survives a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError("No module named " + repr(name) + " (blocked by the test)", name=name)
sys.meta_path.insert(0, Blocked())
"""


def _python(code: str, *blocked: str, **environment: str) -> str:
    """What code prints in a new interpreter in which some packages cannot be imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LIGER_HW_", "TRITON_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    prefix = BLOCK.format(names=set(blocked)) if blocked else ""
    done = subprocess.run([sys.executable, "-c", prefix + code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_import_is_light_and_makes_no_context():
    """No Triton, no transformers; after everything is imported and resolved for a described device, no GPU runtime in
    torch is initialised."""
    code = """
import sys, liger_hw
assert not {"triton", "transformers"} & set(sys.modules)
for name in dir(liger_hw):
    getattr(liger_hw, name)
import torch
from liger_hw import registry
for op in registry.ops().values():
    registry.explain(op.name, next(iter(op.workloads.values())), torch.bfloat16, "gfx942")
print(torch.cuda.is_initialized(), torch.xpu.is_initialized())
"""
    assert _python(code) == "False False"


def test_without_triton_ops_run_their_reference_and_a_launch_says_what_to_install():
    code = """
import importlib
for module in ("liger_hw.registry", "liger_hw.backends", "liger_hw.cli", "liger_hw.autotune.store"):
    importlib.import_module(module)
import torch
from liger_hw import registry
from liger_hw.runtime import triton_import
for op in registry.ops().values():
    sizes = tuple(min(n, 8) for n in next(iter(op.workloads.values())))
    sample = op.sample(sizes, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    op.function(*sample.args, **sample.kwargs)
try:
    triton_import.require()
except ImportError as error:
    print(len(registry.ops()), error)
"""
    count, message = _python(code, "triton", "transformers").split(" ", 1)
    assert int(count) >= 6 and "need Triton" in message and "liger_hw[rocm]" in message


@pytest.mark.parametrize(
    ("package", "version", "use", "message"),
    [
        ("torch", "2.7.1", "import liger_hw; liger_hw.patch", "needs torch 2.8 or newer, this is 2.7.1"),
        ("triton", "3.3.1", "from liger_hw.runtime.triton_import import *; require()", "need Triton 3.4 or newer"),
    ],
)
def test_an_older_release_is_refused_by_its_version(package, version, use, message):
    pytest.importorskip(package)
    pretend = f"import {package} as old; old.__version__ = type(old.__version__)({version!r})"
    code = f"{pretend}\ntry:\n    {use}\nexcept ImportError as error:\n    print(error)"
    assert message in _python(code)


def test_kernels_have_the_same_digests_without_triton(monkeypatch):
    pytest.importorskip("triton")
    code = "import kernel_digests; print(kernel_digests.current(kernel_digests.registry.tunables().values()))"
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import kernel_digests

    here = kernel_digests.current(kernel_digests.registry.tunables().values())
    assert _python(f"import sys; sys.path.insert(0, 'ci'); {code}", "triton") == str(here)


def test_fork_safe():
    """A forked child computes with the parent's registry; on a GPU machine it may still start its own context."""
    code = """
import os, torch
from liger_hw import registry
op = registry.get_op("rms_norm")
def run(device):
    sample = op.sample((3, 8), torch.float32, torch.device(device), torch.Generator(device).manual_seed(0))
    return float(op.function(*sample.args).sum())
here = run("cpu")
pid = os.fork()
if pid == 0:
    ok = run("cpu") == here
    if torch.cuda.device_count():
        run("cuda")
    os._exit(0 if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), torch.cuda.is_initialized())
"""
    assert _python(code) == "0 False"


def test_interpreter_is_asked_for_by_environment():
    code = "from liger_hw import registry; print(registry.interpreting())"
    assert _python(code) == "False"
    assert _python(code, LIGER_HW_INTERPRET="1") == "True"
    assert _python(code, TRITON_INTERPRET="1") == "True"


def test_a_variable_that_cannot_be_parsed_is_named():
    code = """
from liger_hw import env
try:
    env.LIGER_HW_FAST_LAUNCH
except ValueError as error:
    print(error)
"""
    said = _python(code, LIGER_HW_FAST_LAUNCH="maybe")
    assert "LIGER_HW_FAST_LAUNCH='maybe': expected 1 or 0. The variable means: launch compiled" in said
