"""Finds out who shards a weight (FSDP1, FSDP2, ZeRO-3, tensor parallelism or Megatron), and when it is whole.

`find_access` returns how a loss reads an output head's weight. Sharded data parallelism gathers it for the head's
forward, so the loss runs in place of that forward, inside its hooks (`Access.caller`). Tensor parallelism never gathers
it: the loss takes this rank's slice of the vocabulary (`Access.group`), as for Megatron's output layer (`find_slice`).
FSDP, DeepSpeed and DTensors are recognised by the names of hooks and classes, without importing them.
"""

from __future__ import annotations

import inspect
import types
import weakref
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn

from .. import private
from ..runtime.checks import TENSORS
from ..runtime.sharding import is_dtensor

FSDP2, ZERO3, TENSOR_PARALLEL, OTHER = "FSDP2", "ZeRO-3", "tensor parallel", "other"
"""Kinds of a module's hooks, by the code that registered them."""
_LINEAR_FORWARD = nn.Linear.forward if nn.Linear.forward.__globals__["__name__"] == nn.Linear.__module__ else None
"""torch's `nn.Linear.forward`, or None if a program has replaced it before this import."""


@dataclass(frozen=True)
class Access:
    """How the loss reads an output head's weight.

    linear: the `nn.Linear` that has the weight
    caller: the module whose call gathers the weight; the loss then runs in place of `linear`'s forward in that call.
    None if the weight is always whole
    slot: the attribute of `linear` that holds this forward
    mesh: the DeviceMesh over whose ranks the vocabulary is split; None for a whole weight
    layout: placement of the hidden states on that mesh
    """

    linear: nn.Linear
    caller: nn.Module | None = None
    slot: str = "forward"
    mesh: Any = None
    layout: Any = None

    @property
    def group(self) -> Any:
        """The process group over which the vocabulary is split, or None."""
        return None if self.mesh is None else self.mesh.get_group()

    def all_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of all rows, which sequence parallelism splits over ranks."""
        if self.mesh is None:
            return hidden
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, self.mesh, [self.layout], run_check=False)
        return hidden.redistribute(placements=[Replicate()]).to_local()

    def run(self, loss: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """`loss(hidden, weight, bias)` with the whole weight, or this rank's slice of it as a plain tensor."""
        linear = self.linear
        if self.mesh is not None:
            return loss(hidden, linear.weight.to_local(), None if linear.bias is None else linear.bias.to_local())
        if self.caller is None:
            _check_whole(linear.weight)
            return loss(hidden, linear.weight, linear.bias)
        losses = []

        def loss_forward(x: torch.Tensor) -> torch.Tensor:
            _check_whole(linear.weight)
            losses.append(loss(x, linear.weight, linear.bias))
            return losses[0]

        returned = redirected(self.caller, linear, self.slot, loss_forward, hidden)
        # FSDP casts a module's result to its output dtype, which is meant for logits
        return losses[0] if returned.dtype != losses[0].dtype else returned


