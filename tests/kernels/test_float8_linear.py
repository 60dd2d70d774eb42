"""FP8: what the shared tests cannot know. Scales and bytes against torch's own casts, numbers at the edges of a format,
and the products against exact ones of the rounded numbers."""

from __future__ import annotations

import pytest
import torch

from liger_hw.backends import known_target
from liger_hw.kernels.float8 import geglu_float8, layer_norm_float8, rms_norm_float8, swiglu_float8
from liger_hw.kernels.float8.float8_linear import RECIPES, float8_linear_reference, liger_float8_linear
from liger_hw.kernels.float8.formats import DTYPES, FORMATS, float8_dtype, largest_bits, scale_of
from liger_hw.kernels.float8.quantize_float8 import float8_transposed, liger_quantize_float8
from liger_hw.registry import pretend

ALL_DTYPES = [dtype for pair in DTYPES.values() for dtype in pair]


def _spread(lane, n_rows, n_cols, seed, dtype=torch.float32):
    """Rows of very different sizes, as gradients of tokens have them."""
    generator = torch.Generator(lane.device).manual_seed(seed)
    x = torch.randn(n_rows, n_cols, generator=generator, device=lane.device)
    return (x * torch.logspace(-9, 4, n_rows, device=lane.device)[:, None]).clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("sizes", [(1, 16), (37, 40), (5, 300), (64, 17000)])
