"""Residual streams after a layer under hyper-connections: out[o] = sum over i of h_res[o, i] x[i] + h_post[o] f_out.

Sums are fp32, rounded once. Saved for backward: all inputs.
Backward, with g = dout:  dx[i] = sum over o of h_res[o, i] * g[o],  df = sum over o of h_post[o] * g[o],
dh_post[o] = g[o] . f,  dh_res[o, i] = g[o] . x[i].

Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", https://arxiv.org/abs/2512.24880
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.operator import OperatorFunction, check, check_integers, define, dense, empty_like
from .mhc_coeffs import MAX_STREAMS, liger_mhc_coeffs
from .mhc_coeffs import WORKLOADS as WORKLOADS
from .mhc_pre import liger_mhc_pre
from .streams import mix, mix_backward, mix_tunables


def mhc_post_res_reference(x, f_out, h_post, h_res):
    wide = torch.promote_types(x.dtype, torch.float32)
    mixed = (h_res.to(wide)[..., None] * x.to(wide)[..., None, :, :]).sum(-2)
    return (mixed + h_post.to(wide)[..., None] * f_out.to(wide)[..., None, :]).to(x.dtype)


TUNABLES = FWD, BWD = mix_tunables("mhc_post_res")


def _fwd(x, f_out, h_post, h_res):
    x = dense(x)
    return mix(FWD, x, dense(f_out), dense(h_res), dense(h_post), empty_like(x, x.dtype))


def _bwd(dout, x, f_out, h_post, h_res):
    dx, df, dh_res, dh_post = mix_backward(BWD, dense(dout), dense(x), dense(f_out), dense(h_res), dense(h_post))
    return dx, df, dh_post, dh_res


_SHAPES = "x [*, streams, n]; f_out [*, n]; h_post [*, streams]; h_res [*, streams, streams]"


class MHCPostResFunction(OperatorFunction):
    fwd = define(
        "mhc_post_res_fwd(Tensor x, Tensor f_out, Tensor h_post, Tensor h_res) -> Tensor out",
        shapes=_SHAPES,
        launcher=_fwd,
        reference=mhc_post_res_reference,
        fake=("x",),
    )
    bwd = define(
        "mhc_post_res_bwd(Tensor dout, Tensor x, Tensor f_out, Tensor h_post, Tensor h_res)"
        " -> (Tensor dx, Tensor df_out, Tensor dh_post, Tensor dh_res)",
        shapes=f"{_SHAPES}; dout [*, streams, n]",
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_mhc_post_res(x: torch.Tensor, f_out: torch.Tensor, h_post: torch.Tensor, h_res: torch.Tensor) -> torch.Tensor:
    """Residual streams after a layer: sum over i of h_res[o, i] * x[i], plus h_post[o] * f_out.

    x: [..., n_streams, n_cols]; f_out: [..., n_cols]; h_post [..., n_streams] and h_res [..., n_streams, n_streams]
    from `liger_mhc_coeffs`. fp32, fp16 or bf16 (fp64 too on the CPU). Returns a tensor like x.
    Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    return MHCPostResFunction.apply(x, f_out, h_post, h_res)


def liger_mhc_apply(
    x: torch.Tensor,
    f_out: torch.Tensor,
    h_pre: torch.Tensor,
    h_post: torch.Tensor,
    h_res: torch.Tensor,
    *,
    return_x_in: bool = False,
) -> Any:
    """`liger_mhc_post_res`; with return_x_in also the layer's input, `liger_mhc_pre`. Shapes and errors are theirs."""
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, liger_mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: torch.Tensor,
    layer: Callable[[torch.Tensor], torch.Tensor],
    phi: torch.Tensor,
    b: torch.Tensor,
    alpha_pre: torch.Tensor,
    alpha_post: torch.Tensor,
    alpha_res: torch.Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Any:
    """The streams x [..., n_streams, n_cols] after `layer`, a function [..., n_cols] -> [..., n_cols].

    The layer's input is cast to the dtype of the layer's first parameter, if it has one. The other arguments and errors
    are as for `liger_mhc_coeffs`. Returns a tensor like x; with return_coeffs also (h_pre, h_post, h_res).
    """
    numbers = {"tmax": tmax, "rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps}
    alphas = alpha_pre, alpha_post, alpha_res
    coeffs = liger_mhc_coeffs(x, phi, b, *alphas, allow_fp32=allow_fp32, post_mult=post_mult, **numbers)
    x_in = liger_mhc_pre(x, coeffs[0])
    parameter = next(layer.parameters(), None) if isinstance(layer, torch.nn.Module) else None
    x_out = liger_mhc_post_res(x, layer(x_in if parameter is None else x_in.to(parameter.dtype)), *coeffs[1:])
    return (x_out, coeffs) if return_coeffs else x_out


class LigerMHC(torch.nn.Module):
    """`liger_mhc_forward` with its parameters, for a layer [..., c] -> [..., c] and hc residual streams.

    hc: 1 to 16; phi_dtype: phi's dtype; the other arguments are as for `liger_mhc_coeffs`. phi starts with a standard
    deviation of 0.02, b at 0, the alphas at 1.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        check_integers("LigerMHC", hc=hc, c=c, tmax=tmax)
        check(0 < hc <= MAX_STREAMS, "LigerMHC", f"hc must be 1 to {MAX_STREAMS}, got {hc}")
        self.layer, self.hc, self.c, self.tmax, self.allow_fp32 = layer, hc, c, tmax, bool(allow_fp32)
        self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult = rms_eps, pre_eps, sinkhorn_eps, post_mult
        n_mix = self.hc * (self.hc + 2)
        self.phi = torch.nn.Parameter((torch.randn(self.hc * self.c, n_mix) * 0.02).to(phi_dtype))
        self.b = torch.nn.Parameter(torch.zeros(n_mix))
        self.alpha_pre, self.alpha_post, self.alpha_res = (torch.nn.Parameter(torch.tensor(1.0)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hc, c]; returns the same shape and dtype."""
        numbers = {name: getattr(self, name) for name in ("tmax", "rms_eps", "pre_eps", "sinkhorn_eps", "post_mult")}
        alphas = self.alpha_pre, self.alpha_post, self.alpha_res
        return liger_mhc_forward(x, self.layer, self.phi, self.b, *alphas, allow_fp32=self.allow_fp32, **numbers)

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"


def sample(sizes, dtype, device, generator) -> Sample:
    n_tokens, n_streams, n_cols = sizes
    drawn, wide = normal(dtype, device, generator), torch.promote_types(dtype, torch.float32)
    x, f_out = drawn(n_tokens, n_streams, n_cols), drawn(n_tokens, n_cols)
    drawn = normal(wide, device, generator)
    h_post, h_res = drawn(n_tokens, n_streams), drawn(n_tokens, n_streams, n_streams)
    moved = (5 * n_streams + 3) * n_tokens * n_cols * dtype.itemsize
    return Sample(args=(x, f_out, h_post, h_res), reduction=n_streams + 1, grad_reduction=n_cols, moved=moved)


OP = registry.register_file(__name__, tunables=TUNABLES)
