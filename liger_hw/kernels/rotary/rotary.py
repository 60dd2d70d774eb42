"""Shared by the rotary embeddings: reference, tunables, launcher, operator and autograd.

A pair (x1, x2) becomes (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2); backward is the transposed rotation. A `Form` describes
the layouts of pairs and angles. Pairs, in the input and in the output:
    halves   x1 = x[i], x2 = x[i + h]        i < h = rotary_dim // 2
    pairs    x1 = x[2i], x2 = x[2i + 1]
Angles:
    SHARED   cos1 = cos2 = cos[i]            one angle a pair
    HALVES   cos1 = cos[i], cos2 = cos[i + h]
    PAIRS    cos1 = cos[2i], cos2 = cos[2i + 1]
    COMPLEX  cos1 = cos2 = freqs[2i], sin1 = sin2 = freqs[2i + 1], from torch.view_as_real of complex numbers
Sections, if section_1 > 0: cos and sin have a first dimension, of three planes, one for each position axis. Columns
i < section_0 use plane 0, other columns i < section_1 plane 1, the rest plane 2.

q [B, n_q_heads, T, D], k [B, n_k_heads, T, D] (head_axis 1) or [B, T, heads, D] (head_axis 2) may have any strides;
they are copied first only if the last dimension is not contiguous. Columns from rotary_dim on pass through. Arithmetic
is fp32, rounded once. The results are new dense tensors, with heads and tokens in memory in the input's order.
"""

from __future__ import annotations

from itertools import chain
from math import gcd
from typing import Any, ClassVar, NamedTuple

import torch

from ...recompute.recipes import offer
from ...registry import Key, LaunchConfig, Plan, Sample, Target, Tunable, next_power_of_2, tile_space
from ...runtime.dependent_launch import is_small
from ...runtime.operator import Function, cdiv, check, define, first_order, launch
from ..pointwise.elementwise import flat_safe, flat_space
from .rotary_kernels import AngleStrides, Head, Strides, Tiles, _flat_rotary_kernel, _rotary_kernel

SHARED, HALVES, PAIRS, COMPLEX = range(4)


class Form(NamedTuple):
    """The layouts of pairs and angles in the forward; see the top of this file."""

    pairs_in: bool = False
    pairs_out: bool = False
    angles: int = HALVES
    section_0: int = 0
    section_1: int = 0


def rotated(x, cos, sin, rotary_dim, head_axis, form, backward=False):
    """x, which is q or k, rotated in plain torch, in fp32 or, if x is fp64, in fp64."""
    half = rotary_dim // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    if form.angles == COMPLEX:
        cos, sin = cos[..., 0], cos[..., 1]
    if form.section_1:
        cos, sin = (_one_plane(t, half, form.section_0, form.section_1) for t in (cos, sin))
    cos, sin = cos.to(wide).unsqueeze(head_axis), sin.to(wide).unsqueeze(head_axis)
    if form.angles in (HALVES, PAIRS):
        (cos1, cos2), (sin1, sin2) = (_split(t, half, form.angles == PAIRS) for t in (cos, sin))
    else:
        cos1, sin1 = cos[..., :half], sin[..., :half]
        cos2, sin2 = cos1, sin1
    to_pairs, from_pairs = (form.pairs_in, form.pairs_out) if backward else (form.pairs_out, form.pairs_in)
    x1, x2 = _split(x[..., :rotary_dim].to(wide), half, from_pairs)
    if backward:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    y = torch.stack((y1, y2), -1).flatten(-2) if to_pairs else torch.cat((y1, y2), -1)
    return torch.cat((y.to(x.dtype), x[..., rotary_dim:]), -1)


def _split(t, half, is_pairs):
    return (t[..., 0::2], t[..., 1::2]) if is_pairs else (t[..., :half], t[..., half:])


