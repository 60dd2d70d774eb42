"""benchmarks/demo.py trains, reports, and fails when a kernel is wrong."""

from __future__ import annotations

import importlib
import json
import math

import demo as script
import pytest
import torch
import training
import transformers
from training import Original, Run

pytest.importorskip("transformers")


@pytest.fixture
def demo(tmp_path, capsys):
    """Run the demo at size tiny on the CPU; returns (exit code, standard output, standard error)."""

    def run(*argv: str) -> tuple[int, str, str]:
        words = ["--size", "tiny", "--device", "cpu", "--steps", "4", "--out", str(tmp_path), *argv]
        try:
            code = script.main(words)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_arms_agree_and_all_results_are_reported(demo, tmp_path):
    original = Original("mistral")
    code, out, err = demo()
    assert code == 0, out + err
    assert "torch's reference path" in out and "OK: liger_hw trains as hf does" in out
    assert "round 1 liger_hw:" in err
    data = json.loads((tmp_path / "demo.json").read_text())
    hf, ours = data["runs"]
    assert (hf["arm"], ours["arm"]) == ("hf", "liger_hw") and len(hf["losses"]) == len(ours["losses"]) == 4
    assert hf["tokens_per_second"] > 0 and data["machine"]["torch"] == torch.__version__
    assert data["machine"]["transformers"] == transformers.__version__
    assert data["verdicts"]["liger_hw"]["problems"] == []
    assert original.differences() == []  # the patch is gone


def test_one_step(demo):
    code, out, err = demo("--steps", "1")
    assert code == 0 and "tokens/s" in out, out + err


def test_the_control_arm_and_one_that_is_absent(demo, tmp_path):
    code, out, err = demo("--against", "hf,hf-eager,liger")
    assert code == 0, out + err
    assert "absent  liger: liger-kernel needs a GPU" in out
    assert "hf-eager" in json.loads((tmp_path / "demo.json").read_text())["verdicts"]


# -- a wrong kernel --------------------------------------------------------------------------------------------------


def _forward_off_by_a_thousandth(monkeypatch):
    function = importlib.import_module("liger_hw.kernels.pointwise.swiglu").SiLUMulFunction
    original = function.apply
    monkeypatch.setattr(function, "apply", lambda *args: original(*args) * 1.001)


def _backward_off_by_a_thousandth(monkeypatch):
    function = importlib.import_module("liger_hw.kernels.norms.rms_norm").RMSNormFunction
    backward = function.backward

    def wrong(ctx, dy):
        dx, *grads = backward(ctx, dy)
        return dx * 1.001, *grads

    monkeypatch.setattr(function, "backward", staticmethod(wrong))


@pytest.mark.parametrize("inject", [_forward_off_by_a_thousandth, _backward_off_by_a_thousandth])
def test_a_wrong_kernel_fails(demo, monkeypatch, inject):
    inject(monkeypatch)
    code, out, _ = demo()
    assert code == 1 and "FAILED: liger_hw against hf" in out


def test_a_patched_process_is_refused(demo):
    from liger_hw.transformers import apply_liger_kernel_to_mistral

    with apply_liger_kernel_to_mistral():
        code, _, err = demo()
    assert code == 2 and "already patched" in err


# -- the tolerance ---------------------------------------------------------------------------------------------------


def _run(losses: list[float], grad: float = 1.0, start: float = 0.0) -> Run:
    return Run(losses, {"w": grad}, start, [1.0], 1, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tolerance_is_the_limit(dtype):
    base = _run([5.0] * 10)
    limit = script.allowed(dtype, 9, 5.0)
    assert not script.compare(base, _run([5.0] * 9 + [5.0 + 0.9 * limit]), dtype).problems
    assert script.compare(base, _run([5.0] * 9 + [5.0 + 1.1 * limit]), dtype).problems


def test_the_tolerance_grows_with_steps_and_dtype():
    assert script.allowed("float32", 0, 5.0) < script.allowed("float32", 50, 5.0) < script.allowed("bfloat16", 0, 5.0)
    assert script.allowed("bfloat16", 29, 5.0) < 0.05  # 30 steps in bf16: within 1%


def test_other_reasons_to_fail():
    base = _run([5.0, 4.0])
    assert "same weights" in script.compare(base, _run([5.0, 4.0], start=1.0), "float32").problems[0]
    assert "first gradient of w" in script.compare(base, _run([5.0, 4.0], grad=1.001), "float32").problems[0]
    assert script.compare(base, _run([5.0, math.nan]), "float32").problems
    assert script.compare(base, _run([5.0, 4.0], grad=math.nan), "float32").problems
    more = Run([5.0, 4.0], {"w": 1.0, "v": 1.0}, 0.0, [1.0], 1, None)
    assert "gradient for v" in script.compare(base, more, "float32").problems[0]


def test_steps_past_the_judged_ones_are_not_judged():
    base = [5.0] * (script.JUDGED_STEPS + 1)
    assert not script.compare(_run(base), _run(base[:-1] + [9.0]), "float32").problems


# -- text and arguments ----------------------------------------------------------------------------------------------


def test_the_default_text_is_real_and_long():
    text = training.read_text(None)
    assert len(text) > 200_000 and b"statement" in text


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--size", "huge"), "invalid choice: 'huge'"),
        (("--dtype", "float16"), "invalid choice: 'float16'"),
        (("--device", "cuda:99"), "cannot use --device cuda:99"),
        (("--against", "hf"), "nothing to compare with"),
        (("--against", "hf,unsloth"), "unknown arm 'unsloth'"),
        (("--interpret", "--device", "cuda"), "runs on the CPU"),
        (("--against", "liger,liger_hw"), "nothing to compare with"),
    ],
)
def test_a_mistake_is_answered(demo, argv, message):
    code, _, err = demo(*argv)
    assert code == 2 and message in err
    assert not torch.cuda.is_initialized()


def test_a_text_that_is_missing_or_too_short_is_refused():
    with pytest.raises(ValueError, match="cannot read --text /nonexistent"):
        training.read_text("/nonexistent")
