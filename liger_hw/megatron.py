"""Megatron-core with liger_hw's kernels: RMSNorm, SwiGLU, and the loss over a vocabulary split between ranks.

    from liger_hw.megatron import apply_liger_kernel_to_megatron
    apply_liger_kernel_to_megatron(linear_cross_entropy=True, swiglu=True)      # before the model is built

Names and arguments are as in `liger_kernel.megatron` of Liger Kernel 0.8.5. `linear_cross_entropy` is an addition: it
fuses output layer and loss, so that a GPTModel in training does not compute its logits. Only
`apply_liger_kernel_to_megatron` imports Megatron-core.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
from typing import Any, Callable, Iterator

import torch

from .distributed.owners import VocabSlice, find_slice, is_megatron
from .kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy
from .kernels.heads.fused_linear_cross_entropy_tp import liger_fused_linear_cross_entropy_tp
from .kernels.losses.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy
from .kernels.norms.rms_norm import liger_rms_norm
from .kernels.pointwise.fused_gate_up_swiglu import liger_fused_gate_up_swiglu
from .transformers.deferred import DeferredLogits, Surroundings
from .transformers.marks import is_ours, mark
from .transformers.report import ALREADY, PATCH_LOCK, PATCHED, Patch, PatchReport, PatchRow

log = logging.getLogger("liger_hw")


@functools.lru_cache(maxsize=64)  # one warning per reason
def _warn_not_fused(reason: str) -> None:
    log.warning("liger_hw: Megatron's linear cross-entropy is not used for this output layer: %s", reason)


class LigerMegatronRMSNorm(torch.nn.Module):
    """RMSNorm with the constructor of Megatron-core's norms. forward(x [..., hidden_size]) -> [..., hidden_size].

    config: a TransformerConfig, or an object with the attributes that are read here. If its `sequence_parallel` is
    set, the weight is tagged, and Megatron sums its gradient over the tensor-parallel ranks. zero_centered_gamma, or
    the config's `layernorm_zero_centered_gamma`: the weight begins at 0, and the scale is 1 + weight. The scale is
    applied in fp32 before rounding, as in torch's and Transformer Engine's RMSNorm. persist_layer_norm and
    normalization are ignored. Raises `ValueError` if the config's `normalization` is not "RMSNorm".
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        super().__init__()
        configured = getattr(config, "normalization", "RMSNorm")
        if configured != "RMSNorm" or normalization not in ("RMSNorm", "LayerNorm"):  # LayerNorm: Megatron's default
            raise ValueError(f"LigerMegatronRMSNorm: normalization must be RMSNorm, the config says {configured!r}")
        self.config, self.eps = config, eps
        self.zero_centered_gamma = bool(zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False))
        self._offset = 1.0 if self.zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=getattr(config, "params_dtype", None)))
        self.weight.sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 1.0 - self._offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return liger_rms_norm(x, self.weight, self.eps, self._offset, "gemma")

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LigerMegatronSwiGLU(torch.nn.Module):
    """`megatron.core.fusions.fused_bias_swiglu.bias_swiglu_impl` as a module, with the same arguments.

    forward(input [..., 2 * n_cols], bias, fp8_input_store, cpu_offload_input) -> [..., n_cols], the gate first.
    Calls with a bias, an fp8 store or offloading go to fallback_impl, with one warning for each reason, or raise
    `NotImplementedError` if it is not set. in_place is ignored.
    """

    def __init__(self, fallback_impl: Callable[..., torch.Tensor] | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.fallback_impl = fallback_impl
        self._logged: set[str] = set()

    def forward(
        self,
        input: torch.Tensor,
        bias: torch.Tensor | None = None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> torch.Tensor:
        if bias is None and not fp8_input_store and not cpu_offload_input:
            return liger_fused_gate_up_swiglu(input)
        if self.fallback_impl is None:
            raise NotImplementedError(
                "LigerMegatronSwiGLU has no bias, fp8 store or offloading; pass Megatron's bias_swiglu_impl as "
                "fallback_impl, or call apply_liger_kernel_to_megatron(swiglu=True), which leaves such calls alone"
            )
        reason = "a bias" if bias is not None else "an fp8 store" if fp8_input_store else "offloading"
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("LigerMegatronSwiGLU is falling back to fallback_impl for calls with %s", reason)
        return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """`LigerVocabParallelCrossEntropy` with Megatron's smoothing formula and mode `partition` as defaults.

    forward(vocab_parallel_logits [seq, batch, part], target [seq, batch], tp_group=None) -> [seq, batch] fp32
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "megatron",
        label_smoothing_mode: str = "partition",
    ) -> None:
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)


# -- the patch -------------------------------------------------------------------------------------------------------

_FUSED = (
    ("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy"),
    ("megatron.core.models.common.language_module.language_module", "fused_vocab_parallel_cross_entropy"),
    ("megatron.core.models.backends", "_fused_ce"),
)
_UNFUSED = (
    ("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"),
    ("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy"),
)
_LINEAR = (
    ("megatron.core.fusions.fused_linear_cross_entropy", "linear_cross_entropy"),
    ("megatron.core.transformer.linear_cross_entropy", "linear_cross_entropy"),
    ("megatron.core.models.common.language_module.language_module", "linear_cross_entropy"),
)
"""(module, name): first where the function is defined, then where any release of Megatron-core imports it by name."""


def apply_liger_kernel_to_megatron(
    rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False, linear_cross_entropy: bool = False
) -> PatchReport:
    """Patch megatron-core with the kernels, for models that are built afterwards. A second call changes nothing.

    rms_norm: norms of the local specs and the block's final norm, if Megatron would use torch's RMSNorm; norms of
    Transformer Engine and Apex are not replaced. cross_entropy: both of Megatron's losses over a split vocabulary.
    swiglu: the fused SwiGLU without bias, fp8 store and offloading. linear_cross_entropy: a GPTModel with labels does
    not compute logits; Megatron's `linear_cross_entropy` is replaced too, in releases that have it.
    Returns a report, whose `revert()` undoes everything. Raises `ImportError` if megatron-core, or a name that is to be
    patched, is missing.
    """
    report = PatchReport("megatron", "megatron-core")
    with PATCH_LOCK:
        if rms_norm:
            backends = _import_module("megatron.core.models.backends")
            provider = backends.LocalSpecProvider
            _replace(report, "rms_norm", "rms_norm", provider, "layer_norm", _layer_norm(provider.layer_norm))
            block = _import_module("megatron.core.transformer.transformer_block")
            torch_norm = getattr(_import_or_none("megatron.core.transformer.torch_norm"), "WrappedTorchNorm", None)
            if is_ours(block.LayerNormImpl) or block.LayerNormImpl is torch_norm:
                _replace(report, "rms_norm", "rms_norm", block, "LayerNormImpl", _norm_builder(block.LayerNormImpl))
        if cross_entropy:
            _replace_copies(report, _FUSED, liger_fused_vocab_parallel_cross_entropy)
            _replace_copies(report, _UNFUSED, liger_vocab_parallel_cross_entropy)
        if swiglu:
            fused = _import_module("megatron.core.fusions.fused_bias_swiglu")
            original = _attribute(fused, "SwiGLUFunction")
            _replace(report, "swiglu", "fused_gate_up_swiglu", fused, "SwiGLUFunction", _swiglu(original))
        if linear_cross_entropy:
            _patch_heads(report)
    return report


def _patch_heads(report: PatchReport) -> None:
    part, kernel = "linear_cross_entropy", "fused_linear_cross_entropy_tp"
    language = _import_module("megatron.core.models.common.language_module.language_module").LanguageModule
    gpt = _import_module("megatron.core.models.gpt.gpt_model").GPTModel
    if not hasattr(gpt, "_postprocess"):
        raise ImportError("apply_liger_kernel_to_megatron(linear_cross_entropy=True) needs megatron-core 0.13 or later")
    name = "compute_language_model_loss"
    _replace(report, part, kernel, language, name, _loss_of_deferred(getattr(language, name)))
    _replace(report, part, kernel, gpt, "_postprocess", _deferring(gpt._postprocess))
    if _import_or_none(_LINEAR[0][0]) is not None:
        _replace_copies(report, _LINEAR, linear_cross_entropy, part, kernel)


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"apply_liger_kernel_to_megatron requires megatron-core with {name}: {error}") from error


def _import_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _attribute(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        raise ImportError(
            f"apply_liger_kernel_to_megatron requires {module.__name__}.{name}, which this megatron-core does not "
            "have: the symbol path may have changed"
        )
    return getattr(module, name)


def _replace(report: PatchReport, part: str, kernel: str, owner: Any, name: str, replacement: Any) -> None:
    path = f"{owner.__name__}.{name}"
    if is_ours(getattr(owner, name)):
        report.rows.append(PatchRow(part, path, kernel, ALREADY))
        return
    mark(replacement, part, kernel)
    replacement.__wrapped__ = getattr(owner, name)
    report.change(PatchRow(part, path, kernel, PATCHED), Patch(owner, name, replacement))


def _replace_copies(
    report: PatchReport,
    places: tuple,
    replacement: Any,
    part: str = "cross_entropy",
    kernel: str = "vocab_parallel_cross_entropy",
) -> None:
    """Replace a function where it is defined, and the copies of it that other modules imported by name."""
    (defined_in, defined_as), *copies = places
    owner = _import_module(defined_in)
    original = _attribute(owner, defined_as)
    _replace(report, part, kernel, owner, defined_as, replacement)
    for module_name, name in copies:
        module = _import_or_none(module_name)
        current = getattr(module, name, None)
        if current is not None and (current is original or is_ours(current)):
            _replace(report, part, kernel, module, name, replacement)


def _layer_norm(original: Callable) -> Callable:
    @functools.wraps(original)
    def layer_norm(self: Any, rms_norm: bool = False, for_qk: bool = False, *args: Any, **kwargs: Any) -> Any:
        return LigerMegatronRMSNorm if rms_norm else original(self, rms_norm, for_qk, *args, **kwargs)

    return layer_norm


def _norm_builder(original: Any) -> type:
    class LayerNormImpl:
        """Builds a norm. It is a class because Megatron would use a function as a finished module."""

        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
            build = LigerMegatronRMSNorm if getattr(config, "normalization", None) == "RMSNorm" else original
            return build(config=config, hidden_size=hidden_size, eps=eps, **kwargs)

    return LayerNormImpl


def _tensor_parallel_group(group: Any) -> Any:
    """`group`, or for None the model's tensor-parallel group, as in Megatron's losses."""
    if group is not None:
        return group
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None  # a single process has no groups
    state = _import_module("megatron.core.parallel_state")
    return _attribute(state, "get_tensor_model_parallel_group")(check_initialized=False)


def liger_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Any, target: Any, label_smoothing: float = 0.0, tp_group: Any = None
) -> Any:
    """Replaces Megatron's loss."""
    loss = LigerMegatronCrossEntropy(label_smoothing=label_smoothing)
    return loss(vocab_parallel_logits, target, _tensor_parallel_group(tp_group))


def liger_fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Any, target: Any, tp_group: Any = None) -> Any:
    """Replaces Megatron's fused loss, which has no smoothing."""
    return liger_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)


