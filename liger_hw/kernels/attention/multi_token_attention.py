"""Multi-token attention: a convolution over causal attention weights, which mixes neighbouring queries and keys.

    P = softmax(scores where key <= query, else -inf)        or sparsemax
    Y = conv2d(P, weight, bias) where key <= query, else 0

The softmax is fp32, rounded once to the scores' dtype. The convolution is torch's, with the settings of
torch.backends.cudnn: it may use TF32 for fp32, and the order in which it sums gradients may vary. Saved for backward: P
and weight. Masked scores and masked gradients are not read.

Some convolution libraries use matrix units for 16-bit tensors only in the channels-last layout, and convert other
layouts first. On backends with `convolves_channels_last` the kernels here convert to and from channels last as they
read and write.

Source: Golovneva et al., "Multi-Token Attention", https://arxiv.org/abs/2504.00927
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Key, LaunchConfig, Sample, Target, Tunable, backend_of, normal, row_key, tile_space
from ...runtime.operator import (
    OperatorFunction,
    cdiv,
    check,
    check_flags,
    check_numbers,
    define,
    dense,
    empty_like,
    launch,
    no_weight,
)
from ...runtime.recording import repeated
from ..rows.reduce import column_sum, column_sum_tunable
from ..rows.tuning import row_tiles, rows_per_program, safe_whole_rows, whole_rows_misfit
from .multi_token_attention_kernels import (
    Strides,
    _causal_fill_kernel,
    _causal_softmax_bwd_kernel,
    _causal_softmax_fwd_kernel,
    _channels_fill_kernel,
    _channels_softmax_bwd_kernel,
    _channels_softmax_fwd_kernel,
)
from .softmax import softmax_bwd
from .sparsemax import sparsemax_bwd, sparsemax_fwd, sparsemax_reference


def multi_token_attention_reference(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False):
    """The specification in plain torch; sums in fp32 (fp64 for fp64). P is rounded before the convolution."""
    return _fwd_reference(scores, weight, bias, stride, padding, dilation, groups, sparse)[0]


def _fwd_reference(scores, weight, bias, stride, padding, dilation, groups, sparse):
    wide = torch.promote_types(scores.dtype, torch.float32)
    masked = scores.masked_fill(_future(scores), -float("inf"))
    p = sparsemax_reference(masked) if sparse else torch.softmax(masked, -1)
    parts = (p.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    y = torch.conv2d(*parts, stride, padding, dilation, groups)
    return y.masked_fill(_future(y), 0.0).to(scores.dtype).contiguous(), p.contiguous()


def _future(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


# -- tunables --------------------------------------------------------------------------------------------------------

MAX_KEYS = 32768
"""A program holds all keys of a query."""
_DIMS = ("batch", "seq_len", "n_channels")


def _key(batch: int, seq_len: int, n_channels: int, itemsize: int) -> Key:
    """A row is one query of one channel; its columns are the keys."""
    return row_key(batch * n_channels * seq_len, seq_len, itemsize)


def _heuristic(target: Target, key: Key) -> LaunchConfig:
    """Whole rows, 16 elements a thread; several short rows a program if that leaves no multiprocessor idle."""
    rows = rows_per_program(target, key[1], max(1, min(16, 2048 // key[0])))
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": rows}, target.warps(key[0] * rows, 16, 16))


def _space(target: Target, key: Key) -> list[LaunchConfig]:
    return tile_space(target, row_tiles({key[0]}), (1, 2, 4, 8, 16), per_thread=(4, 64))


def _tunable(variant: str, kernel, **rules) -> Tunable:
    rules = {"heuristic": _heuristic, "safe": safe_whole_rows, "space": _space, "valid": whole_rows_misfit} | rules
    return Tunable("multi_token_attention", variant, kernels=(kernel,), key=_key, dims=_DIMS, **rules)


FWD = _tunable("fwd", _causal_softmax_fwd_kernel)
BWD = _tunable("bwd", _causal_softmax_bwd_kernel)
FILL = _tunable("fill", _causal_fill_kernel)
BIAS = column_sum_tunable("multi_token_attention", _DIMS)
_MAX_COLUMN_SUM_ROWS = 1024
"""Most rows that `column_sum` adds; for more rows torch's sum is used, which has more programs."""
_MAX_CHANNELS_LAST_KEYS = 4096
"""Most keys for the kernels that convert to channels last: a program holds one query of several channels."""


