"""Runs liger_hw's functions on DTensors, by the rule in a Function's attribute `sharding` (`runtime/sharding.py`).

The rule defines the placements that the tensors need. The op runs on the local parts; its results are DTensors again.
docs/distributed.md has a table of ops and placements. Other placements raise `ShardingError`.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Callable, NoReturn, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..runtime.sharding import RotaryRule, RowsRule

Placements = tuple[Any, ...]


class ShardingError(ValueError):
    """A function does not support the placements of its arguments."""


def apply(function: Any, args: Sequence[Any]) -> Any:
    """`function.apply(*args)` of an op's autograd.Function, for args with DTensors among them."""
    rule = function.sharding
    if rule is None:
        refuse(function.__module__.rpartition(".")[2], args)
    call = _Call(function, args)
    if isinstance(rule, RowsRule):
        return _rows(call, rule)
    if isinstance(rule, RotaryRule):
        return _rotary(call, rule)
    return LOSSES[rule.kind](call)


def refuse(name: str, args: Sequence[Any]) -> NoReturn:
    """Raise `ShardingError` for an op that takes only plain tensors."""
    placements = ", ".join(str(arg.placements) for arg in args if isinstance(arg, DTensor))
    raise ShardingError(
        f"liger_hw: {name} takes no DTensor (placements {placements}). Run it on the local parts (to_local()) where "
        "they are independent, or on whole tensors (full_tensor()), or leave this part of the model unpatched"
    )


@cache
def _defaults(function: Any) -> dict[str, Any]:
    """Name -> default of the arguments of a Function's `forward` after ctx, in their order."""
    _, *parameters = inspect.signature(function.forward).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters}


class _Call:
    """One call of a Function. args: its arguments by name; mesh: the DeviceMesh of all DTensors among them"""

    def __init__(self, function: Any, args: Sequence[Any]) -> None:
        self.function = function
        self.args = {**_defaults(function), **dict(zip(_defaults(function), args))}
        self.name = function.__module__.rpartition(".")[2]
        tensors = [arg for arg in args if isinstance(arg, DTensor)]
        self.mesh = tensors[0].device_mesh
        if any(arg.device_mesh != self.mesh for arg in tensors):
            meshes = ", ".join(str(arg.device_mesh) for arg in tensors)
            self.fail(f"its tensors are on different meshes: {meshes}", "redistribute them to one mesh")

    def fail(self, what: str, remedy: str) -> NoReturn:
        raise ShardingError(f"liger_hw: {self.name}: {what}; {remedy}")

    def placements(self, x: Any, *gathered: int) -> Placements:
        """The placements of x, with Replicate for all but shards along other dimensions than `gathered`."""
        if not isinstance(x, DTensor):
            self.fail("its input is a plain tensor and another argument a DTensor", _WRAP)
        axes = {axis % x.dim() for axis in gathered}
        return tuple(p if type(p) is Shard and p.dim % x.dim() not in axes else Replicate() for p in x.placements)

    def local(self, x: Any, placements: Placements, grads: Placements | None = None) -> Any:
        """This rank's part of x with these placements. grads: placements of the gradient, if they differ

        A plain tensor counts as replicated. If it needs a gradient, it is refused: ranks might have to sum that.
        """
        if not isinstance(x, torch.Tensor):
            return x
        if not isinstance(x, DTensor):
            if x.requires_grad:
                self.fail("a plain tensor that needs a gradient is passed with a DTensor", _WRAP)
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return x.redistribute(placements=placements).to_local(grad_placements=grads)

    def weight(self, w: Any, rows: Placements) -> Any:
        """A weight, replicated. rows: placements of its rows; if these are sharded, its gradient is a partial sum"""
        return self.local(w, (Replicate(),) * self.mesh.ndim, tuple(Partial() if type(p) is Shard else p for p in rows))

    def whole(self, part: torch.Tensor, placements: Placements, shape: Sequence[int] | None = None) -> DTensor:
        """A DTensor with `part` as this rank's part. shape: the DTensor's, needed if parts differ in size"""
        if shape is None:
            return DTensor.from_local(part, self.mesh, placements, run_check=False)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def run(self, **changed: Any) -> Any:
        """The op on plain tensors; changed: arguments that replace the call's."""
        return self.function.apply(*{**self.args, **changed}.values())


_WRAP = "make it a DTensor: DTensor.from_local(x, mesh, placements), or take to_local() of the others"


# -- norms, gates, rope ----------------------------------------------------------------------------------------------


