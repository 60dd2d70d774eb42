"""What the first step of a patched model will launch: its patched parts, run once on fake tensors.

A part is a module that takes one tensor and computes with a kernel: a norm, an MLP, a block of experts. A copy of it,
with fake parameters, runs forward and backward at the step's shape; of parts that are alike only one does. Rotary
functions run on the cos and sin that the model's own rotary embedding gives. So whatever the patch recognised (casting
mode, offset, activation, layout of the angles) is what is foreseen. The model's own loss function is given deferred
logits, so that labels come to the kernels as in the step (shifted, and of another alignment where the batch is one
sequence); where the user set the loss function, it is left alone and the output head's loss runs by its sizes.

Nothing of the model changes, no memory is taken and nothing is computed. `autotune/compile_ahead.py` compiles what the
rehearsal notes.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import torch
from torch import nn

from .. import registry
from ..autotune import compile_ahead, models
from ..autotune.record import tensors_in
from ..distributed import owners
from ..recompute import recipes
from ..recompute.dial import may_recompute
from .marks import PATCH_MARK, is_ours
from .probing import rotary
from .probing.probe import current_forward, is_customised

log = logging.getLogger("liger_hw")
_started: dict[int, Any] = {}
"""Configs that were looked at, by id; held, so that no other takes the id."""


class _Step(NamedTuple):
    """A training step of [batch, seq] tokens: the model's sizes, and the dtype and device of its activations."""

    facts: models.Model
    batch: int
    seq: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Loss(NamedTuple):
    """How a model's forward computes its loss.

    head: the output head
    function: (a stand-in for the head, hidden states, labels, softcap of the logits or None, arguments) -> the loss
    arguments: what else the loss function is given in the step, by name
    """

    head: nn.Module
    function: Callable[[nn.Module, torch.Tensor, torch.Tensor, float | None, Mapping[str, Any]], torch.Tensor]
    arguments: Mapping[str, Any]


def at_first_forward(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], loss: Loss | None = None) -> Any:
    """Called by a patched causal LM's forward with its arguments: compile what it launches, once for each model config
    of a process. Returns `compile_ahead.start`'s Future, or None where nothing is to be done.

    loss: None where the loss function may not be tried. Nothing is compiled under autocast, where an op's dtype is not
    the model's to say.
    """
    if id(model.config) in _started:
        return None
    _started[id(model.config)] = model.config
    given = [t for t in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if type(t) is torch.Tensor]
    if not given or given[0].dim() < 2 or not compile_ahead.is_wanted(given[0].device):
        return None
    device = given[0].device
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype is None or torch.is_autocast_enabled(device.type):  # a replica of nn.DataParallel has no parameters
        return None
    batch, seq = given[0].shape[:2]
    try:
        return compile_ahead.start(foresee(model, batch, seq, dtype, device, loss), device)
    except Exception as error:  # a step that compiles its kernels itself is no failure
        log.debug("liger_hw: nothing is compiled ahead: %s: %s", type(error).__name__, error)
        return None


def foresee(
    model: nn.Module,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    device: torch.device,
    loss: Loss | None = None,
) -> list[compile_ahead.Job]:
    """What to run on fake tensors for the launches of a step of [batch, seq] tokens, in the order of first launches.

    loss: without it the loss runs by its sizes alone. Raises `ValueError` for a config without the usual fields.
    """
    data = model.config.to_dict()
    step = _Step(models.from_config(data, type(model.config).__name__), batch, seq, dtype, device)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    modules = list(decoder.modules())
    jobs: dict[Any, compile_ahead.Job] = {}
    parts = list(_parts(decoder))
    _add_parts(jobs, [part for part in parts if not part._modules], step)  # norms
    embedding = next((m for m in modules if rotary.is_embedding(m)), None)
    forwards = dict.fromkeys(map(current_forward, modules))
    functions = dict.fromkeys(f for forward in forwards for f in rotary.functions_called(forward).values())
    norms = _norms_of_heads(modules)
    for function in functions:
        if hasattr(function, PATCH_MARK) and embedding is not None:
            jobs[function] = functools.partial(_run_rotary, function, _copied(embedding), step)
            if norms and may_recompute(model):
                again = functools.partial(_run_rotary_again, function, _copied(embedding), norms, step)
                jobs[function, norms] = again
    _add_parts(jobs, [part for part in parts if part._modules], step)
    jobs["loss"] = _loss_job(loss, data.get("final_logit_softcapping"), step)
    return list(jobs.values())