def _channels_tunable(variant: str, kernel, max_elements: int) -> Tunable:
    """A program takes one query of up to 16 channels (32 contiguous bytes), fewer to hold at most max_elements."""

    def heuristic(target: Target, key: Key) -> LaunchConfig:
        channels = max(1, min(16, max_elements // key[0]))
        return LaunchConfig({"BLOCK_SIZE": key[0], "CHANNELS": channels}, target.warps(key[0] * channels, 64, 16))

    def space(target: Target, key: Key) -> list[LaunchConfig]:
        tiles = [{"BLOCK_SIZE": key[0], "CHANNELS": channels} for channels in (1, 2, 4, 8, 16, 32)]
        return tile_space(target, tiles, (1, 2, 4, 8, 16), per_thread=(8, 64))

    def channels_safe(target: Target, key: Key) -> LaunchConfig:
        return LaunchConfig({"BLOCK_SIZE": key[0], "CHANNELS": 1}, 4)

    return _tunable(variant, kernel, heuristic=heuristic, safe=channels_safe, space=space)


CHANNELS_FWD = _channels_tunable("channels_fwd", _channels_softmax_fwd_kernel, 32768)
CHANNELS_BWD = _channels_tunable("channels_bwd", _channels_softmax_bwd_kernel, 16384)
CHANNELS_FILL = _channels_tunable("channels_fill", _channels_fill_kernel, 32768)

# -- launchers -------------------------------------------------------------------------------------------------------


def _over_rows(tunable, tensors, flags=(), numbers=()) -> None:
    """Launch over the rows of contiguous tensors [..., queries, keys]. numbers: arguments after n_keys."""
    x = tensors[0]
    n_queries, n_keys = x.shape[-2:]
    n_rows = x.numel() // n_keys if n_keys else 0
    if n_rows:
        plan = tunable.plan(x.device, row_key(n_rows, n_keys, x.itemsize))
        args = (*tensors, n_rows, n_queries, n_keys, *numbers)
        launch(plan, tunable.kernels[0], (cdiv(n_rows, plan.config.blocks["ROWS"]),), args, flags)


def _over_queries(tunable: Tunable, tensors: tuple[torch.Tensor, ...], *others: torch.Tensor | None) -> None:
    """Launch over the queries of `tensors`, all [batch, channels, queries, keys] of one shape, with any strides."""
    batch, n_channels, n_queries, n_keys = tensors[0].shape
    if tensors[0].numel():
        plan = tunable.plan(tensors[0].device, row_key(batch * n_channels * n_queries, n_keys, tensors[0].itemsize))
        strides = [Strides(*t.stride()) for t in tensors]
        grid = (batch * n_queries * cdiv(n_channels, plan.config.blocks["CHANNELS"]),)
        args = (*tensors, *others, n_channels, n_queries, n_keys, *strides)
        launch(plan, tunable.kernels[0], grid, args)


def _fill(x, y, infinite=False, bias=None, sums=None) -> None:
    """y = x (+ bias) up to the diagonal, 0 after it (-inf if infinite). sums: gets x's row sums up to the diagonal."""
    in_place = x is y and bias is None
    _over_rows(FILL, (x, y, bias, sums), (infinite, in_place), (x.shape[1],))


def _empty_sums(dy: torch.Tensor) -> torch.Tensor:
    """A buffer [batch * queries, channels] in fp32 for the `sums` of `_fill`; zeros if dy is empty."""
    shape = dy.shape[0] * dy.shape[2], dy.shape[1]
    return (torch.empty if dy.numel() else torch.zeros)(shape, dtype=torch.float32, device=dy.device)


@repeated
def _bias_gradient(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bias's gradient [channels] from the sums of `_fill`."""
    return column_sum(BIAS, sums, dtype) if sums.shape[0] <= _MAX_COLUMN_SUM_ROWS else sums.sum(0).to(dtype)


def _fwd(scores, weight, bias, stride, padding, dilation, groups, sparse):
    scores = scores.contiguous()
    channels_last = _convolves_channels_last(scores, weight.shape[0], padding, groups, sparse)
    if channels_last:
        p, weight = _softmax_to_channels_last(scores), weight.contiguous(memory_format=torch.channels_last)
    else:
        p = empty_like(scores, scores.dtype)
        if sparse:
            _fill(scores, p, infinite=True)
            p = sparsemax_fwd(p)
        else:
            _over_rows(FWD, (scores, p))
    # `_fill` adds the bias, and in backward sums its gradient; torch would launch a kernel for each
    y = torch.conv2d(*_fp32_on_cpu(p, weight), None, stride, padding, dilation, groups).to(p.dtype)
    if channels_last:
        return _fill_channels(y, dense(bias), None, False), p
    y = y.contiguous()
    _fill(y, y, bias=dense(bias))
    return y, p


def _bwd(dy, p, weight, needed, stride, padding, dilation, groups, sparse):
    channels_last = _convolves_channels_last(p, weight.shape[0], padding, groups, sparse)
    sums = _empty_sums(dy) if needed[2] else None
    if channels_last:
        g, weight = _fill_channels(dy, None, sums, True), weight.contiguous(memory_format=torch.channels_last)
    else:
        dy, g = dy.contiguous(), empty_like(dy, dy.dtype)
        _fill(dy, g, sums=sums)
    dp, dweight = _convolution_gradients(g, p, weight, needed, stride, padding, dilation, groups)
    dbias = no_weight(p) if sums is None else _bias_gradient(sums, p.dtype)
    if needed[0] and channels_last:
        dp = _softmax_gradient(dp, p)
    elif needed[0]:
        dp = dp.contiguous()
        if sparse:
            dp = sparsemax_bwd(dp, p)
        else:
            _over_rows(BWD, (dp, p, dp))
    return dp, dweight.contiguous(), dbias


# -- channels last ---------------------------------------------------------------------------------------------------


def _convolves_channels_last(
    scores: torch.Tensor, n_filters: int, padding: tuple[int, ...], groups: int, sparse: bool
) -> bool:
    if sparse or groups > 1 or scores.itemsize != 2 or scores.shape[1] % 8 or n_filters % 8:
        return False
    fits = scores.shape[-1] + 2 * max(padding) <= _MAX_CHANNELS_LAST_KEYS
    return fits and backend_of(scores.device).convolves_channels_last


def _empty_channels_last(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


@repeated
def _softmax_to_channels_last(scores: torch.Tensor) -> torch.Tensor:
    p = _empty_channels_last(scores)
    _over_queries(CHANNELS_FWD, (scores, p))
    return p


@repeated
def _softmax_gradient(dp: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    dx = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    _over_queries(CHANNELS_BWD, (dp, p, dx))
    return dx


@repeated
def _fill_channels(
    x: torch.Tensor, bias: torch.Tensor | None, sums: torch.Tensor | None, channels_last: bool
) -> torch.Tensor:
    """`_fill` of a new tensor, channels last or contiguous, with zeros after the diagonal."""
    y = _empty_channels_last(x) if channels_last else x.new_empty(x.shape)
    _over_queries(CHANNELS_FILL, (x, y), bias, sums)
    return y


# -- the convolution, torch's ----------------------------------------------------------------------------------------


def _convolution_gradients(g, p, weight, needed, stride, padding, dilation, groups):
    """Gradients of p and weight, empty if not needed."""
    options = (None, stride, padding, dilation, False, (0, 0), groups, (*needed[:2], False))
    grads = torch.ops.aten.convolution_backward(*_fp32_on_cpu(g, p, weight), *options)
    return [grad.to(p.dtype) if is_needed else no_weight(p) for grad, is_needed in zip(grads[:2], needed)]


def _fp32_on_cpu(*tensors):
    """The tensors; 16-bit ones on the CPU become fp32, because torch's 16-bit convolutions there do not sum in fp32."""
    if tensors[0].device.type != "cpu" or tensors[0].dtype in (torch.float32, torch.float64):
        return tensors
    return tuple(t.float() for t in tensors)


def _bwd_reference(dy, p, weight, needed, stride, padding, dilation, groups, sparse):
    g = dy.masked_fill(_future(dy), 0.0)
    dp, dweight = _convolution_gradients(g, p, weight, needed, stride, padding, dilation, groups)
    dbias = no_weight(p)
    if needed[2]:
        dbias = g.sum((0, 2, 3), dtype=torch.promote_types(g.dtype, torch.float32)).to(g.dtype)
    if needed[0]:
        dp = (sparsemax_bwd if sparse else softmax_bwd)(dp.contiguous(), p)
    return dp, dweight.contiguous(), dbias


def _fwd_fake(scores, weight, bias, stride, padding, dilation, groups, sparse):
    channels_last = _convolves_channels_last(scores, weight.shape[0], padding, groups, sparse)
    p = _empty_channels_last(scores) if channels_last else scores.new_empty(scores.shape)
    return scores.new_empty(_output_shape(scores, weight, stride, padding, dilation)), p


def _bwd_fake(dy, p, weight, needed, stride, padding, dilation, groups, sparse):
    like = (p.shape, weight.shape, weight.shape[:1])
    return tuple(p.new_empty(shape) if is_needed else no_weight(p) for shape, is_needed in zip(like, needed))


def _misfit(scores, weight, bias, stride, padding, dilation, groups, sparse) -> str:
    if not (scores.shape[1] and scores.shape[2] and weight.numel()):
        return f"scores and weight must not be empty, got {tuple(scores.shape)} and {tuple(weight.shape)}"
    if scores.shape[3] > MAX_KEYS:
        return f"scores must have at most {MAX_KEYS} keys, got {scores.shape[3]}"
    if weight.shape[1] * groups != scores.shape[1] or weight.shape[0] % groups:
        have = f"{tuple(weight.shape)} with groups={groups}"
        return f"weight must be [out_channels, {scores.shape[1]} / groups, kh, kw] to match scores, got {have}"
    for i, size in enumerate(weight.shape[2:]):
        padded, span = scores.shape[2] + 2 * padding[-i], dilation[-i] * (size - 1) + 1
        if span > padded:
            shape = tuple(weight.shape[2:])
            return f"a kernel of {shape} spans {span} scores, but with padding={padding} there are only {padded}"
    return ""


def _bwd_misfit(dy, p, weight, needed, *options) -> str:
    if why_invalid := _misfit(p, weight, None, *options):
        return why_invalid
    shape = _output_shape(p, weight, *options[:3])
    return "" if dy.shape == shape else f"dy must have shape {shape} to match p and weight, got {tuple(dy.shape)}"


def _output_shape(scores, weight, stride, padding, dilation) -> tuple[int, ...]:
    spatial = (
        (scores.shape[2 + i] + 2 * padding[-i] - dilation[-i] * (weight.shape[2 + i] - 1) - 1) // stride[-i] + 1
        for i in range(2)
    )
    return scores.shape[0], weight.shape[0], *spatial


_OPTIONS = "int[] stride, int[] padding, int[] dilation, int groups, bool sparse"


class MultiTokenAttentionFunction(OperatorFunction):
    fwd = define(
        f"multi_token_attention_fwd(Tensor scores, Tensor weight, Tensor? bias, {_OPTIONS}) -> (Tensor y, Tensor p)",
        shapes="T scores [batch, ., length, length]; T weight [filters, ., height, width]; T bias [filters]",
        misfit=_misfit,
        launcher=_fwd,
        reference=_fwd_reference,
        fake=_fwd_fake,
        recorded=False,
    )
    bwd = define(
        f"multi_token_attention_bwd(Tensor dy, Tensor p, Tensor weight, bool[] needed, {_OPTIONS})"
        " -> (Tensor dscores, Tensor dweight, Tensor dbias)",
        shapes="T p [batch, ., length, length]; T weight [filters, ., height, width]; dy [batch, filters, ., .]",
        misfit=_bwd_misfit,
        launcher=_bwd,
        reference=_bwd_reference,
        fake=_bwd_fake,
        recorded=False,
    )


def _pair(n) -> tuple[int, ...]:
    return (n, n) if isinstance(n, int) else tuple(n)


def liger_multi_token_attention(
    scores: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    sparse: bool = False,
) -> torch.Tensor:
    """conv2d over the causal softmax (sparsemax if `sparse`) of attention scores; its result is masked causally again.

    scores: [B, in_channels, L, L], not masked yet, L at most 32768; weight: [out_channels, in_channels / groups, kh,
    kw]; bias: [out_channels] or None; all of one dtype, fp32, fp16 or bf16. stride, padding, dilation, groups: as in
    torch's conv2d; the first three are integers or pairs.
    Returns conv2d's shape, zero where the key's index is above the query's.
    Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_flags("liger_multi_token_attention", sparse=sparse)
    why_invalid = _numbers_misfit(groups=groups, stride=stride, dilation=dilation, padding=padding)
    check(not why_invalid, "liger_multi_token_attention", why_invalid)
    pairs = _pair(stride), _pair(padding), _pair(dilation)
    return MultiTokenAttentionFunction.apply(scores, weight, bias, *pairs, groups, sparse)


def _numbers_misfit(groups=1, **pairs) -> str:
    """Why an argument is invalid, or "". pairs: name -> an integer or a pair."""
    if not _is_integer(groups, 1):
        return f"groups must be a positive integer, got {groups!r}"
    for name, value in pairs.items():
        pair = _pair(value) if isinstance(value, (int, tuple, list)) else ()
        least = 0 if name == "padding" else 1
        if len(pair) not in (1, 2) or not all(_is_integer(n, least) for n in pair):
            return f"{name} must be an integer of at least {least}, or a pair of them, got {value!r}"
    return ""


def _is_integer(n: object, least: int) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= least


class LigerMultiTokenAttention(torch.nn.Module):
    """Multi-token attention layer, with the arguments of torch.nn.Conv2d (integers) and `sparse`. The weight is
    initialised Kaiming uniform, the bias with zeros."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        name = "LigerMultiTokenAttention"
        reason = _numbers_misfit(groups, kernel_size=kernel_size, stride=stride, dilation=dilation, padding=padding)
        check(not reason, name, reason)
        check_numbers(name, in_channels=in_channels, out_channels=out_channels)
        check_flags(name, bias=bias, sparse=sparse)
        fits = in_channels % groups == 0 and out_channels % groups == 0
        check(fits, name, f"groups={groups} must divide {in_channels} and {out_channels} channels")
        self.stride, self.padding, self.dilation, self.groups, self.sparse = stride, padding, dilation, groups, sparse
        self.weight = torch.nn.Parameter(torch.empty(out_channels, in_channels // groups, *_pair(kernel_size)))
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """scores: [batch, in_channels, length, length]; returns [batch, out_channels, length, length]."""
        options = (self.stride, self.padding, self.dilation, self.groups, self.sparse)
        return liger_multi_token_attention(scores, self.weight, self.bias, *options)

    def extra_repr(self) -> str:
        out_channels, per_group, *kernel = self.weight.shape
        return (
            f"{per_group * self.groups}, {out_channels}, kernel_size={tuple(kernel)}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, sparse={self.sparse}"
        )


WORKLOADS = {"llama_1b_1k": (4, 1024, 32), "llama_1b_2k": (1, 2048, 32)}
"""Sizes (batch, seq_len, n_channels); the channels are the attention heads."""


def _clear_of_threshold(scores: torch.Tensor) -> torch.Tensor:
    """The scores, lowered by one where they are near their row's threshold, at which the gradient jumps."""
    if not scores.numel():
        return scores
    masked = scores.float().masked_fill_(_future(scores), -float("inf"))
    p = sparsemax_reference(masked)
    threshold = torch.where(p > 0, masked - p, float("inf")).amin(-1, keepdim=True)
    return torch.where((masked - threshold).abs() < 1e-2, scores - 1, scores)


def sample(sizes, dtype, device, generator, *, bias=True, groups=False, sparse=False, stride=1) -> Sample:
    """A 3 x 3 kernel that keeps the size. groups: depthwise; stride > 1: a 2 x 2 kernel, dilation 2, no padding."""
    batch, seq_len, channels = sizes
    drawn, groups = normal(dtype, device, generator), channels if groups else 1
    size, padding, dilation = (2, 0, 2) if stride > 1 else (3, 1, 1)
    scores = drawn(batch, channels, seq_len, seq_len)
    if sparse:
        scores = _clear_of_threshold(scores.detach()).requires_grad_()
    weight = drawn(channels, channels // groups, size, size)
    elements = batch * channels * seq_len * seq_len
    return Sample(
        args=(scores, weight, drawn(channels) if bias else None),
        kwargs={"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "sparse": sparse},
        reduction=max(seq_len, 9 * channels // groups),
        grad_reduction=max(seq_len, 9 * channels, batch * seq_len * seq_len),
        moved=23 * elements // 2 * dtype.itemsize,
    )


OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD, FILL, BIAS, CHANNELS_FWD, CHANNELS_BWD, CHANNELS_FILL),
    small=((1, 9, 2), (2, 5, 1), (1, 37, 2)),
    options=({}, {"groups": True, "sparse": True, "bias": False, "stride": 2}),
)
