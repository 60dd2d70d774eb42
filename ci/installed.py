"""What must work where only the wheel is installed; ci/release.py runs it in environments of its own.

python ci/installed.py torch | triton | transformers      what the environment has
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys

import torch

import liger_hw
from liger_hw import registry
from liger_hw.cli import COMMANDS, main


def said(*words: str) -> tuple[int, str]:
    """(exit code, everything printed) of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words)
    return code, out.getvalue()


def expect(code: int, *words: str) -> str:
    got, text = said(*words)
    assert got == code, f"liger-hw {' '.join(words)} ended with {got}, not {code}:\n{text}"
    return text


def check_ops() -> None:
    """Every op's reference, forward and backward, on small sizes."""
    for op in registry.ops().values():
        sizes = tuple(min(n, 8) for n in next(iter(op.workloads.values())))
        sample = op.sample(sizes, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
        op.function(*sample.args, **sample.kwargs)


def check_commands(stage: str) -> None:
    for command in COMMANDS:
        expect(0, command, "--help")
    expect(0, "info")
    expect(0, "explain", "rms_norm", "--device", "h200")
    text = expect(0, "cache", "verify")
    assert " 0 problems" in text, text
    if stage != "transformers":
        text = expect(2, "check", "mistral-7b")
        assert "pip install" in text and "[transformers]" in text and text.count("\n") <= 2, text
    if stage == "torch":
        text = expect(2, "compile", "--target", "sm90", "--ops", "rms_norm")
        assert "pip install" in text and text.count("\n") <= 2, text


def check_training() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = LlamaForCausalLM(config).train()
    labels = torch.randint(64, (2, 8))
    before = model(labels, labels=labels).loss
    with liger_hw.patch(model) as report:
        after = model(labels, labels=labels).loss
        after.backward()
    assert report.patched and torch.allclose(before, after, atol=1e-5), str(report)


if __name__ == "__main__":
    stage = sys.argv[1]
    for module, stages in {"triton": ("triton", "transformers"), "transformers": ("transformers",)}.items():
        assert (importlib.util.find_spec(module) is not None) == (stage in stages), f"{module} in environment {stage}"
    assert "site-packages" in liger_hw.__file__, liger_hw.__file__
    check_ops()
    check_commands(stage)
    if stage == "transformers":
        check_training()