def _add_parts(jobs: dict[Any, compile_ahead.Job], parts: list[nn.Module], step: _Step) -> None:
    for part in parts:
        for shape in _input_shapes(part, step):
            key = _structure(part), shape
            if key not in jobs:
                jobs[key] = functools.partial(_run_part, _copied(part), shape, step)


def _loss_job(loss: Loss | None, softcap: float | None, step: _Step) -> compile_ahead.Job:
    if loss is not None and isinstance(loss.head, nn.Linear):
        return functools.partial(_run_loss, loss, softcap, step)
    op = registry.get_op("fused_linear_cross_entropy")
    (sizes,) = models.sizes_of(op.name, step.facts, step.batch, step.seq)
    return functools.partial(_run_op, op, sizes, step, {"softcap": softcap} if softcap else {})


# -- which parts there are -------------------------------------------------------------------------------------------


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that take one tensor and are patched, or have a part that is."""
    if not any(_is_patched(inner) for inner in module.modules()):
        return
    if _takes_one_tensor(current_forward(module)) and not _cannot_be_copied(module):
        yield module
        return
    for child in module.children():
        yield from _parts(child)


def _is_patched(module: nn.Module) -> bool:
    return any(
        is_ours(held) for slot in ("forward", "_apply_gate") if (held := getattr(module, slot, None)) is not None
    )


def _cannot_be_copied(module: nn.Module) -> bool:
    """Whether a call of a module, or of one in it, does more than a forward of its class or of ours, or whether what
    its parameters are when they are gathered is not known: then a copy cannot stand for it."""
    for inner in module.modules():
        if (is_customised(inner) and not is_ours(vars(inner).get("forward"))) or owners.forgotten(inner):
            return True
        own = [p for p in inner._parameters.values() if p is not None]
        if any(type(p) not in (nn.Parameter, torch.Tensor) and not owners.is_dtensor(p) for p in own):
            return True
    return False


@functools.cache
def _takes_one_tensor(forward: Callable) -> bool:
    parameters = [p for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return len(parameters) == 2 and parameters[1].kind is not parameters[1].VAR_POSITIONAL  # with self


def _norms_of_heads(modules: list[nn.Module]) -> tuple[nn.Module, nn.Module] | None:
    """The patched norms of q and of k in the first attention that has them."""
    for module in modules:
        found = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
        if all(isinstance(norm, nn.Module) and _is_patched(norm) for norm in found):
            return found
    return None


def _structure(module: nn.Module) -> tuple:
    """Equal for modules whose launches are alike at one shape of input."""
    inside = tuple(module.modules())
    classes = tuple((type(inner), current_forward(inner)) for inner in inside)
    shapes = tuple((n, owners.whole_shape(p), p.dtype, p.requires_grad) for n, p in module.named_parameters())
    return classes, shapes


def _input_shapes(part: nn.Module, step: _Step) -> list[tuple[int, ...]]:
    """The shapes of what a part is given: a norm's width is that of its weight, which may be a head's."""
    facts, batch, seq = step.facts, step.batch, step.seq
    shapes = [owners.whole_shape(p) for p in part._parameters.values() if p is not None]
    width = next((shape[0] for shape in shapes if len(shape) == 1), facts.hidden)
    if part._modules or width == facts.hidden:
        return [(batch, seq, facts.hidden)]
    if width == facts.head_dim:
        return [(batch, seq, heads, width) for heads in dict.fromkeys((facts.heads, facts.kv_heads))]
    return [(batch, seq, width)]


def _copied(module: nn.Module) -> nn.Module:
    """A module of the same classes, attributes, parameters and buffers, without hooks, whose own may be replaced."""
    copied = object.__new__(type(module))
    nn.Module.__init__(copied)
    for name, value in vars(module).items():
        if name not in vars(copied):
            is_bound = isinstance(value, types.MethodType) and value.__self__ is module
            copied.__dict__[name] = types.MethodType(value.__func__, copied) if is_bound else value
    copied.__dict__["training"] = module.training
    copied.__dict__["_parameters"] = dict(module._parameters)
    copied.__dict__["_buffers"] = dict(module._buffers)
    copied.__dict__["_modules"] = {n: None if c is None else _copied(c) for n, c in module._modules.items()}
    return copied


# -- running them, on fake tensors: forward at once, backward by what is returned ------------------------------------

_Backward = Callable[[], None]


def _run_part(part: nn.Module, shape: tuple[int, ...], step: _Step) -> _Backward:
    _with_fake_parameters(part, step.device)
    x = step.empty(*shape).requires_grad_()
    return functools.partial(_backward, part(x), [x, *part.parameters()])


def _run_rotary(function: Callable, embedding: nn.Module, step: _Step) -> _Backward:
    """A rotary function of (q, k, cos, sin); one of other arguments raises, and is compiled when it is launched."""
    facts, inputs, rotated = step.facts, [], []
    for cos, sin in _angles(embedding, step):
        q, k = (
            step.empty(step.batch, step.seq, heads, facts.head_dim).transpose(1, 2).requires_grad_()
            for heads in (facts.heads, facts.kv_heads)
        )
        inputs += q, k
        rotated.append(function(q, k, cos, sin))
    return functools.partial(_backward, rotated, inputs)


def _run_rotary_again(
    function: Callable, embedding: nn.Module, norms: tuple[nn.Module, nn.Module], step: _Step
) -> _Backward:
    """Normed heads are rotated again in backward, where a level says so: q alone, and k alone."""
    facts, inputs, rotated = step.facts, [], []
    for norm, heads in zip(map(_copied, norms), (facts.heads, facts.kv_heads)):
        _with_fake_parameters(norm, step.device)
        shapes = _input_shapes(norm, step)
        inputs.append((norm, step.empty(*shapes[0 if heads == facts.heads else -1]).requires_grad_()))
    for cos, sin in _angles(embedding, step):
        with recipes.Scope(recipes.CHEAP):
            q, k = (norm(x).view(step.batch, step.seq, -1, facts.head_dim).transpose(1, 2) for norm, x in inputs)
            rotated += [t.square() for t in function(q, k, cos, sin)]
    return functools.partial(_backward, rotated, [x for _, x in inputs])


def _angles(embedding: nn.Module, step: _Step) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin, for each kind of layer, of a rotary embedding that takes fake parameters here."""
    _with_fake_parameters(embedding, step.device)
    x = step.empty(step.batch, step.seq, step.facts.hidden)
    positions = torch.empty(1, step.seq, dtype=torch.int64, device=step.device)
    layer_types = dict.fromkeys(getattr(embedding, "layer_types", None) or ())
    for kind in [(t,) for t in layer_types] or [()]:
        yield embedding(x, positions, *kind)