def test_bytes_are_those_of_torch_s_cast(lane, dtype, sizes, scaling, format, seed):
    if lane.name == "interpret" and sizes[1] > 1000:
        sizes = (2, sizes[1])
    x = _spread(lane, *sizes, seed, dtype)
    rows, turned = liger_quantize_float8(x, scaling, format, transposed=True)
    n_rows, n_cols = sizes
    width = -(-n_cols // 16) * 16
    amax = x.float().abs().amax(1)
    scale = scale_of(amax if scaling == "row" else amax.amax()[None], rows.data.dtype)
    assert torch.equal(rows.scale, scale)
    expected = torch.zeros(n_rows, width, device=x.device)
    expected[:, :n_cols] = (x.float() / scale[:, None]).to(rows.data.dtype).float()
    assert rows.data.shape == (n_rows, width) and torch.equal(rows.data.float(), expected)
    view = x[:, :300].contiguous().t()  # each of its rows is a program
    for columns, exact in zip(
        liger_quantize_float8(view, scaling, format), liger_quantize_float8(view.contiguous(), scaling, format)
    ):
        assert torch.equal(columns.float(), exact.float()), "of a view that is transposed"
    assert turned.shape == (width, -(-n_rows // 16) * 16)
    assert torch.equal(turned[:, :n_rows].float(), expected.t()) and not turned[:, n_rows:].float().any()


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_that_of_the_format(lane, format, seed):
    """Half a unit in the last place of normal numbers, half the smallest number below them."""
    x = _spread(lane, 33, 64, seed)
    rows = liger_quantize_float8(x, format=format)
    number = torch.finfo(rows.data.dtype)
    exact = x.double() / rows.scale.double()[:, None]
    bound = (exact.abs() * number.eps / 2).clamp_min(number.smallest_normal * number.eps / 2)
    assert ((rows.data.double() - exact).abs() <= bound).all()
    assert (rows.data.float().abs().amax(1) > number.max / 2.01).all(), "the scale leaves no power of two unused"


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_scales(dtype):
    """The smallest power of two that fits, at every edge of the mantissa."""
    most = torch.finfo(dtype).max
    amax = torch.tensor([most, most * 1.0001, most * 0.5, most * 0.50001, 3e38, 1e-20, 1e-38, 1e-45, 0.0])
    scale = scale_of(amax, dtype)
    assert scale[:4].tolist() == [1.0, 2.0, 0.5, 1.0]
    assert (amax / scale <= most).all() and (scale >= 2.0**-100).all() and (scale.frexp().mantissa == 0.5).all()
    assert scale[-2:].tolist() == [2.0**-100] * 2
    assert scale_of(torch.tensor([float("inf"), float("nan")]), dtype).isnan().all()
    assert torch.tensor(largest_bits(dtype), dtype=torch.int32).view(torch.float32).item() == most


def test_numbers_that_are_not_finite(lane):
    """A row that has one gives NaN, and its neighbours nothing; zeros and denormals give what they are."""
    x = torch.ones(5, 32, device=lane.device)
    x[0, 3], x[1, 0], x[2, 31], x[3] = float("nan"), float("inf"), -float("inf"), 0.0
    x[4] = 1e-40
    rows = liger_quantize_float8(x)
    assert rows.scale.isnan().tolist() == [True, True, True, False, False]
    assert not rows.data[3:].float().any()
    y = liger_float8_linear(x, torch.eye(32, device=lane.device))
    assert y[:3].isnan().all() and not y[3:].any()


def test_what_writes_float8_keeps_numbers_that_are_not_finite_in_their_rows(lane):
    """Gates and norms: a NaN or infinity makes its row NaN, zeros and denormals are finite, no rows give none."""
    a, b = (torch.ones(5, 32, device=lane.device) for _ in "ab")
    w = torch.ones(32, device=lane.device)
    a[0, 3], a[1, 0], a[2], a[3] = float("nan"), float("inf"), 0.0, 1e-40
    for rows in (
        lambda k: swiglu_float8.GATE.rows(a[:k], b[:k]),
        lambda k: geglu_float8.EXACT.rows(a[:k], b[:k]),
        lambda k: rms_norm_float8.rms_norm_float8_rows(a[:k], w, 1e-6, 0.0, 0)[:2],
        lambda k: layer_norm_float8.layer_norm_float8_rows(a[:k], w, w, 1e-6)[:2],
    ):
        data, scale = rows(5)
        assert scale.isnan().tolist() == [True, True, False, False, False]
        assert (data[2:].float() * scale[2:, None]).isfinite().all()
        data, scale = rows(0)
        assert data.shape == (0, 32) and scale.shape == (0,)


def test_a_lost_gradient_is_lost_everywhere(lane, seed):
    """One token whose gradient is infinite makes dW NaN, as without FP8, and dx NaN for that token alone."""
    generator = torch.Generator(lane.device).manual_seed(seed)
    x, w, dy = (torch.randn(32, 32, generator=generator, device=lane.device) for _ in range(3))
    dy[5, 7] = float("inf")
    dx, dw = torch.autograd.grad(liger_float8_linear(x.requires_grad_(), w.requires_grad_()), (x, w), dy)
    assert dw.isnan().all() and dx[5].isnan().all() and dx[torch.arange(32) != 5].isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_exact_but_for_the_rounding_of_their_factors(lane, recipe, seed):
    """y, dx and dW in fp64 from the FP8 numbers themselves: what is left is the sums' rounding."""
    generator = torch.Generator(lane.device).manual_seed(seed)
    x = _spread(lane, 40, 48, seed).requires_grad_()
    w = (torch.randn(32, 48, generator=generator, device=lane.device) / 7).requires_grad_()
    dy = _spread(lane, 40, 32, seed + 1).flip(0)
    scaling = "row" if RECIPES[recipe].rowwise else "tensor"
    format = "e4m3" if RECIPES[recipe].gradients == FORMATS["e4m3"] else "e5m2"
    y = liger_float8_linear(x, w, None, recipe)
    dx, dw = torch.autograd.grad(y, (x, w), dy)

    def exact(t, scaling, format):
        rows = liger_quantize_float8(t.detach(), scaling, format)
        return rows.data.double() * rows.scale.double()[:, None], rows

    x8, x_rows = exact(x, scaling, "e4m3")
    w8, _ = exact(w, scaling, "e4m3")
    w8_back, _ = exact(w, "tensor", "e4m3")
    dy8, dy_rows = exact(dy, scaling, format)
    out = 1e-5 if lane.device == "cpu" else 1e-2  # a device rounds products to bf16
    for name, result, expected in (("y", y, x8 @ w8.t()), ("dx", dx, dy8 @ w8_back)):
        error = (result.double() - expected).abs() / expected.abs().amax(1, keepdim=True).clamp_min(1e-30)
        assert error.max() < out, name
    token_scales = (dy_rows.scale * x_rows.scale).double().expand(40)
    lost = torch.finfo(dy_rows.data.dtype).smallest_normal  # of a factor, beside the largest token's
    bound = 40 * lost * token_scales.max() * x_rows.data.double().abs().amax(0)
    assert ((dw.double() - dy8.t() @ x8).abs() <= bound + out * (dy8.abs().t() @ x8.abs())).all(), "dw"


@pytest.mark.cpu
def test_the_dtype_is_the_target_s(seed):
    x = torch.randn(16, 16)
    for name, dtypes in (("sm90", DTYPES["fn"]), ("gfx950", DTYPES["fn"]), ("gfx942", DTYPES["fnuz"])):
        with pretend(known_target(name)):
            assert tuple(float8_dtype(x.device, format) for format in FORMATS.values()) == dtypes
            assert liger_quantize_float8(x).data.dtype is dtypes[0]
    for name in ("sm80", "gfx90a", "gfx1100", "pvc"):
        with pretend(known_target(name)), pytest.raises(ValueError, match="no matrix units for FP8"):
            liger_float8_linear(x, x)


@pytest.mark.cpu
def test_what_is_refused(seed):
    x, w = torch.randn(4, 32), torch.randn(16, 32)
    for args, message in (
        ((x, w, None, "mxfp8"), "recipe"),
        ((x, w.t()), "the input must be"),
        ((x, w, torch.zeros(4)), r"bias must be \[16\]"),
        ((x, w.bfloat16()), "one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            liger_float8_linear(*args)
    for args in ((x[0],), (x, "column"), (x, "row", "e3m4")):
        with pytest.raises(ValueError, match="liger_quantize_float8"):
            liger_quantize_float8(*args)


@pytest.mark.cpu
def test_autocast(seed):
    """fp32 parameters under autocast: the result and its gradient are bf16, the parameters' gradients fp32."""
    x, w = torch.randn(16, 32), torch.randn(48, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = liger_float8_linear(x, w)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert w.grad.dtype is torch.float32
    torch.testing.assert_close(y.float(), float8_linear_reference(x, w), rtol=1e-2, atol=1e-2)


@pytest.mark.cpu
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_no_rows(scaling):
    rows, turned = liger_quantize_float8(torch.ones(0, 32), scaling, transposed=True)
    assert rows.data.shape == (0, 32) and turned.shape == (32, 0) and len(rows.scale) == (scaling == "tensor")


def test_factors_are_exact(lane, seed):
    """FP8 times a power of two is FP8 again, down to the smallest number."""
    rows = liger_quantize_float8(_spread(lane, 32, 16, seed), format="e5m2")
    factors = 2.0 ** -torch.arange(32, device=lane.device).float()
    turned = float8_transposed(rows.data, factors, FORMATS["e5m2"])
    expected = (rows.data.double() * factors.double()[:, None]).float().to(rows.data.dtype)
    assert torch.equal(turned.float(), expected.t().float())
