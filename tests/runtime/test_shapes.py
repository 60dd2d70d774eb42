"""Checks of tensors against an operator's declaration."""

from __future__ import annotations

import pytest
import torch

from liger_hw.runtime.checks import Shapes


def _shapes(text: str, name: str = "probe_fwd", misfit=None) -> Shapes:
    tensors = "Tensor x, Tensor? w, Tensor? i" if "i" in text.split() else "Tensor x, Tensor? w"
    return Shapes(torch._C.parse_schema(f"liger_hw::{name}({tensors}, float eps) -> Tensor"), text, misfit)


def _t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    "text, x, w, words",
    [
        ("x [*, n]; w [n]", (2, 3, 4), (4,), ""),
        ("x [*, n]; w [n]", (2, 4), (3,), r"w must have shape \(4,\) to match x, got \(3,\)"),
        ("x [*, n]; w [n]", (4,), (2, 4), r"got \(2, 4\); x and w are swapped"),
        ("x [*, n]; w [n]", (), None, r"x must be \[..., n\], got \(\)"),
        ("x, w [*, n]", (4, 8), (1, 8), r"w must have shape \(4, 8\) to match x, got \(1, 8\)"),
        ("x [b, c, *]; w [c]", (2, 3, 5, 5), (3,), ""),
        ("x [b, c, *]; w [c]", (2, 3), (2,), r"w must have shape \(3,\)"),
        ("x [*, 2n]; w [*, n]", (5, 6), (5, 3), ""),
        ("x [*, 2n]; w [*, n]", (5, 7), None, r"x must be \[..., 2n\], got \(5, 7\)"),
        ("x [*, n]; w of rows", (2, 3, 4), (6,), ""),
        ("x [*, n]; w of rows", (2, 3, 4), (5,), r"w must have 6 elements to match x, got \(5,\)"),
        ("x; w of 1", (2, 3), (2,), r"w must have 1 element to match x, got \(2,\)"),
        ("x [r, n]; w [] | [r]", (2, 3), (2,), ""),
        ("x [r, n]; w [] | [r]", (2, 3), (3,), r"w must be \[\] or \[2\] to match x, got \(3,\)"),
        ("x [r, .]; w [r, .]", (2, 3), (3, 4), r"w must be \[2, .\] to match x, got \(3, 4\)"),
        ("x [r, n]; w [v, n]", (2, 3), (7, 4), r"w must be \[v, 3\] to match x, got \(7, 4\)"),
    ],
)
def test_shapes(text, x, w, words):
    args = _t(*x), None if w is None else _t(*w), 1.0
    if not words:
        return _shapes(text).check(args)
    with pytest.raises(ValueError, match=f"^liger_probe: .*{words}"):
        _shapes(text).check(args)


def test_dtypes():
    half = _t(4, dtype=torch.float16)
    _shapes("x [n]; w [n]").check((_t(4), half, 1.0))
    with pytest.raises(ValueError, match="x and w must have one dtype, got torch.float32 and torch.float16"):
        _shapes("T x, w [n]").check((_t(4), half, 1.0))
    _shapes("x; w").check((_t(4, dtype=torch.float64), None, 1.0))
    with pytest.raises(ValueError, match="x must be float32, float16 or bfloat16, got torch.float64"):
        _shapes("x; w").check((_t(4, dtype=torch.float64, device="meta"), None, 1.0))
    with pytest.raises(ValueError, match="w must be float32, float16 or bfloat16, got torch.int64"):
        _shapes("x; w").check((_t(4), _t(4, dtype=torch.int64), 1.0))
    indices = _shapes("x [r, n]; w [n]; int i [r]")
    indices.check((_t(2, 4), None, _t(2, dtype=torch.int32), 1.0))
    with pytest.raises(ValueError, match="i must be int32 or int64, got torch.float32"):
        indices.check((_t(2, 4), None, _t(2), 1.0))
    _shapes("x; float w").check((_t(4), _t(4, dtype=torch.float64, device="cpu"), 1.0))
    with pytest.raises(ValueError, match="w must be of a floating-point dtype, got torch.int64"):
        _shapes("x; float w").check((_t(4), _t(4, dtype=torch.int64), 1.0))
    _shapes("x; any w").check((_t(4), _t(4, dtype=torch.complex64), 1.0))


def test_devices_and_types():
    with pytest.raises(ValueError, match="liger_probe: w is on meta but x is on cpu; move them to one device"):
        _shapes("x [n]; w [n]").check((_t(4), _t(4, device="meta"), 1.0))
    with pytest.raises(TypeError, match="liger_probe: x must be a tensor, got NoneType"):
        _shapes("x [n]; w [n]").check((None, _t(4), 1.0))
    with pytest.raises(TypeError, match="liger_probe: w must be a tensor, got list"):
        _shapes("x [n]; w [n]").check((_t(4), [4.0], 1.0))


def test_a_backward_is_named_and_misfit_is_called_last():
    shapes = _shapes("x [n]; w [n]", "probe_bwd_", lambda x, w, eps: "eps is zero" if not eps else "")
    shapes.check((_t(4), None, 1.0))
    with pytest.raises(ValueError, match=r"^liger_probe \(backward\): eps is zero"):
        shapes.check((_t(4), None, 0.0))
    with pytest.raises(ValueError, match=r"^liger_probe \(backward\): w must have shape"):
        shapes.check((_t(4), _t(3), 0.0))


def test_a_layout_is_checked_once():
    calls = []
    shapes = _shapes("x [n]; w [n]", misfit=lambda x, w, eps: calls.append(eps) or ("eps is zero" if not eps else ""))
    for eps in (1.0, 1.0, 2.0, 1.0):
        shapes.check((_t(4), _t(4), eps))
    assert calls == [1.0, 2.0]
    for _ in range(2):
        with pytest.raises(ValueError, match="eps is zero"):
            shapes.check((_t(4), _t(4), 0.0))
        with pytest.raises(ValueError, match="must have shape"):
            shapes.check((_t(4), _t(3), 1.0))


@pytest.mark.parametrize("text", ["", "x [n]", "x [n]; w n", "x [n]; w [n-1]", "x [n]; v [n]"])
def test_an_incomplete_declaration_is_refused(text):
    with pytest.raises((ValueError, KeyError)):
        _shapes(text)
