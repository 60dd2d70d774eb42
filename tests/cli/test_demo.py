"""`liger-hw demo`: it trains, it tells, and it fails when a kernel is wrong."""

from __future__ import annotations

import importlib
import json
import math
import sys

import pytest
import torch

from liger_hw.bench import agreement, training
from liger_hw.bench.training import Original, Run
from liger_hw.cli import main

pytestmark = pytest.mark.cpu
pytest.importorskip("transformers")


@pytest.fixture
def demo(tmp_path, capsys, monkeypatch):
    """Run the demo at size tiny on the CPU; returns (exit code, standard output, standard error)."""

    def run(*argv: str, plots: bool = False) -> tuple[int, str, str]:
        if not plots:  # drawing takes as long as training
            monkeypatch.setitem(sys.modules, "matplotlib", None)
        code = main(["demo", "--size", "tiny", "--device", "cpu", "--steps", "4", "--out", str(tmp_path), *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_arms_agree_and_everything_is_told(demo, tmp_path):
    original = Original("mistral")
    code, out, err = demo(plots=True)
    assert code == 0, out + err
    assert "torch's reference path" in out and "OK: liger_hw trains as hf does" in out
    assert "round 1 liger_hw:" in err
    data = json.loads((tmp_path / "demo.json").read_text())
    hf, ours = data["runs"]
    assert (hf["arm"], ours["arm"]) == ("hf", "liger_hw") and len(hf["losses"]) == len(ours["losses"]) == 4
    assert hf["tokens_per_second"] > 0 and data["machine"]["torch"] == torch.__version__
    assert data["verdicts"]["liger_hw"]["problems"] == []
    assert (tmp_path / "e2e-mistral.png").read_bytes().startswith(b"\x89PNG")
    assert original.differences() == []  # the patch is gone


def test_one_step(demo):
    code, out, err = demo("--steps", "1")
    assert code == 0 and "tokens/s" in out, out + err


def test_bf16(demo):
    code, out, err = demo("--dtype", "bf16")
    assert code == 0, out + err


def test_the_control_arm_and_one_that_is_absent(demo, tmp_path):
    code, out, err = demo("--against", "hf,hf-eager,liger")
    assert code == 0, out + err
    assert "absent  liger: liger-kernel needs a GPU" in out
    assert "hf-eager" in json.loads((tmp_path / "demo.json").read_text())["verdicts"]


def test_without_matplotlib_the_numbers_are_written(demo, tmp_path):
    code, _, err = demo("--against", "hf,hf-eager")
    assert code == 0 and "needs matplotlib" in err
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


# -- a wrong kernel --------------------------------------------------------------------------------------------------


def _scaled(monkeypatch, module: str, name: str, change) -> None:
    module = importlib.import_module(module)
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: change(original(*args, **kwargs)))


def _swiglu_off_by_a_thousandth(monkeypatch):
    _scaled(monkeypatch, "liger_hw.transformers.functional", "liger_swiglu", lambda y: y * 1.001)


def _rms_norm_backward_forgets_a_bit_of_dx(monkeypatch):
    function = importlib.import_module("liger_hw.kernels.norms.rms_norm").RMSNormFunction
    backward = function.backward

    def forgetful(ctx, dy):
        dx, *grads = backward(ctx, dy)
        return dx * 1.001, *grads

    monkeypatch.setattr(function, "backward", staticmethod(forgetful))


def _rope_turns_the_wrong_way(monkeypatch):
    functional = importlib.import_module("liger_hw.transformers.functional")
    original = functional.liger_rope
    monkeypatch.setattr(functional, "liger_rope", lambda q, k, cos, sin, *rest: original(q, k, cos, -sin, *rest))


def _nan(monkeypatch):
    _scaled(monkeypatch, "liger_hw.transformers.functional", "liger_swiglu", lambda y: y * math.nan)


@pytest.mark.parametrize(
    "inject", [_swiglu_off_by_a_thousandth, _rms_norm_backward_forgets_a_bit_of_dx, _rope_turns_the_wrong_way, _nan]
)
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
    limit = agreement.allowed(dtype, 9, 5.0)
    assert not agreement.compare(base, _run([5.0] * 9 + [5.0 + 0.9 * limit]), dtype).problems
    assert agreement.compare(base, _run([5.0] * 9 + [5.0 + 1.1 * limit]), dtype).problems


def test_the_tolerance_grows_with_steps_and_dtype():
    assert (
        agreement.allowed("float32", 0, 5.0)
        < agreement.allowed("float32", 50, 5.0)
        < agreement.allowed("bfloat16", 0, 5.0)
    )
    assert agreement.allowed("bfloat16", 29, 5.0) < 0.05  # 30 steps in bf16: within 1%


def test_other_reasons_to_fail():
    base = _run([5.0, 4.0])
    assert "same weights" in agreement.compare(base, _run([5.0, 4.0], start=1.0), "float32").problems[0]
    assert "first gradient of w" in agreement.compare(base, _run([5.0, 4.0], grad=1.001), "float32").problems[0]
    assert agreement.compare(base, _run([5.0, math.nan]), "float32").problems
    assert agreement.compare(base, _run([5.0, 4.0], grad=math.nan), "float32").problems
    more = Run([5.0, 4.0], {"w": 1.0, "v": 1.0}, 0.0, [1.0], 1, None)
    assert "gradient for v" in agreement.compare(base, more, "float32").problems[0]


def test_steps_past_the_judged_ones_are_not_judged():
    base = [5.0] * (agreement.JUDGED_STEPS + 1)
    assert not agreement.compare(_run(base), _run(base[:-1] + [9.0]), "float32").problems


# -- text and arguments ----------------------------------------------------------------------------------------------


def test_pairs_of_ascii_bytes_are_one_token_each_way():
    tokens = training.to_tokens(b"Hello", 32768)
    assert tokens.tolist() == [ord("H") << 8 | ord("e"), ord("l") << 8 | ord("l")]
    assert int(training.to_tokens(bytes(range(256)), 32768).max()) < 32768
    assert training.to_tokens(b"\x00\xff", 256).tolist() == [0, 255]


def test_the_default_text_is_real_and_long():
    text = training.read_text(None)
    assert len(text) > 200_000 and b"statement" in text


def test_a_text_file(demo, tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"the quick brown fox " * 50)
    assert demo("--text", str(file), "--against", "hf,hf-eager")[0] == 0


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--size", "huge"), "invalid choice: 'huge'"),
        (("--steps", "0"), "not a positive integer"),
        (("--dtype", "fp16"), "needs a loss scaler"),
        (("--dtype", "int4"), "expected fp32, bf16 or fp16"),
        (("--device", "cuda:99"), "cannot use --device cuda:99"),
        (("--device", "rocm"), "torch calls an AMD GPU cuda"),
        (("--text", "/nonexistent"), "cannot read --text /nonexistent"),
        (("--seq", "10000000"), "give a longer one or --seq"),
        (("--against", "hf"), "two or more different arms"),
        (("--against", "hf,unsloth"), "unknown arm 'unsloth'"),
        (("--interpret", "--device", "cuda"), "runs on the CPU"),
        (("--against", "liger,liger_hw"), "nothing to compare with"),
    ],
)
def test_a_mistake_is_answered(demo, monkeypatch, argv, message):
    if "--interpret" in argv:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # as in the child process
    code, _, err = demo(*argv)
    assert code == 2 and message in err
    assert not torch.cuda.is_initialized()