def _rows(call: _Call, rule: RowsRule) -> Any:
    x = call.args[rule.inputs[0]]
    placements = call.placements(x, *rule.gathered)
    parts = {name: call.local(call.args[name], placements) for name in rule.inputs}
    parts |= {name: call.weight(call.args[name], placements) for name in rule.weights}
    results = call.run(**parts)
    wholes = tuple(
        call.whole(part, placements, (*x.shape[:-1], part.shape[-1] if rule.gathered else x.shape[-1]))
        for part in (results if isinstance(results, tuple) else (results,))
    )
    return wholes if isinstance(results, tuple) else wholes[0]


def _rotary(call: _Call, rule: RotaryRule) -> Any:
    """cos and sin are sharded along the batch and the tokens as q and k are."""
    q, k = call.args["q"], call.args["k"]
    tokens = 3 - call.args["unsqueeze_dim"]
    placements = call.placements(q, 3)
    parts = {name: call.local(call.args[name], placements) for name in ("q", "k")}
    parts |= {name: call.weight(call.args[name], placements) for name in rule.weights}

    for name in ("cos", "sin"):
        t = call.args[name]
        dims = {0: 0 if t.shape[0] > 1 else None, tokens: 1}  # dimension of q -> of cos and sin
        axes = [dims.get(p.dim % 4) if type(p) is Shard else None for p in placements]
        parts[name] = call.local(t, tuple(Replicate() if axis is None else Shard(axis) for axis in axes))
    rotated = call.run(**parts)
    return tuple(call.whole(part, placements, whole.shape) for part, whole in zip(rotated, (q, k)))


# -- losses ----------------------------------------------------------------------------------------------------------