def _run_loss(loss: Loss, softcap: float | None, step: _Step) -> _Backward:
    head = nn.Linear(step.facts.hidden, step.facts.vocab, loss.head.bias is not None, "meta", step.dtype)
    for own, parameter in zip((loss.head.weight, loss.head.bias), head.parameters()):
        parameter.requires_grad_(own.requires_grad)
    _with_fake_parameters(head, step.device)
    hidden = step.empty(step.batch, step.seq, step.facts.hidden).requires_grad_()
    labels = torch.empty(step.batch, step.seq, dtype=torch.int64, device=step.device)
    arguments = {
        name: _fake(value, value.device) if isinstance(value, torch.Tensor) else value
        for name, value in loss.arguments.items()
    }
    found = loss.function(head, hidden, labels, softcap, arguments)
    return functools.partial(_backward, found, [hidden, *head.parameters()])


def _run_op(op: Any, sizes: tuple[int, ...], step: _Step, options: Mapping) -> _Backward:
    sample = op.sample(sizes, step.dtype, step.device, None, **options)
    inputs = tensors_in((sample.args, sample.kwargs))
    return functools.partial(_backward, op.function(*sample.args, **sample.kwargs), inputs)


def _with_fake_parameters(module: nn.Module, device: torch.device) -> None:
    """Replace a copy's parameters and buffers by fakes of the same layout."""
    for inner in module.modules():
        inner._parameters |= {
            n: nn.Parameter(_fake(p, device), p.requires_grad) for n, p in _present(inner._parameters)
        }
        inner._buffers |= {n: _fake(b, device) for n, b in _present(inner._buffers)}


def _present(tensors: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(name, t) for name, t in tensors.items() if t is not None]


def _fake(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of the layout that a parameter has when it is gathered."""
    shape = owners.whole_shape(t)
    if owners.is_dtensor(t) or shape != tuple(t.shape):
        return torch.empty(shape, dtype=t.dtype, device=device)
    return torch.empty_strided(shape, t.stride(), dtype=t.dtype, device=device)


def _backward(outputs: Any, inputs: list[torch.Tensor]) -> None:
    outputs = [t for t in tensors_in(outputs) if t.requires_grad]
    inputs = [t for t in inputs if t.requires_grad]
    torch.autograd.grad(outputs, inputs, [torch.empty_like(t) for t in outputs], allow_unused=True)