def _swiglu(original: Any) -> Any:
    class SwiGLUFunction:
        """Replaces Megatron's autograd function. Megatron calls only `apply`."""

        @staticmethod
        def apply(input: torch.Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> torch.Tensor:
            if fp8_input_store or cpu_offload_input:
                return original.apply(input, fp8_input_store, cpu_offload_input)
            return liger_fused_gate_up_swiglu(input)

    return SwiGLUFunction


# -- output layer and loss fused -------------------------------------------------------------------------------------
#
# Megatron calls the output layer and passes its logits to `compute_language_model_loss`. During the `_postprocess` of a
# model with labels, `_deferring` makes the output layer return a `DeferredLogits`; the layer's hooks run as usual. The
# loss of `_loss_of_deferred` uses the hidden states and the weight. If other code reads the logits, they are computed.
# `find_slice` decides which layers can defer; other layers compute logits.


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp_group: Any = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """Replaces the function of this name in `megatron.core.fusions.fused_linear_cross_entropy`.

    hidden: [..., hidden]; weight: [part, hidden], this rank's rows; labels: of all tokens, in any shape. Returns the
    loss in fp32, [] or with reduction="none" [tokens]. The gradient of `hidden` is summed over the ranks.
    """
    rows, target = hidden.flatten(0, -2), labels.flatten()
    options = {"ignore_index": ignore_index, "reduction": reduction}
    if tp_group is None or tp_group.size() == 1:
        return liger_fused_linear_cross_entropy(rows, weight, target, **options)
    return liger_fused_linear_cross_entropy_tp(
        rows, weight, target, tp_group, sequence_parallel=sequence_parallel, **options
    )


class _Head:
    """The output head behind a `DeferredLogits`: one call of Megatron's output layer."""

    vocab_size = None  # unknown until logits are computed

    def __init__(self, layer: torch.nn.Module, vocab_slice: VocabSlice, compute: Callable[[], torch.Tensor]) -> None:
        self.layer, self.slice, self._compute = layer, vocab_slice, compute

    def logits(self, hidden: torch.Tensor, surroundings: Surroundings) -> torch.Tensor:
        with surroundings.restored():
            return self._compute()

    def has_gradient(self, hidden: torch.Tensor | None) -> bool:
        return True

    def deferred(self, hidden: torch.Tensor) -> DeferredLogits:
        """hidden: [tokens, batch, hidden], or this rank's tokens under sequence parallelism"""
        surroundings = Surroundings(hidden.device.type)
        whole = hidden
        if self.slice.sequence_parallel:  # `whole` has the shape of all tokens; its values are never read
            n_tokens = hidden.shape[0] * self.slice.group.size()
            whole = hidden.detach().new_zeros(1).expand(n_tokens, *hidden.shape[1:])
        return DeferredLogits(self, whole, surroundings, surroundings.dtype or hidden.dtype, head_input=hidden)


def _deferring(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPTModel._postprocess` in which the output layer defers its logits if there are labels."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def postprocess(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self, "output_layer", None)
        labels = signature.bind(self, *args, **kwargs).arguments.get("labels")
        is_patched = is_ours(type(self).compute_language_model_loss) and is_megatron(layer)
        if labels is None or not is_patched or not self.post_process or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        with _deferred(layer):
            return original(self, *args, **kwargs)

    return postprocess


@contextlib.contextmanager
def _deferred(layer: torch.nn.Module) -> Iterator[None]:
    """A context in which the layer returns deferred logits."""
    if "forward" in layer.__dict__:
        _warn_not_fused("its forward was replaced (another patch)")
        yield
        return

    def forward(
        input_: torch.Tensor, weight: Any = None, runtime_gather_output: bool | None = None, **more: Any
    ) -> Any:
        def compute(**options: Any) -> Any:
            return type(layer).forward(layer, input_, weight, runtime_gather_output, **options)

        vocab_slice = find_slice(layer, weight)
        if runtime_gather_output or more:
            return compute(**more)
        if isinstance(vocab_slice, str):
            _warn_not_fused(vocab_slice)
            return compute()
        return _Head(layer, vocab_slice, lambda: compute()[0]).deferred(input_), None

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def _loss_of_deferred(original: Callable[..., Any]) -> Callable[..., Any]:
    """`LanguageModule.compute_language_model_loss`, which also takes deferred logits."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: torch.Tensor, logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, DeferredLogits):
            return original(self, labels, logits, *args, **kwargs)
        if logits._parent is not None or not logits.is_deferred:
            return original(self, labels, logits.materialise(), *args, **kwargs)
        vocab_slice, hidden = logits._head.slice, logits._head_input
        target = labels.transpose(0, 1).contiguous()  # [batch, tokens] -> [tokens, batch], like the hidden states
        dtype = logits._surroundings.dtype
        weight = vocab_slice.weight if dtype is None else vocab_slice.weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            losses = linear_cross_entropy(
                hidden if dtype is None else hidden.to(dtype),
                weight,
                target,
                vocab_slice.group,
                reduction="none",
                sequence_parallel=vocab_slice.sequence_parallel,
            )
        return losses.view(target.shape).transpose(0, 1).contiguous()

    return compute_language_model_loss