def redirected(wrapper: Any, module: Any, slot: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`wrapper(*args, **kwargs)`, with `method` in place of `module`'s next forward. slot: attribute of the forward"""
    original = module.__dict__.get(slot)

    def restore() -> None:
        if original is None:
            module.__dict__.pop(slot, None)
        else:
            setattr(module, slot, original)

    def forward(*inner_args: Any, **inner_kwargs: Any) -> Any:
        restore()  # the method may call the module itself
        return method(*inner_args, **inner_kwargs)

    setattr(module, slot, forward)
    try:
        return wrapper(*args, **kwargs)
    finally:
        restore()


def head_loss(
    head: nn.Module,
    hidden: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
) -> torch.Tensor:
    """`loss(hidden, weight, bias)` of an output head, computed while FSDP or ZeRO-3 has its weight gathered.

    loss: a function that returns one tensor, such as a loss of `liger_hw.chunked_loss`. Call `head_loss` inside the
    forward of the model that the engine wraps. Raises `ValueError` for a head whose weight cannot be read: tensor
    parallel, quantised, with an adapter or with other hooks.
    """
    head = head.module if type(head).__name__ == "OutputHead" else head  # in a patched forward
    access = find_slice(head) if is_megatron(head) else find_access(head)
    if isinstance(access, str):
        raise ValueError(f"liger_hw.distributed.head_loss: this output head cannot be read; {access}")
    split = "liger_hw.distributed.head_loss: this output head's weight is split over ranks and never gathered;"
    if isinstance(access, VocabSlice):
        if access.group is not None:
            remedy = "liger_fused_linear_scaled_cross_entropy_tp takes this rank's slice and the group"
            raise ValueError(f"{split} {remedy}")
        return loss(hidden, access.weight, None)
    if access.mesh is not None:
        raise ValueError(f"{split} give liger_fused_linear_log_probs the hidden states and the weight as DTensors")
    return access.run(loss, hidden)


def _check_whole(weight: torch.Tensor) -> None:
    if weight.dim() != 2 or (type(weight) not in TENSORS and is_dtensor(weight)):
        raise RuntimeError(
            f"liger_hw: the output head's weight is a shard ({type(weight).__name__} {list(weight.shape)}) and the "
            "loss needs the whole weight. Call the wrapped model itself (model(...), not model.forward(...)), so that "
            "its hooks gather the weight, or shard the head as a unit of its own; otherwise apply the patch with "
            "fused_linear_cross_entropy=False."
        )


# -- which heads may be read ------------------------------------------------------------------------------------------

_CORRECT = "its logits are computed in full, which is right but takes their memory"
_PLAIN_WEIGHTS = ("Parameter", "Tensor", "DTensor", "FakeTensor", "FunctionalTensor")
"""Names of plain tensors' classes; Dynamo can compare names. Other classes may be quantised (torchao)."""


def _overrides(kind: type) -> set[Any]:
    methods = kind.__torch_function__, kind.__torch_dispatch__
    return {getattr(method, "__func__", method) for method in methods}


_TORCH_OVERRIDES = _overrides(torch.Tensor) | _overrides(nn.Parameter)
_HOOKS = f"its hooks need its logits; {_CORRECT}"
_ADAPTER = (
    f"it has an adapter (LoRA or alike), which the fused loss would leave out; {_CORRECT}. To fuse it, train the whole "
    "head with modules_to_save=['lm_head'] or leave it out of target_modules"
)
_TENSOR_PARALLEL = (
    "its tensor parallelism is not supported: the fused loss takes a weight split by rows over a mesh of one dimension "
    f"(ColwiseParallel) whose logits are returned whole or as a DTensor; {_CORRECT}"
)


def find_access(head: nn.Module) -> Access | str:
    """How the loss reads an output head's weight, or the reason why it cannot, with a remedy."""
    if type(head).__name__ == "FullyShardedDataParallel":
        inner = find_access(head._fsdp_wrapped_module)
        if isinstance(inner, str):
            return inner
        plain = inner.caller is None and inner.mesh is None and not hooks_of(head)
        return Access(inner.linear, head) if plain else _HOOKS
    hooks = hooks_of(head)
    if any(cls.__name__ == "ModulesToSaveWrapper" for cls in type(head).__mro__):  # FSDP2 makes a subclass of it
        adapters = head.active_adapters
        active = head.original_module if head.disable_adapters or not adapters else head.modules_to_save[adapters[0]]
        inner = find_access(active)
        if not hooks:
            return inner
        gathered = isinstance(inner, Access) and inner.mesh is None and not hooks & {OTHER, TENSOR_PARALLEL}
        return Access(inner.linear, head, inner.slot) if gathered else _HOOKS
    if hasattr(head, "base_layer"):
        return _ADAPTER
    if not isinstance(head, nn.Linear) or type(head).forward is not _LINEAR_FORWARD:
        return f"it is a {type(head).__name__}, not an nn.Linear; {_CORRECT}"
    if "parametrizations" in head._modules:  # checked before the weight is read, which would compute it
        return f"its weight is computed by a parametrization; {_CORRECT}"
    kind = type(head.weight)
    if kind.__name__ not in _PLAIN_WEIGHTS and not _overrides(kind) <= _TORCH_OVERRIDES:
        return f"its weight is a {kind.__name__}, not a plain tensor; {_CORRECT}"
    if TENSOR_PARALLEL in hooks or tensor_parallel_forward(head) is not None:
        return _sliced(head, hooks) or _TENSOR_PARALLEL
    if OTHER in hooks:
        return _HOOKS
    if "forward" in head.__dict__ and getattr(head.forward, "__func__", None) is not _LINEAR_FORWARD:
        hook, original = getattr(head, "_hf_hook", None), getattr(head, "_old_forward", None)
        placed = type(hook).__name__ == "AlignDevicesHook" and not hook.offload
        if placed and getattr(original, "__func__", None) is _LINEAR_FORWARD:
            return Access(head, head, "_old_forward")
        return f"its forward was replaced (offloading or another patch); {_CORRECT}"
    return Access(head, head if hooks else None)


def hooks_of(module: nn.Module) -> set[str]:
    """Kinds of a module's hooks: FSDP2, ZERO3, TENSOR_PARALLEL, or OTHER, also for hooks on every module."""
    if module._backward_hooks or module._backward_pre_hooks:
        return {OTHER}
    owners = set(map(_owner_of, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))
    return owners | {OTHER} if any(private.hooks_on_every_module) else owners


def _owner_of(hook: Any) -> str:
    function = inspect.unwrap(hook)  # on groups of modules FSDP2 registers functions that wrap its methods
    if getattr(function, "__module__", "") == "deepspeed.utils.nvtx":
        function = closure_of(function).get("func", function)
    owner = type(function.__self__) if inspect.ismethod(function) else function
    module = getattr(owner, "__module__", "")
    if module.startswith("torch.distributed.fsdp._fully_shard"):
        return FSDP2
    if module.startswith("deepspeed.runtime.zero."):
        return ZERO3
    return TENSOR_PARALLEL if _parallel_style(function) is not None else OTHER


def sharded_by(module: nn.Module) -> str:
    """Who shards parameters of a module or of a submodule: "FSDP1", FSDP2, ZERO3, TENSOR_PARALLEL or "".

    It can be called in the module's forward too, when FSDP and ZeRO-3 have gathered the parameters.
    """
    for part in module.modules():
        if type(part).__name__ == "FullyShardedDataParallel" or unknown_flattened(part):
            return "FSDP1"
        hooks = hooks_of(part)
        for owner in (FSDP2, ZERO3, TENSOR_PARALLEL):
            if owner in hooks:
                return owner
        if any(hasattr(p, "ds_shape") for p in part._parameters.values()):
            return ZERO3
        if any(is_dtensor(p) for p in part._parameters.values()):
            return TENSOR_PARALLEL
    return ""


def fsdp2_shards(module: nn.Module) -> int:
    """The largest number of devices over which FSDP2 shards a submodule. It can be called in a forward too."""
    states = (part._get_fsdp_state() for part in module.modules() if hasattr(part, "_get_fsdp_state"))
    groups = (vars(state).get("_fsdp_param_groups") or [vars(state).get("_fsdp_param_group")] for state in states)
    return max((group.mesh_info.shard_mesh_size for several in groups for group in several if group), default=1)


# -- tensor parallelism ----------------------------------------------------------------------------------------------


def closure_of(function: Any) -> dict[str, Any]:
    """The variables that a closure holds."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    empty = types.CellType()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells) if cell != empty}


def _parallel_style(hook: Any) -> tuple[str, tuple, Any] | None:
    """(name of a ParallelStyle class, its arguments, DeviceMesh) of a hook of torch's `distribute_module`, or None."""
    if getattr(hook, "__module__", "") != "torch.distributed.tensor._api":
        return None
    cells = closure_of(hook)
    partial = cells.get("input_fn", cells.get("output_fn"))
    name = getattr(getattr(partial, "func", None), "__qualname__", "")
    return name.rpartition(".")[0], getattr(partial, "args", ()), cells.get("device_mesh")


def tensor_parallel_forward(module: nn.Module) -> dict[str, Any] | None:
    """The closure of the forward that transformers' tensor parallelism set on a module, or None."""
    forward = module.__dict__.get("forward")
    if getattr(forward, "__module__", "") != "transformers.distributed.tensor_parallel":
        return None
    return closure_of(forward)


def _sliced(head: nn.Linear, hooks: set[str]) -> Access | None:
    """The Access to a weight whose rows, the vocabulary, are split over a mesh of one dimension, or None."""
    if not _split_by_rows(head.weight) or not (head.bias is None or _split_by_rows(head.bias)):
        return None
    cells = tensor_parallel_forward(head)
    if cells is not None:
        style, original = cells.get("self"), cells.get("original_forward")
        if hooks or type(style).__name__ != "ColwiseParallel":
            return None
        if getattr(original, "__func__", None) is not _LINEAR_FORWARD:
            return None
        layout, output, local = style.input_layouts, style.output_layouts, style.use_local_output
    else:
        styles = [_parallel_style(hook) for hook in (*head._forward_pre_hooks.values(), *head._forward_hooks.values())]
        if hooks != {TENSOR_PARALLEL} or "forward" in head.__dict__ or len(styles) != 2:
            return None
        (before, entering, _), (after, leaving, _) = styles
        if not before == after == "ColwiseParallel" or len(entering) != 2 or len(leaving) != 2:
            return None
        (layout,), ((output,), local) = entering[0], leaving
    whole = output.is_replicate() or (output.is_shard() and not local)
    return Access(head, mesh=head.weight.device_mesh, layout=layout) if whole else None


def _split_by_rows(weight: torch.Tensor) -> bool:
    return is_dtensor(weight) and len(weight.placements) == 1 and weight.placements[0].is_shard(0)


# -- Megatron --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VocabSlice:
    """This rank's slice of the weight of Megatron-core's output layer.

    weight: [part, hidden]; group: the process group over which the vocabulary is split, or None
    sequence_parallel: whether the layer is called with only this rank's rows of the hidden states
    """

    weight: torch.Tensor
    group: Any
    sequence_parallel: bool


def is_megatron(head: Any) -> bool:
    """Whether a module is Megatron-core's ColumnParallelLinear or a subclass."""
    return _column_parallel(head) is not None


def _column_parallel(head: Any) -> type | None:
    of_megatron = (c for c in type(head).__mro__ if c.__module__ == "megatron.core.tensor_parallel.layers")
    return next((c for c in of_megatron if c.__name__ == "ColumnParallelLinear"), None)


def find_slice(layer: nn.Module, weight: torch.Tensor | None = None) -> VocabSlice | str:
    """The VocabSlice of Megatron's output layer, or why the fused loss cannot read the weight.

    weight: the argument of the layer's call, if the layer uses the embedding's weight
    """
    weight = layer.weight if weight is None else weight
    if type(layer).forward is not _column_parallel(layer).forward:
        return f"it is a {type(layer).__name__} with a forward of its own; {_CORRECT}"
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks or any(private.hooks_on_every_module):
        return _HOOKS  # Megatron's own hooks, which gather parameters, run before the forward
    if weight is None or is_dtensor(weight) or weight.dim() != 2:
        return f"its weight is sharded by another owner (Megatron's FSDP); {_CORRECT}"
    if layer.bias is not None or layer.gather_output or layer.disable_grad_reduce or layer.is_expert:
        return f"it has a bias, gathers its logits or does not sum its gradient over the ranks; {_CORRECT}"
    if layer.config.defer_embedding_wgrad_compute:
        return f"its weight's gradient is deferred (defer_embedding_wgrad_compute); {_CORRECT}"
    group = layer.tp_group
    split = group is not None and group.size() > 1
    return VocabSlice(weight, group if split else None, bool(layer.sequence_parallel) and split)


# -- shapes ----------------------------------------------------------------------------------------------------------

_flattened: "weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, ...]]]" = weakref.WeakKeyDictionary()
"""Module -> shapes of its parameters that FSDP1 has flattened; see `store_flattened_shapes`."""


def store_flattened_shapes(model: nn.Module) -> None:
    """Store the shapes of the parameters that FSDP1 has flattened, which their modules no longer have."""
    for module in model.modules():
        handle = getattr(module, "_handle", None)
        if type(module).__name__ == "FullyShardedDataParallel" and handle is not None:
            flat = handle.flat_param
            for (name, owner, _), shape in zip(flat._param_infos, flat._shapes):
                _flattened.setdefault(owner, {})[name] = tuple(shape)
            for name, owner, _, first_name, first_owner, _ in flat._shared_param_infos:
                _flattened.setdefault(owner, {})[name] = _flattened[first_owner][first_name]


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Name -> shape of a module's gathered parameter, or None for an absent one (`bias=None`)."""
    shapes = {name: None if p is None else whole_shape(p) for name, p in module._parameters.items()}
    return shapes | _flattened.get(module, {})


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a gathered parameter. ZeRO-3's shards are empty tensors with the attribute `ds_shape`."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def head_width(linear: nn.Linear) -> int:
    """The width of a linear head's logits: the weight's, since `out_features` may differ."""
    shape = whole_shape(linear.weight)
    return shape[0] if len(shape) == 2 else linear.out_features  # under FSDP1 the weight may be a flat part


def unknown_flattened(module: nn.Module) -> list[str]:
    """Names of parameters that FSDP1 has flattened and whose shapes are not stored.

    With use_orig_params, between forwards, the module has flat parts as its parameters. Otherwise it has attributes of
    these names, which are views of the flat parameter.
    """
    flat = [name for name, p in module._parameters.items() if getattr(p, "_fsdp_flattened", False)]
    for name, value in vars(module).items():
        part = value._local_tensor if is_dtensor(value) else value
        if isinstance(part, torch.Tensor) and getattr(part._base, "_is_flat_param", False):
            flat.append(name)
    known = _flattened.get(module, {})
    return [name for name in flat if name not in known]
