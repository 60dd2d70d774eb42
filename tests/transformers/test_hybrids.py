"""What patch() says of a hybrid model whose recurrence has no kernels here."""

from __future__ import annotations

import logging
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers

import liger_hw
from liger_hw.transformers import hybrids
from liger_hw.transformers.tiny import tiny_model


def _lfm2():
    return tiny_model(transformers.Lfm2ForCausalLM)


def test_missing_packages_are_named_unless_a_kernel_is_in_their_place(caplog, monkeypatch):
    pytest.importorskip("transformers.models.qwen3_5", reason="mixers of transformers 4 are left alone")
    monkeypatch.setattr(hybrids, "_why_unusable", lambda package: "is not installed")
    with caplog.at_level(logging.WARNING, "liger_hw"):
        liger_hw.patch(_lfm2())
    assert not any("plain torch" in record.getMessage() for record in caplog.records)
    with caplog.at_level(logging.WARNING, "liger_hw"):
        liger_hw.patch(_lfm2(), short_conv=False)
    lines = [record.getMessage() for record in caplog.records if "plain torch" in record.getMessage()]
    assert len(lines) == 1 and "Lfm2ForCausalLM" in lines[0] and "causal-conv1d is not installed" in lines[0]


CONV, FLA, MAMBA = "causal-conv1d", "flash-linear-attention", "mamba-ssm"
NEEDED = {
    "bamba": ("BambaForCausalLM", CONV, MAMBA),
    "jamba": ("JambaForCausalLM", CONV, MAMBA),
    "kimi_linear": ("KimiLinearForCausalLM", CONV, FLA),
    "lfm2": ("Lfm2ForCausalLM", CONV),
    "qwen3_next": ("Qwen3NextForCausalLM", CONV, FLA),
}


@pytest.mark.parametrize("family", NEEDED)
def test_each_package_that_a_family_calls_is_named(family, monkeypatch):
    name = f"transformers.models.{family}.modeling_{family}"
    modeling = pytest.importorskip(name, reason=f"this transformers has no {family}")

    monkeypatch.setattr(hybrids, "_why_unusable", lambda package: "is not installed")
    cls, *distributions = NEEDED[family]
    line = hybrids.slow_recurrence(tiny_model(getattr(modeling, cls)))
    assert line.partition("kernels: ")[2] == "; ".join(f"{each} is not installed" for each in distributions)


def test_every_function_of_transformers_that_falls_back_is_known():
    decorated = re.compile(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"(\w+)",?\s*\)')
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text()
        defined = {package for name, (package, _) in hybrids.PACKAGES.items() if f"\ndef {name}(" in text}
        assert set(decorated.findall(text)) <= defined, f"{path.name}: put its function into hybrids.PACKAGES"


def test_no_line_if_the_packages_are_installed_or_not_needed(monkeypatch):
    model = _lfm2()
    monkeypatch.setitem(sys.modules, "causal_conv1d", types.ModuleType("causal_conv1d"))
    assert hybrids.slow_recurrence(model) == ""
    monkeypatch.setattr(hybrids, "_why_unusable", lambda package: "is not installed")
    assert hybrids.slow_recurrence(torch.nn.Linear(2, 2)) == ""


def test_a_package_that_refuses_says_why(monkeypatch, tmp_path):
    (tmp_path / "refuses_triton.py").write_text("raise RuntimeError('Triton is too new\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert hybrids._why_unusable("refuses_triton") == "cannot be imported (RuntimeError: Triton is too new)"
    assert hybrids._why_unusable("no_such_package_at_all") == "is not installed"