def _vocab_axis(call: _Call, t: DTensor, dim: int) -> int | None:
    """The mesh dimension along which `dim` of t, the vocabulary, is sharded, or None. Raises if a rank has no part."""
    axes = [i for i, p in enumerate(t.placements) if type(p) is Shard and p.dim % t.dim() == dim]
    if len(axes) > 1:
        call.fail(f"the vocabulary is sharded along {len(axes)} mesh dimensions", "shard it along one")
    if axes:
        world = call.mesh.size(axes[0])
        if -(-t.shape[dim] // world) * (world - 1) >= t.shape[dim]:
            call.fail(f"a vocabulary of {t.shape[dim]} leaves one of {world} ranks without a part", "use fewer ranks")
    return axes[0] if axes else None


def _reduced(
    call: _Call, losses: torch.Tensor, target: torch.Tensor, placements: Placements, n_rows: int, options: Any
) -> DTensor:
    """This rank's `losses` of rows with these placements, reduced over all rows. options: the loss's"""
    if options.reduction == "none":
        return call.whole(losses, placements, (n_rows,))
    total = losses.float().sum() if losses.dtype.itemsize < 4 else losses.sum()
    summed = tuple(Partial() if type(p) is Shard else Replicate() for p in placements)
    everywhere = (Replicate(),) * call.mesh.ndim
    loss = call.whole(total, summed).redistribute(placements=everywhere)
    if options.reduction == "mean":
        counted = (target != options.ignore_index).sum().to(total.dtype)
        loss = loss / call.whole(counted, summed).redistribute(placements=everywhere)
    return loss.to(losses.dtype)


def _cross_entropy(call: _Call) -> Any:
    logits, target, weight, options = (call.args[name] for name in ("_input", "target", "weight", "options"))
    placements = call.placements(logits)
    axis = _vocab_axis(call, logits, 1)
    rows = tuple(Replicate() if i == axis else p for i, p in enumerate(placements))
    sharded = any(type(p) is Shard for p in rows)
    if any(options.extra) or sharded and weight is not None and options.reduction == "mean":
        call.fail("return_* and a weighted mean are not supported for DTensors", "take full_tensor() of the logits")
    y = call.local(target, rows)
    if axis is None:
        parts = {"_input": call.local(logits, rows), "target": y, "weight": call.weight(weight, rows)}
        if not sharded:
            return call.whole(call.run(**parts), rows)
        losses = call.run(**parts, options=options._replace(reduction="none"))
    else:
        if weight is not None or options.lse_square_scale or options.softcap:
            call.fail("a sharded vocabulary supports no class weight, z-loss or softcap", "gather the logits")
        from ..kernels.losses.vocab_parallel_cross_entropy import liger_vocab_parallel_cross_entropy

        settings = call.mesh.get_group(axis), options.ignore_index, options.label_smoothing
        losses = liger_vocab_parallel_cross_entropy(call.local(logits, placements), y, *settings)
        losses = losses.to(logits.dtype)
    return _reduced(call, losses, y, rows, logits.shape[0], options)


def _head_rows(call: _Call, x: Any, weight: Any) -> tuple[int | None, Placements]:
    """(mesh dimension along which the vocabulary is sharded, or None; placements of the hidden states).

    Along that mesh dimension the tensor-parallel head takes the same number of rows from every rank, or all rows.
    """
    if not isinstance(weight, DTensor):
        call.fail("the hidden states are a DTensor and the weight is a plain tensor", _WRAP)
    rows, axis = call.placements(x, 1), _vocab_axis(call, weight, 0)
    if any(p != (Shard(0) if i == axis else Replicate()) for i, p in enumerate(weight.placements)):
        call.fail(f"its weight has placements {weight.placements}", "shard the weight by rows, or replicate it")
    if axis is None:
        return None, rows
    if x.shape[0] % call.mesh.size(axis):
        rows = tuple(Replicate() if i == axis else p for i, p in enumerate(rows))
    if any(type(p) is Shard for i, p in enumerate(rows) if i != axis):
        call.fail(f"rows sharded along another mesh dimension ({x.placements})", "use a mesh of the vocabulary's ranks")
    return axis, rows


def _head(call: _Call) -> Any:
    names = "_input", "weight", "target", "bias", "ce_weight", "call"
    x, weight, target, bias, ce_weight, numbers = (call.args[name] for name in names)
    options, reduction = numbers.options, numbers.options.reduction
    axis, rows = _head_rows(call, x, weight)
    everywhere = (Replicate(),) * call.mesh.ndim
    if axis is not None:
        if ce_weight is not None or options.use_token_scaling:
            call.fail("the tensor-parallel head has no class weight or token scaling", "gather the weight")
        from ..kernels.heads.fused_linear_cross_entropy_tp import tensor_parallel_head

        part = weight.placements
        output = tensor_parallel_head(
            call.local(x, rows),
            call.local(weight, part),
            call.local(target, everywhere),
            call.mesh.get_group(axis),
            call.local(bias, part),
            options,
            accum_dtype=torch.float32 if numbers.wide else None,
            sequence_parallel=type(rows[axis]) is Shard,
        )
        names = "loss", "z_loss", "token_accuracy", "predicted_tokens"
        results = (getattr(output, name, output if name == "loss" else None) for name in names)
        return tuple(t if t is None else call.whole(t, everywhere) for t in results)
    sharded = any(type(p) is Shard for p in rows)
    if sharded and (any(options.extra) or ce_weight is not None and reduction == "mean"):
        call.fail("return_* and a weighted mean are not supported for sharded rows", "gather the hidden states")
    y = call.local(target, rows)
    parts = {"_input": call.local(x, rows), "target": y, "order": None}
    parts |= {name: call.weight(call.args[name], rows) for name in ("weight", "bias", "ce_weight")}
    if not sharded:
        return tuple(call.whole(t, everywhere) for t in call.run(**parts))
    summed = options._replace(reduction="none" if reduction == "none" else "sum")
    losses = call.run(**parts, call=numbers._replace(options=summed))[0]
    return _reduced(call, losses, y, rows, x.shape[0], options), None, None, None


def _log_probs(call: _Call) -> Any:
    names = "x", "weight", "target", "bias", "ids", "call"
    x, weight, target, bias, ids, numbers = (call.args[name] for name in names)
    options = numbers.options
    axis, rows = _head_rows(call, x, weight)
    everywhere = (Replicate(),) * call.mesh.ndim
    if numbers.top and not isinstance(target, DTensor):
        call.fail("return_top1 compares the results with plain targets", _WRAP)
    if axis is None:
        parts = {"x": call.local(x, rows), "target": call.local(target, rows), "ids": call.local(ids, everywhere)}
        results = call.run(**parts, weight=call.weight(weight, rows), bias=call.weight(bias, rows))
        are_results = True, numbers.entropy, numbers.top, ids is not None
        return tuple(
            call.whole(t, rows, (x.shape[0], *t.shape[1:])) if is_result else t
            for t, is_result in zip(results, are_results)
        )
    others = numbers.top, options.softcap, numbers.wide, numbers.batch_invariant
    if bias is not None or ids is not None or any(others):
        known = "temperature, ignore_index and return_entropy"
        call.fail(f"the tensor-parallel head has no options but {known}", "gather the weight")
    from ..kernels.heads.fused_linear_scaled_cross_entropy import liger_fused_linear_scaled_cross_entropy_tp

    results = liger_fused_linear_scaled_cross_entropy_tp(
        call.local(x, everywhere),
        call.local(weight, weight.placements),
        call.local(target, everywhere),
        call.mesh.get_group(axis),
        temperature=options.temperature,
        ignore_index=options.ignore_index,
        return_entropy=numbers.entropy,
    )
    nll, entropy = results if numbers.entropy else (results, None)
    return -call.whole(nll, everywhere), None if entropy is None else call.whole(entropy, everywhere), None, None


LOSSES: dict[str, Callable[[_Call], Any]] = {
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _head,
    "linear_log_probs": _log_probs,
}
"""`LossRule.kind` -> function that runs the loss."""
