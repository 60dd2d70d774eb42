"""GroupNorm: y = (x - mean) / sqrt(var + eps) * w + b, with mean and var over all values of a group of channels.

A group is num_channels / num_groups neighbouring channels of one example, contiguous in memory: a row for the kernels.
Statistics, products and sums are fp32; y is rounded once. Saved for backward: x, w, b (for its dtype), and mean and
rstd = 1 / sqrt(var + eps), two fp32 a group.
Backward, with m = dy * w and h = (x - mean) * rstd:  dx = rstd * (m - mean(m) - h * mean(m * h)). Both means are
computed from the sums of dy and of dy * h over each channel of each example, and so are db and dw.

A group is read in tiles of CHANNELS x BLOCK_SIZE values: once if one tile holds it, else twice by one program, the
second time from L2. If there are fewer groups than programs, several programs share a group: one launch stores partial
sums, another applies them. On devices with cooperative grids, each program of a group holds one tile and exchanges its
partial sums with the others, so that each tile is read once.

Source: Wu and He, "Group Normalization", https://arxiv.org/abs/1803.08494; summing differences from the first value:
Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ... import registry
from ...registry import Key, LaunchConfig, Sample, Target, Tunable, next_power_of_2, normal, tile_space
from ...runtime.cooperative import COOPERATIVE, cooperative_misfit, launch_cooperative, resident_options
from ...runtime.operator import (
    OperatorFunction,
    cdiv,
    check,
    check_integers,
    check_numbers,
    check_tensors,
    define,
    dense,
    launch,
)
from ..rows.reduce import column_sum, column_sum_tunable, param_parts, params_dtype, partial_sums
from ..rows.tuning import persistent_misfit
from .group_norm_kernels import (
    _group_norm_bwd_kernel,
    _group_norm_cooperative_bwd_kernel,
    _group_norm_cooperative_fwd_kernel,
    _group_norm_fwd_kernel,
)


def group_norm_reference(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
    return _fwd_reference(X, affine_scaling_weight, affine_shifting_bias, num_groups, eps)[0]


def _fwd_reference(x, w, b, num_groups, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    grouped = x.to(wide).reshape(x.shape[0] * num_groups, math.prod(x.shape[1:]) // num_groups)
    mean = grouped.mean(-1)
    centred = grouped - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = (centred * rstd[:, None]).reshape(x.shape)
    by_channel = (1, x.shape[1], *[1] * (x.dim() - 2))
    if w is not None:
        y = y * w.to(wide).view(by_channel)
    if b is not None:
        y = y + b.to(wide).view(by_channel)
    return y.to(x.dtype).contiguous(), torch.stack([mean, rstd])


# -- tunables --------------------------------------------------------------------------------------------------------

_DIMS = ("batch", "groups", "spatial", "num_channels")
_TILE = 4096


def _key(batch: int, groups: int, spatial: int, num_channels: int, itemsize: int) -> Key:
    """(values of a channel, channels of a group, log2 of batch * groups, itemsize, whether channels are aligned for
    wide loads); the first three are rounded up."""
    sizes = next_power_of_2(spatial), next_power_of_2(num_channels // groups)
    return *sizes, (batch * groups - 1).bit_length(), itemsize, int(spatial % 16 == 0)


def _blocks(key: Key, tile: int, channels: int = 1) -> dict[str, int]:
    """A tile of at most `tile` values, with at least `channels` channels if the group has as many."""
    channels = min(key[1], max(channels, tile // key[0]))
    return {"BLOCK_SIZE": min(key[0], tile // channels), "CHANNELS": channels}


def _whole_group(target: Target, key: Key, tensors: int) -> LaunchConfig | None:
    """One program for each group of 2048 to 4096 values; for unaligned channels, only up to one group a multiprocessor
    and with twice the warps."""
    blocks, group_values = {"BLOCK_SIZE": key[0], "CHANNELS": key[1]}, key[0] * key[1]
    if not _TILE // 2 <= group_values <= _TILE or not key[4] and 1 << key[2] > target.multiprocessors:
        return None
    per_thread, ctas = (32, 8 // tensors) if key[4] else (16, 1)
    return LaunchConfig(blocks, target.warps(group_values, per_thread, 16), 1, ctas)


def _cooperative(target: Target, key: Key, tensors: int) -> LaunchConfig | None:
    """Up to 64 tiles a group, in programs of four warps with limited registers. An exchange between more tiles takes
    longer than a second sweep."""
    tile = _TILE // 4 if not key[4] else (2 if key[0] >= _TILE else 1) * _TILE // key[3]
    if not (target.cooperative and _TILE < key[0] * key[1] <= 64 * tile):
        return None
    blocks = _blocks(key, tile)
    ctas = max(1, 9 - tensors - blocks["CHANNELS"] // 3) if tile < _TILE else 8 - 2 * tensors
    return LaunchConfig(blocks, 4, 3 - tensors if key[4] else 1, ctas, vendor=resident_options(target, 4, ctas))


def _two_sweeps(target: Target, key: Key, tensors: int) -> LaunchConfig:
    """Tiles of 4096 values with two more in flight, on at most as many programs as have their groups in L2 together. A
    single program a multiprocessor takes tiles of 8192 values; short unaligned channels take tiles of 1024 values.

    The backward has at least two programs a multiprocessor, so that one loads while the other sums its channels. Its
    tiles have four channels, or one if a group has more than four channels of at least four tiles each.
    """
    if not key[4] and key[0] < _TILE:
        blocks = _blocks(key, _TILE // 4)
        return LaunchConfig(blocks, target.warps(blocks["BLOCK_SIZE"] * blocks["CHANNELS"], 8), 1, 8)
    group_bytes = tensors * key[0] * key[1] * key[3]
    ctas = max(tensors, min(4, 3 * target.l2 // (4 * target.multiprocessors * group_bytes)))
    channels = 1 if tensors == 1 or key[1] > 4 and key[0] >= 4 * _TILE else 4
    blocks = _blocks(key, _TILE if ctas > 1 else 2 * _TILE, channels)
    tile = blocks["BLOCK_SIZE"] * blocks["CHANNELS"]
    ctas = max(ctas, min(8, _TILE // tile))
    tiles_that_fit = target.shared_memory // (ctas * tensors * tile * key[3])
    stages = max(1, min(3 if key[3] <= 2 else 2, 1 + tiles_that_fit))
    return LaunchConfig(blocks, target.warps(tile, 32 // key[3], 16), stages, ctas)


def _safe(target: Target, key: Key) -> LaunchConfig:
    blocks = _blocks(key, _TILE)
    return LaunchConfig(blocks, target.warps(blocks["BLOCK_SIZE"] * blocks["CHANNELS"], 32), 1, 1)


def _space(target: Target, key: Key, tensors: int) -> list[LaunchConfig]:
    tiles = {tuple(_blocks(key, tile, n).items()) for tile in (1024, 2048, 4096, 8192, 16384) for n in (1, 4)}
    how = {"per_thread": (4, 32), "stages": (1, 2, 3, 4), "ctas": (1, 2, 3, 4, 8, 16), "staged_bytes": tensors * key[3]}
    return tile_space(target, map(dict, sorted(tiles)), (1, 2, 4, 8, 16), **how)


def _valid(config: LaunchConfig, key: Key, tensors: int) -> str | None:
    if COOPERATIVE in config.vendor and config.num_stages > 3 - tensors:
        return f"num_stages is at most {3 - tensors} on a cooperative grid"
    tiles = cdiv(key[0], config.blocks["BLOCK_SIZE"]) * cdiv(key[1], config.blocks["CHANNELS"])
    return cooperative_misfit(config, tiles) or persistent_misfit(config, key)


def _tunable(variant: str, kernels: tuple, tensors: int) -> Tunable:
    """tensors: the number of tensors of x's size that the kernel reads."""
    return Tunable(
        "group_norm",
        variant,
        kernels=kernels,
        key=_key,
        dims=_DIMS,
        heuristic=lambda target, key: (
            _whole_group(target, key, tensors)
            or _cooperative(target, key, tensors)
            or _two_sweeps(target, key, tensors)
        ),
        safe=_safe,
        space=lambda target, key: _space(target, key, tensors),
        valid=lambda config, key: _valid(config, key, tensors),
    )