def _one_plane(t, half, section_0, section_1):
    """[3, B, T, width] -> [B, T, width], with each column taken from the plane of its section."""
    column = torch.arange(t.shape[-1], device=t.device) % half
    plane = (column >= section_0).long() + (column >= section_1).long()
    return t.gather(0, plane.expand(1, *t.shape[1:]))[0]


# -- tunables --------------------------------------------------------------------------------------------------------

DIMS = ("batch", "seq_len", "n_q_heads", "n_k_heads", "head_dim")


def rotary_key(batch: int, seq_len: int, n_q_heads: int, n_k_heads: int, head_dim: int, itemsize: int) -> Key:
    """(heads of q, heads of k, head width, log2 of the tokens, itemsize); heads and log2 are rounded up."""
    heads = next_power_of_2(n_q_heads), next_power_of_2(n_k_heads)
    return *heads, head_dim, (batch * seq_len - 1).bit_length() if batch * seq_len > 1 else 0, itemsize


def _heuristic(target: Target, key: Key) -> LaunchConfig:
    """One warp with 32 bytes of q a thread, or more if the q heads of a k head would be in different programs.

    Head widths that are no power of two leave threads idle and take 64 bytes a thread. Small launches take 16 bytes a
    thread, in four warps or, for the smallest, one.
    """
    q_heads, k_heads, head_dim, tokens_bucket, itemsize = key
    width = next_power_of_2(head_dim)
    elements = q_heads * width << tokens_bucket
    per_byte = target.warp_size // itemsize  # elements of a warp for each byte of a thread
    if elements <= 2048 * target.multiprocessors:
        warps = 4 if elements > 128 * target.multiprocessors else 1
        return LaunchConfig({"BLOCK_T": 1, "BLOCK_H": min(q_heads, max(1, warps * 16 * per_byte // width))}, warps)
    tile = (32 if width == head_dim else 64) * per_byte
    heads_of_k_head = min(q_heads // max(1, k_heads), max(1, 128 * per_byte // width))
    block_h = min(q_heads, max(1, tile // width, heads_of_k_head))
    block_t = min(8, max(1, tile // (block_h * width)))
    warps = target.warps(block_t * block_h * width, 64 // itemsize, 8)
    return LaunchConfig({"BLOCK_T": block_t, "BLOCK_H": block_h}, warps)


def _safe(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_T": 1, "BLOCK_H": 1}, 1)


def _space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = [
        {"BLOCK_T": block_t, "BLOCK_H": block_h}
        for block_t in (1, 2, 4, 8, 16)
        for block_h in (1, 2, 4, 8, 16, 32, 64, 128)
        if block_h <= key[0]
    ]
    width, hints = next_power_of_2(key[2]), ("none", "stream")
    return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(8, 128), hints=hints, width=width)


def _small_launch(key: Key) -> bool:
    q_heads, k_heads, head_dim, tokens_bucket, _ = key
    return is_small((q_heads + k_heads) * head_dim << tokens_bucket)


def _is_flat(key: Key) -> bool:
    """Whether an op with `flat` launches `_flat_rotary_kernel`: for even head widths that are no power of two."""
    return key[2] % 2 == 0 and key[2] & (key[2] - 1) != 0


def _flat_heuristic(target: Target, key: Key) -> LaunchConfig:
    """128 threads a program, for 1024 elements; for 512 if elements are fewer or half a head is whole 16-byte loads."""
    heads, _, width, tokens_bucket, itemsize = key
    elements = heads * width << tokens_bucket
    if elements <= 256 * target.multiprocessors:
        block = 256
    elif elements <= 16384 * target.multiprocessors or width // 2 * itemsize % 16 == 0:
        block = 512
    else:
        block = 1024
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, block // 128, 8))


def _tunable(op: str, variant: str, flat: bool) -> Tunable:
    """flat: see `Rotary`."""

    def by_kernel(tile_rule, flat_rule):
        return lambda target, key: (flat_rule if flat and _is_flat(key) else tile_rule)(target, key)

    return Tunable(
        op,
        variant,
        kernels=(_rotary_kernel, _flat_rotary_kernel) if flat else (_rotary_kernel,),
        key=rotary_key,
        dims=DIMS,
        heuristic=by_kernel(_heuristic, _flat_heuristic),
        safe=by_kernel(_safe, flat_safe),
        space=by_kernel(_space, flat_space),
        neutral=frozenset({"num_stages", "hint", "num_warps", "BLOCK_T", "BLOCK_H", "BLOCK_SIZE"}),
        dependent_launch=_small_launch,
    )


# -- layouts ---------------------------------------------------------------------------------------------------------


def _dense_strides(shape: tuple[int, ...], head_axis: int, heads_inside: bool) -> tuple[int, ...]:
    """Strides of a dense tensor, with a token's heads adjacent in memory (heads_inside) or a head's tokens."""
    _, second, third, width = shape
    if heads_inside == (head_axis == 2):
        return second * third * width, third * width, width, 1
    return second * third * width, width, second * width, 1


def dense_like(x: torch.Tensor, head_axis: int, heads_inside: bool) -> torch.Tensor:
    """An empty tensor of x's shape and dtype with `_dense_strides`."""
    strides = _dense_strides(x.shape, head_axis, heads_inside)
    if x.stride() == strides:
        return torch.empty_like(x)  # takes less time than empty_strided
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def heads_inside(x: torch.Tensor, head_axis: int) -> bool:
    """Whether the heads of a token are adjacent in memory, not the tokens of a head. False for an invalid x."""
    strides = x.stride()
    return len(strides) == 4 and head_axis in (1, 2) and strides[head_axis] <= strides[3 - head_axis]


class Geometry(NamedTuple):
    """The part of a launch that depends only on shapes and strides."""

    key: Key
    axes: tuple[int, int, int]  # the axes of q and k that are batch, head and token in the kernel
    strides: tuple[Strides, ...]  # of q, k, and the outputs for q and k
    angles: AngleStrides
    tokens: int
    seq_len: int
    n_heads: tuple[int, int]  # of q, of k
    head: Head


def geometry_of(q, k, cos, rotary_dim, head_axis, inside, by_position, sections=False) -> Geometry:
    """inside: `heads_inside` of the outputs for q and for k; sections: whether cos has planes.

    If sequences share their angles and a token has at most `by_position` heads of q and k, batch and token axes are
    swapped: programs take one position of all sequences, then the next, so that cos and sin of a position are read from
    memory once. In the other order they are no longer in cache when the next sequence begins. With more heads the
    angles are a small part of the traffic, and accesses to distant sequences cost more.
    """
    token_axis = 3 - head_axis
    batch, seq_len, n_q_heads, head_dim = q.shape[0], q.shape[token_axis], q.shape[head_axis], q.shape[3]
    n_k_heads = 0 if k is None else k.shape[head_axis]
    plane, *cos_strides = cos.stride() if sections else (0, *cos.stride())
    by_batch, by_token = 0 if cos.shape[1 if sections else 0] == 1 else cos_strides[0], cos_strides[1]
    swapped = by_batch == 0 and batch > 1 and n_q_heads + n_k_heads <= by_position
    axes = (token_axis, head_axis, 0) if swapped else (0, head_axis, token_axis)

    def kernel_strides(strides):
        return Strides(0, 0, 0) if strides is None else Strides(*[strides[axis] for axis in axes])

    dense_q = _dense_strides(q.shape, head_axis, inside[0])
    k_strides, dense_k = (None, None) if k is None else (k.stride(), _dense_strides(k.shape, head_axis, inside[1]))
    half, passing = rotary_dim // 2, head_dim - rotary_dim
    return Geometry(
        rotary_key(batch, seq_len, n_q_heads, n_k_heads, head_dim, q.itemsize),
        axes,
        tuple(map(kernel_strides, (q.stride(), k_strides, dense_q, dense_k))),
        AngleStrides(by_token, 0, plane) if swapped else AngleStrides(by_batch, by_token, plane),
        batch * seq_len,
        batch if swapped else seq_len,
        (n_q_heads, n_k_heads),
        Head(half, passing, next_power_of_2(half), next_power_of_2(passing)),
    )


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a contiguous copy if the stride of the last dimension is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def unit_stride_angles(cos, sin, angles):
    """cos and sin with equal strides, 1 in the last dimension. COMPLEX: cos with strides [..., 2, 1], and None."""
    if angles == COMPLEX:
        return (cos if cos.stride()[-2:] == (2, 1) else cos.contiguous()), None
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        return cos.contiguous(), sin.contiguous()
    return cos, sin


def with_alignment(head: Head, *strides: Strides | AngleStrides) -> Head:
    """`head` with align 8 if every stride is a multiple of 8 elements, else 1."""
    return head._replace(align=1 if gcd(*chain(*strides)) & 7 else 8)


# -- launcher, operator and autograd ---------------------------------------------------------------------------------


class Rotary:
    """The tunables `<op>.fwd` and `<op>.bwd`, the operator `liger_hw::<op>` and the autograd of a rotary op.

    The operator takes cos [1 or B, T, width], with sections [3, 1 or B, T, width], COMPLEX [1 or B, T, half, 2].
    by_position: see `geometry_of`; heads_first: see `_rotary_kernel`
    flat: launch `_flat_rotary_kernel` for even head widths that are no power of two. The op's pairs must be halves with
    HALVES or SHARED angles, or pairs in input and output with COMPLEX angles.
    """

    def __init__(self, op: str, by_position: int = 0, heads_first: bool = True, flat: bool = False) -> None:
        self.by_position, self.heads_first, self.flat = by_position, heads_first, flat
        self.tunables = self.fwd, self.bwd = _tunable(op, "fwd", flat), _tunable(op, "bwd", flat)
        self.operator = define(
            f"{op}(Tensor q, Tensor? k, Tensor cos, Tensor? sin, int rotary_dim, int head_axis, bool q_inside,"
            " bool k_inside, bool pairs_in, bool pairs_out, int angles, int section_0, int section_1, bool backward)"
            " -> (Tensor, Tensor)",
            shapes="q, k [batch, ., ., width]; cos; sin",
            misfit=_misfit,
            launcher=self._launch,
            reference=_reference,
            fake=_fake,
        )

    def _launch(self, q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, *flags):
        q, k = unit_stride(q), None if k is None else unit_stride(k)
        *form, backward = flags
        form = Form(*form)
        cos, sin = unit_stride_angles(cos, sin, form.angles)
        inside = q_inside, k_inside
        geometry = geometry_of(q, k, cos, rotary_dim, head_axis, inside, self.by_position, form.section_1 > 0)
        out_q = dense_like(q, head_axis, q_inside)
        out_k = None if k is None else dense_like(k, head_axis, k_inside)
        if geometry.tokens:
            plan = (self.bwd if backward else self.fwd).plan(q.device, geometry.key)
            launch_args = self._flat_launch_args if self.flat and _is_flat(plan.key) else self._launch_args
            kernel, grid, constants, numbers = launch_args(geometry, plan, form, backward)
            launch(plan, kernel, grid, (q, k, cos, sin, out_q, out_k, *numbers), constants)
        return out_q, q.new_empty(0) if k is None else out_k

    def _launch_args(self, geometry: Geometry, plan: Plan, form: Form, backward: bool) -> tuple:
        """(kernel, grid, constexpr arguments, numbers) of a launch.

        The batch is a grid axis if this pads a sequence by at most a sixteenth. If a thread holds at most 8 elements of
        q, every head loads its angles, which avoids a broadcast through shared memory.
        """
        tokens, seq_len, (n_q_heads, n_k_heads) = geometry.tokens, geometry.seq_len, geometry.n_heads
        block_t, block_h = plan.config.blocks["BLOCK_T"], plan.config.blocks["BLOCK_H"]
        head_tiles, threads = cdiv(n_q_heads, block_h), plan.config.num_warps * plan.target.warp_size
        angles_per_head = block_t * block_h * geometry.head.block_half <= 4 * threads
        batches, programs = tokens // seq_len, cdiv(seq_len, block_t)
        fits_grid = batches <= 65535  # the largest size of a grid's second axis
        batch_on_grid = fits_grid and (batches == 1 or 16 * programs * block_t <= 17 * seq_len)
        if batch_on_grid:
            grid, tokens = (programs * head_tiles, batches), seq_len
        else:
            grid = (cdiv(tokens, block_t) * head_tiles,)
        tiles = Tiles(next_power_of_2(cdiv(n_k_heads, head_tiles)), head_tiles, batch_on_grid, angles_per_head)
        if backward:
            form = form._replace(pairs_in=form.pairs_out, pairs_out=form.pairs_in)
        strides = *geometry.strides, geometry.angles
        constants = with_alignment(geometry.head, *strides), form, tiles, self.heads_first, backward
        return _rotary_kernel, grid, constants, (*strides, tokens, seq_len, n_q_heads, n_k_heads)

    def _flat_launch_args(self, geometry: Geometry, plan: Plan, form: Form, backward: bool) -> tuple:
        """`_launch_args` for `_flat_rotary_kernel`."""
        tokens, seq_len, n_heads = geometry.tokens, geometry.seq_len, geometry.n_heads
        half, passing, *_ = geometry.head
        heads = gcd(*n_heads)
        groups = max(n_heads) // heads
        programs = cdiv(tokens * heads * (2 * half + passing), plan.config.blocks["BLOCK_SIZE"]) * groups
        strides = *geometry.strides, geometry.angles
        align = gcd(8, *chain(*strides))
        constants = geometry.head._replace(align=align), form.angles, heads, groups, seq_len < tokens, backward
        strides = [type(tensor)(*[n // align for n in tensor]) for tensor in strides]
        return _flat_rotary_kernel, (programs,), constants, (*strides, tokens, seq_len, *n_heads)

    def forward(self, ctx: Any, q, k, cos, sin, rotary_dim: int, head_axis: int, form: Form):
        ctx.layout = rotary_dim, head_axis, heads_inside(q, head_axis), heads_inside(k, head_axis)
        ctx.form = form
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)  # for an unused output, None instead of zeros
        return self.operator(q, k, cos, sin, *ctx.layout, *form, False)

    def backward(self, ctx: Any, dq, dk):
        cos, sin = ctx.saved_tensors
        if dq is not None and dk is not None:
            return self.operator(dq, dk, cos, sin, *ctx.layout, *ctx.form, True)
        rotary_dim, head_axis, q_inside, k_inside = ctx.layout
        dx, inside = (dk, k_inside) if dq is None else (dq, q_inside)
        if dx is not None:
            dx = self.operator(dx, None, cos, sin, rotary_dim, head_axis, inside, inside, *ctx.form, True)[0]
        return (None, dx) if dq is None else (dx, None)


class RotaryFunction(Function):
    """Autograd of a rotary op on (q, k, cos, sin or None, rotary_dim, unsqueeze_dim, form).

    core: the op's `Rotary`; is_cheap: whether outputs may be recomputed, from q and k, which are not saved
    """

    core: ClassVar[Rotary]
    is_cheap: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        core, is_cheap = cls.core, cls.is_cheap

        def forward(ctx, q, k, cos, sin, rotary_dim, unsqueeze_dim, form):
            outputs = core.forward(ctx, q, k, cos, sin, rotary_dim, unsqueeze_dim, form)
            for i, x in enumerate((q, k) if is_cheap else ()):
                inside = ctx.layout[2 + i]
                args = (x, None, cos, sin, rotary_dim, unsqueeze_dim, inside, inside, *form, False)
                offer(ctx, outputs[i], core.operator, args, 0, unsaved=x, number=i)
            return outputs

        def backward(ctx, dq, dk):
            return *core.backward(ctx, dq, dk), None, None, None, None, None

        backward.__qualname__ = f"{cls.__qualname__}.backward"
        cls.forward, cls.backward = staticmethod(forward), staticmethod(first_order(backward))


def _misfit(q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, *flags) -> str:
    return rotary_misfit(q, k, cos, sin, rotary_dim, head_axis, Form(*flags[:-1]))


def rotary_misfit(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    rotary_dim: int,
    head_axis: int,
    form: Form,
) -> str:
    """Why the shapes of an operator's tensors are invalid, or ""."""
    if head_axis not in (1, 2):
        return f"unsqueeze_dim must be 1 ([B, heads, T, D]) or 2 ([B, T, heads, D]), got {head_axis!r}"
    if k is not None and any(q.shape[axis] != k.shape[axis] for axis in (0, 3 - head_axis, 3)):
        return f"q and k must differ in heads only, got {tuple(q.shape)} and {tuple(k.shape)}"
    if not q.shape[head_axis] or k is not None and not k.shape[head_axis]:
        return "q and k need at least one head"
    batch, seq_len, head_dim = q.shape[0], q.shape[3 - head_axis], q.shape[3]
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        expected = f"must be even, from 2 to the head width {head_dim}"
        return f"rotary_dim, the number of dimensions that rotate, {expected}, got {rotary_dim}"
    if (sin is None) != (form.angles == COMPLEX):
        return "sin must be None with complex angles, and a tensor otherwise"
    half = rotary_dim // 2
    widths = (half, rotary_dim) if form.angles == SHARED else (rotary_dim,)
    ends = [(half, 2)] if form.angles == COMPLEX else [(width,) for width in widths]
    planes = (3,) if form.section_1 else ()
    expected = [(*planes, n, seq_len, *end) for n in (1, batch) for end in ends]  # sizes may be symbolic
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles is not None and (angles.shape not in expected or angles.shape != cos.shape):
            shapes = " or ".join(dict.fromkeys(str(list(shape)) for shape in expected))
            return f"{name} must be {shapes} to match q, got {list(angles.shape)}"
    return ""


def _reference(q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, *flags):
    options = cos, sin, rotary_dim, head_axis, Form(*flags[:-1]), flags[-1]
    out_q = dense_like(q, head_axis, q_inside).copy_(rotated(q, *options))
    return out_q, q.new_empty(0) if k is None else dense_like(k, head_axis, k_inside).copy_(rotated(k, *options))


def _fake(q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, *flags):
    return dense_like(q, head_axis, q_inside), q.new_empty(0) if k is None else dense_like(k, head_axis, k_inside)


# -- checks and samples that ops share -------------------------------------------------------------------------------

SMALL = ((1, 7, 3, 2, 22), (1, 3, 1, 1, 6), (2, 3, 5, 2, 16))


def check_no_gradient(op: str, *angles: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any([t.requires_grad for t in angles]):
        check(False, op, "the angles get no gradient; pass them detached")


def rotary_sample(sizes, dtype, device, generator, angles, kwargs=None, head_axis=1, transposed=False) -> Sample:
    """q, k and `angles`. transposed: q and k are transposed views of the other layout, as in Hugging Face models."""
    batch, seq_len, n_q_heads, n_k_heads, head_dim = sizes

    def states(heads):
        middle = (seq_len, heads) if transposed == (head_axis == 1) else (heads, seq_len)
        x = torch.randn(batch, *middle, head_dim, generator=generator, dtype=torch.float32, device=device).to(dtype)
        return (x.transpose(1, 2) if transposed else x).requires_grad_()

    return Sample(
        args=(states(n_q_heads), states(n_k_heads), *angles),
        kwargs=kwargs or {},
        reduction=2,
        grad_reduction=2,
        moved=4 * batch * seq_len * (n_q_heads + n_k_heads) * head_dim * dtype.itemsize,
    )
