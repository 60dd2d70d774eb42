"""The input of a layer under hyper-connections: out = sum over the residual streams i of h_pre[i] * x[i].

Sums are fp32, rounded once. Saved for backward: x and h_pre. Backward:  dx[i] = h_pre[i] * dout,
dh_pre[i] = dout . x[i].

Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", https://arxiv.org/abs/2512.24880
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.operator import OperatorFunction, define, dense
from .mhc_coeffs import WORKLOADS as WORKLOADS
from .streams import mix, mix_backward, mix_tunables


def mhc_pre_reference(x, h_pre):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * h_pre.to(wide)[..., None]).sum(-2).to(x.dtype)


TUNABLES = FWD, BWD = mix_tunables("mhc_pre")


def _fwd(x, h_pre):
    x = dense(x)
    out = torch.empty((*x.shape[:-2], x.shape[-1]), dtype=x.dtype, device=x.device)
    return mix(FWD, x, None, dense(h_pre), None, out)


def _bwd(dout, x, h_pre):
    dx, _, dh_pre, _ = mix_backward(BWD, dense(dout), dense(x), None, dense(h_pre), None)
    return dx, dh_pre


class MHCPreFunction(OperatorFunction):
    fwd = define(
        "mhc_pre_fwd(Tensor x, Tensor h_pre) -> Tensor out",
        shapes="x [*, streams, n]; h_pre [*, streams]",
        launcher=_fwd,
        reference=mhc_pre_reference,
    )
    bwd = define(
        "mhc_pre_bwd(Tensor dout, Tensor x, Tensor h_pre) -> (Tensor dx, Tensor dh_pre)",
        shapes="x [*, streams, n]; dout [*, n]; h_pre [*, streams]",
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_mhc_pre(x: torch.Tensor, h_pre: torch.Tensor) -> torch.Tensor:
    """The input of a layer: the sum over residual streams of h_pre[i] * x[i].

    x: [..., n_streams, n_cols]; h_pre: [..., n_streams], from `liger_mhc_coeffs`. fp32, fp16 or bf16 (fp64 too on the
    CPU). Returns [..., n_cols] in x's dtype. Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    return MHCPreFunction.apply(x, h_pre)


def sample(sizes, dtype, device, generator) -> Sample:
    n_tokens, n_streams, n_cols = sizes
    x = normal(dtype, device, generator)(n_tokens, n_streams, n_cols)
    h_pre = normal(torch.promote_types(dtype, torch.float32), device, generator)(n_tokens, n_streams)
    moved = (3 * n_streams + 2) * n_tokens * n_cols * dtype.itemsize
    return Sample(args=(x, h_pre), reduction=n_streams, grad_reduction=n_cols, moved=moved)


OP = registry.register_file(__name__, tunables=TUNABLES)