FWD = _tunable("fwd", (_group_norm_fwd_kernel, _group_norm_cooperative_fwd_kernel), tensors=1)
BWD = _tunable("bwd", (_group_norm_bwd_kernel, _group_norm_cooperative_bwd_kernel), tensors=2)
DW = column_sum_tunable("group_norm", _DIMS, columns=lambda *sizes: 2 * sizes[-1])  # dw and db

# -- launchers -------------------------------------------------------------------------------------------------------

_MAX_SPATIAL = 2**31 - 2**16
"""The kernels' offsets in a channel, up to the end of its last tile, must fit 32 bits."""


def _sizes(x: torch.Tensor, num_groups: int) -> tuple[int, int, int, int]:
    """In the order of `_DIMS`."""
    return x.shape[0], num_groups, math.prod(x.shape[2:]), x.shape[1]


class _Grid(NamedTuple):
    """How groups are spread over programs. A run is CHANNELS neighbouring channels."""

    programs: int  # axis 0 of the grid: programs that take different groups; all programs of a cooperative grid
    splits: int  # programs of a group
    split_tiles: int  # most tiles of a split
    run_splits: int  # splits of a run
    even: bool  # tiles fill a group exactly
    whole_group: bool  # one tile holds a group
    cooperative: bool = False


def _grid_of(plan, n_rows: int, channels: int, spatial: int) -> _Grid:
    blocks = plan.config.blocks
    runs, run_tiles = cdiv(channels, blocks["CHANNELS"]), cdiv(spatial, blocks["BLOCK_SIZE"])
    n_tiles = runs * run_tiles
    flags = not (channels % blocks["CHANNELS"] or spatial % blocks["BLOCK_SIZE"]), n_tiles == 1
    if COOPERATIVE in plan.options and 1 < n_tiles <= plan.programs:
        return _Grid(min(n_rows, plan.programs // n_tiles) * n_tiles, n_tiles, 1, run_tiles, *flags, cooperative=True)
    splits = min(plan.programs // n_rows, n_tiles)
    if splits < 2:
        return _Grid(min(n_rows, plan.programs), 1, n_tiles, 1, *flags)
    split_tiles = cdiv(n_tiles, splits)
    if split_tiles >= run_tiles:
        split_runs = cdiv(split_tiles, run_tiles)
        return _Grid(n_rows, cdiv(runs, split_runs), split_runs * run_tiles, 1, *flags)
    run_splits = cdiv(run_tiles, split_tiles)
    return _Grid(n_rows, runs * run_splits, split_tiles, run_splits, *flags)


def _launch(plan, grid: _Grid, tensors: tuple, sizes: tuple, flags: tuple, statistics: int, *last) -> None:
    """One launch, or two for several splits: the first stores `statistics` numbers a split, the second applies them.

    sizes: n_rows, n_groups, channels, spatial; last: the arguments that follow sizes and splits
    """
    kernel, cooperative_kernel = plan.tunable.kernels
    programs, splits, flags = grid.programs, grid.splits, (*flags, grid.even)
    if grid.cooperative:
        launch_cooperative(plan, cooperative_kernel, programs, splits, sizes[0], tensors, sizes, flags, *last)
        return
    numbers = (*sizes, splits, grid.split_tiles, grid.run_splits, *last)
    flags = (*flags, grid.whole_group)
    if splits == 1:
        launch(plan, kernel, (programs, 1), (*tensors, None, *numbers), (*flags, True, True))
        return
    split_statistics = tensors[0].new_empty((programs, splits, statistics), dtype=torch.float32)
    for sum_and_apply in ((True, False), (False, True)):
        launch(plan, kernel, (programs, splits), (*tensors, split_statistics, *numbers), (*flags, *sum_and_apply))


def _fwd(x, w, b, num_groups, eps):
    x, w, b = x.contiguous(), dense(w), dense(b)
    batch, _, spatial, num_channels = sizes = _sizes(x, num_groups)
    if spatial > _MAX_SPATIAL:
        check(False, "liger_group_norm", f"a channel may have {_MAX_SPATIAL} values on a GPU, got {tuple(x.shape)}")
    y = torch.empty_like(x)
    n_rows, channels = batch * num_groups, num_channels // num_groups
    stats = x.new_empty((2, n_rows), dtype=torch.float32)
    if x.numel():
        plan = FWD.plan(x.device, _key(*sizes, x.itemsize))
        grid = _grid_of(plan, n_rows, channels, spatial)
        _launch(plan, grid, (x, w, b, y, stats), (n_rows, num_groups, channels, spatial), (), 3, eps)
    return y, stats


def _bwd(dy, x, w, b, stats, num_groups, eps, needs_params):
    dy, x, w = dy.contiguous(), x.contiguous(), dense(w)
    batch, _, spatial, num_channels = sizes = _sizes(x, num_groups)
    dx = torch.empty_like(x)
    parts, dtype = param_parts(needs_params, w, b), params_dtype(x, w, b)
    if not x.numel():
        return dx, x.new_zeros(parts * num_channels, dtype=dtype)
    n_rows, channels = batch * num_groups, num_channels // num_groups
    plan = BWD.plan(x.device, _key(*sizes, x.itemsize))
    grid = _grid_of(plan, n_rows, channels, spatial)
    partial = partial_sums(x, batch * grid.run_splits, parts * num_channels, dtype) if parts else None
    tensors = dy, x, w, stats, dx, partial
    _launch(plan, grid, tensors, (n_rows, num_groups, channels, spatial), (parts == 2,), 2)
    return dx, column_sum(DW, partial, dtype) if parts else x.new_empty(0, dtype=dtype)


def _misfit(X, W, B, num_groups) -> str:
    if num_groups < 1 or X.shape[1] % num_groups:
        return f"num_channels={X.shape[1]} must be a multiple of num_groups={num_groups}"
    return "a bias needs a weight; for a shift alone pass a weight of ones" if W is None and B is not None else ""


class GroupNormFunction(OperatorFunction):
    params = "affine_scaling_weight", "affine_shifting_bias"
    fwd = define(
        "group_norm_fwd(Tensor X, Tensor? affine_scaling_weight, Tensor? affine_shifting_bias, int num_groups,"
        " float eps) -> (Tensor Y, Tensor stats)",
        shapes="X [b, c, *]; affine_scaling_weight [c]; affine_shifting_bias [c]",
        misfit=lambda X, W, B, num_groups, eps: _misfit(X, W, B, num_groups),
        launcher=_fwd,
        reference=_fwd_reference,
    )
    bwd = define(
        "group_norm_bwd(Tensor dY, Tensor X, Tensor? affine_scaling_weight, Tensor? affine_shifting_bias, Tensor stats,"
        " int num_groups, float eps, bool needs_params)"
        " -> (Tensor dX, Tensor daffine_scaling_weight_daffine_shifting_bias)",
        shapes="X, dY [b, c, *]; affine_scaling_weight [c]; affine_shifting_bias [c]; stats",
        misfit=lambda dY, X, W, B, stats, num_groups, eps, needs_params: _misfit(X, W, B, num_groups),
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_group_norm(
    X: torch.Tensor,
    affine_scaling_weight: torch.Tensor | None,
    affine_shifting_bias: torch.Tensor | None,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> torch.Tensor:
    """GroupNorm: X normalised over each group of num_channels / num_groups channels, times the weight plus the bias.

    X: [batch, num_channels, ...]; affine_scaling_weight, affine_shifting_bias: [num_channels] or None; the bias needs
    the weight. fp32, fp16 or bf16 (fp64 too on the CPU). Returns a contiguous tensor like X.
    Raises `ValueError` for shapes, dtypes, devices or a number of groups that do not fit.
    """
    check_integers("liger_group_norm", num_channels=num_channels, num_groups=num_groups)
    check_numbers("liger_group_norm", eps=eps)
    check_tensors("liger_group_norm", X=X)
    if X.dim() < 2 or X.shape[1] != num_channels:
        check(False, "liger_group_norm", f"X must be [batch, {num_channels}, ...], got {tuple(X.shape)}")
    return GroupNormFunction.apply(X, affine_scaling_weight, affine_shifting_bias, num_groups, eps)


class LigerGroupNorm(torch.nn.Module):
    """GroupNorm layer over [batch, num_channels, ...].

    num_groups must divide num_channels; init_fn: `ones` or `zeros` for the weight.
    bias: with True and with False there is a bias, which starts at zero, as in Liger's state dicts; None: no bias.
    """

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool | None = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        check(init_fn in ("ones", "zeros"), "LigerGroupNorm", f"init_fn must be ones or zeros, got {init_fn!r}")
        check_integers("LigerGroupNorm", num_channels=num_channels, num_groups=num_groups)
        check_numbers("LigerGroupNorm", eps=eps)
        fits = num_groups >= 1 and num_channels % num_groups == 0
        check(fits, "LigerGroupNorm", f"num_channels={num_channels} must be a multiple of num_groups={num_groups}")
        self.num_channels, self.num_groups = num_channels, num_groups
        self.eps = self.variance_epsilon = eps
        self.weight = torch.nn.Parameter(getattr(torch, init_fn)(num_channels))
        self.register_parameter("bias", None if bias is None else torch.nn.Parameter(torch.zeros(num_channels)))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [batch, num_channels, ...]; returns the same shape and dtype."""
        sizes = self.num_channels, self.num_groups
        return liger_group_norm(hidden_states, self.weight, self.bias, *sizes, self.variance_epsilon)

    def extra_repr(self) -> str:
        sizes = f"{self.num_channels}, {self.num_groups}"
        return f"{sizes}, eps={self.variance_epsilon}, bias={self.bias is not None}"


WORKLOADS = {
    "sd_vae_64x64": (32, 32, 4096, 512),
    "sdxl_unet_32x32": (16, 32, 1024, 1280),
    "sdxl_unet_128x128": (8, 32, 16384, 320),
    "sd_vae_512x512": (2, 32, 262144, 128),
    "resnet_unet_8x8": (64, 32, 64, 1280),
}


def sample(sizes, dtype, device, generator, *, bias=True, affine=True) -> Sample:
    batch, groups, spatial, num_channels = sizes
    drawn = normal(dtype, device, generator)
    w = drawn(num_channels) if affine else None
    b = drawn(num_channels) if affine and bias else None
    group_values = num_channels // groups * spatial
    return Sample(
        args=(drawn(batch, num_channels, spatial), w, b, num_channels, groups, 1e-6),
        reduction=group_values,
        grad_reduction=max(group_values, batch * spatial),
        moved=5 * batch * num_channels * spatial * dtype.itemsize,
    )


OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD, DW),
    options=({}, {"bias": False}, {"affine": False}),
    small=((2, 3, 37, 15), (1, 2, 9, 6), (3, 1, 64, 4)),
)
