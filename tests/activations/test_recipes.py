"""Recipes: tensors that are computed again, bit for bit, and when they are freed."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import timeit
import weakref

import pytest
import torch
from small_decoder import HIDDEN, TOKENS, WIDE, Decoder, gradients, identical, some_input
from torch.multiprocessing.reductions import StorageWeakRef

import liger_hw
from liger_hw.kernels.norms.fused_add_rms_norm import liger_fused_add_rms_norm
from liger_hw.kernels.norms.layer_norm import liger_layer_norm
from liger_hw.kernels.norms.rms_norm import liger_rms_norm
from liger_hw.kernels.pointwise.fused_gate_up_swiglu import liger_fused_gate_up_swiglu
from liger_hw.kernels.pointwise.geglu import LigerGEGLUMLP, liger_geglu
from liger_hw.kernels.pointwise.relu_squared import liger_relu_squared
from liger_hw.kernels.pointwise.swiglu import liger_swiglu
from liger_hw.kernels.rotary.qk_norm_rope import liger_qk_norm_rope
from liger_hw.kernels.rotary.rope import liger_rope
from liger_hw.recompute import recipes

linear = torch.nn.functional.linear


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mlp", ["swiglu", "geglu"])
@pytest.mark.parametrize("dtype, autocast", [("float32", False), ("bfloat16", False), ("float32", True)])
@pytest.mark.parametrize("level", ["cheap", "mlp"])
def test_gradients_are_bit_identical(level, dtype, autocast, mlp, ledger):
    options = {"mlp": LigerGEGLUMLP, "act": "gelu_pytorch_tanh"} if mlp == "geglu" else {}
    model = Decoder(dtype=getattr(torch, dtype), **options)

    @contextlib.contextmanager
    def at(level):
        with liger_hw.activations(level), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            yield

    kept = gradients(model, at("keep"))
    assert not ledger.computed
    assert identical(gradients(model, at(level)), kept)
    assert {"rms_norm_fwd", f"{mlp}_fwd"} <= set(ledger.computed)
    assert ("linear" in ledger.computed) == (level == "mlp")


@pytest.mark.parametrize("level", ["cheap", "mlp"])
def test_what_is_kept(level, ledger):
    """Against torch's own saving: the outputs of both norms and of the gate go; at `mlp` gate and up as well."""
    model = Decoder(count=2)
    with torch.autograd.graph.saved_tensors_hooks(ledger.note, lambda t: t):
        model(some_input())
    everything = ledger.elements
    ledger.kept.clear()
    with liger_hw.activations(level):
        out = model(some_input())
    spared = 2 * HIDDEN + WIDE + (2 * WIDE if level == "mlp" else 0)
    assert everything - ledger.elements == 2 * TOKENS * spared
    del out


OPS = {
    "rms_norm": lambda x, w: liger_rms_norm(x, w, 1e-6),
    "layer_norm": lambda x, w: liger_layer_norm(x, w, w * 0.5, 1e-6),
    "fused_add_rms_norm": lambda x, w: liger_fused_add_rms_norm(x, x * 0.5, w, 1e-6)[0],
    "swiglu": lambda x, w: liger_swiglu(x * w, x),
    "geglu": lambda x, w: liger_geglu(x * w, x, "tanh"),
    "fused_gate_up_swiglu": lambda x, w: liger_fused_gate_up_swiglu(torch.cat((x * w, x), -1)),
    "relu_squared": lambda x, w: liger_relu_squared(x * w),
}


@pytest.mark.parametrize("name", OPS)
def test_every_op_that_offers(name, ledger):
    """A linear saves the op's output; it is computed again with the same bits."""
    head = normal(5, HIDDEN, seed=1)

    def run(level):
        x, w = normal(TOKENS, HIDDEN).requires_grad_(), normal(HIDDEN, seed=2).requires_grad_()
        weight = head.clone().requires_grad_()
        with liger_hw.activations(level):
            linear(OPS[name](x, w), weight).square().sum().backward()
        return [x.grad, w.grad, weight.grad]

    expected = run("keep")
    assert identical(run("cheap"), expected)
    assert len(ledger.computed) == 1


class _Exp(torch.autograd.Function):
    """Saves its own output, after making nodes of others in its forward."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            (x.detach().requires_grad_() * 2).exp()
        y = x.detach().exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


SAVE_THEIR_OUTPUT = {
    "exp": lambda x: x.exp(),
    "in place on a view": lambda x: (x * 1)[:2].exp_(),
    "several at once, in place": lambda x: torch._foreach_exp_([x * 1, x * 2])[0],
    "a Function": lambda x: _Exp.apply(x),
}


@pytest.mark.parametrize("level", ["cheap", "keep inside cheap"])
@pytest.mark.parametrize("name", SAVE_THEIR_OUTPUT)
def test_no_node_holds_itself(name, level):
    """What a node saves of its own output goes with the graph, without the garbage collector, which cannot see it."""
    x = normal(4, 8).requires_grad_()

    def run():
        with liger_hw.activations("cheap"), liger_hw.activations(level.split()[0]):
            y = SAVE_THEIR_OUTPUT[name](x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        return StorageWeakRef(y.untyped_storage()), gradient

    gc.disable()
    try:
        kept, found = run()
        assert kept.expired()
    finally:
        gc.enable()
    (expected,) = torch.autograd.grad(SAVE_THEIR_OUTPUT[name](x).square().sum(), x)
    assert torch.equal(found, expected)


def test_one_computation_serves_all_and_goes_with_the_last(ledger, monkeypatch):
    x, w = normal(4, 8).requires_grad_(), torch.ones(8, requires_grad=True)
    heads = [normal(3, 8, seed=i).requires_grad_() for i in range(3)]
    values, alive = [], []
    compute = recipes.Recipe._compute
    monkeypatch.setattr(recipes.Recipe, "_compute", lambda self: values.append(weakref.ref(v := compute(self))) or v)
    with liger_hw.activations("cheap"):
        y = liger_rms_norm(x, w, 1e-6)
        loss = sum(linear(y, head).square().sum() for head in heads)
        y.register_hook(lambda grad: alive.append(values[0]() is not None))  # when all three are through
        output = weakref.ref(y)
        del y
    assert output() is None, "the norm's output is still held"
    loss.backward()
    assert len(ledger.computed) == 1 and alive == [False]


def offered(x, w):
    """Whether an op on x has given its output's memory a recipe."""
    return bool(vars(liger_rms_norm(x, w, 1e-6).untyped_storage()))


def test_nothing_is_offered_outside_a_scope_or_without_gradients():
    x, w = normal(4, 8).requires_grad_(), torch.ones(8)
    assert not offered(x, w)
    with liger_hw.activations("keep"):
        assert not offered(x, w) and recipes.hooks_on_top(True) is None
    with torch.no_grad(), liger_hw.activations("cheap"):
        assert not offered(x, w) and recipes.hooks_on_top(True) is None
    with liger_hw.activations("cheap"):
        assert not offered(x.detach(), w), "what trains nothing saves nothing, so sparing adds"
        assert offered(x, w)
    assert recipes.hooks_on_top(True) is None


def test_scopes_nest_and_survive_exceptions():
    x, w = normal(4, 8).requires_grad_(), torch.ones(8)
    scope = liger_hw.activations("cheap")
    with pytest.raises(KeyError), scope:
        with liger_hw.activations("keep"):
            assert not offered(x, w)
        with scope:
            assert offered(x, w)
        assert offered(x, w)
        raise KeyError
    assert recipes.hooks_on_top(True) is None


# -- changed in place ------------------------------------------------------------------------------------------------


def test_a_changed_input_raises():
    h, w = (normal(4, 8).requires_grad_() * 1.0), torch.ones(8, requires_grad=True)
    with liger_hw.activations("cheap"):
        out = linear(liger_rms_norm(h, w, 1e-6), normal(3, 8, seed=1).requires_grad_())
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(
        RuntimeError, match="rms_norm_fwd.* cannot be computed again: argument 1 .* was changed in place"
    ):
        out.sum().backward()


def test_a_changed_foreign_tensor_raises_as_in_torch():
    x = normal(4, 8).requires_grad_() * 1.0
    with liger_hw.activations("cheap"):
        out = x.square()
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*is at version 1; expected version 0"):
        out.sum().backward()


class _Alias(torch.autograd.Function):
    """The same memory, written on the way if `factor` is not 1."""

    @staticmethod
    def forward(ctx, t, factor=1):
        ctx.factor, alias = factor, t.detach()
        return alias if factor == 1 else alias.mul_(factor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def _quietly(t):
    with torch.no_grad():
        t.mul_(1.5)


def _part(t):
    t[..., :3] = 0.5


def _other_memory(t):
    t.data = t.data * 1.5


BETWEEN = {
    "changed": (lambda y: y.mul_(2.0), 0),
    "changed without gradients": (lambda y: _quietly(y) or y, 0),
    "a part changed": (lambda y: _part(y) or y, 0),
    "an alias changed": (lambda y: _Alias.apply(y, 1.5), 0),
    "a detached alias changed": (lambda y: _quietly(y.detach()) or y, 0),
    "an alias of a clone": (lambda y: _Alias.apply(y.clone(), 1.5), 0),
    "a view": (lambda y: y.view(-1, 4).view(y.shape), 1),
    "a part of a view, changed": (lambda y: y.unsqueeze(0)[0].sigmoid_(), 0),
    "a copy in other strides": (lambda y: y.t().contiguous().t(), 0),
    "halves": (lambda y: torch.cat(y.chunk(2, -1)[::-1], -1), 0),
    "other memory": (lambda y: _other_memory(y) or y, 0),
    "another dtype and back": (lambda y: y.double().to(y.dtype), 0),
    # The last tokens alone go to the head: the whole output need not be held for them.
    "a slice": (lambda y: y[-2:], 1),
    # What ZeRO-3's hooks pass on: the same memory, another tensor, which autograd does not call a view.
    "an alias": (lambda y: _Alias.apply(_Alias.apply(y))[-2:], 1),
}
"""What happens to an output before it is read, and how often it is then computed again."""


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("between", BETWEEN)
def test_outputs_changed_or_viewed_before_they_are_saved(between, autocast, ledger):
    """Autocast's copy of it has a recipe under the same conditions, unless it is a copy of a part."""
    change, count = BETWEEN[between]

    def run(level):
        x, w, head = normal(5, 8).requires_grad_(), torch.ones(8), normal(3, 8, seed=1).requires_grad_()
        with liger_hw.activations(level), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            linear(change(liger_rms_norm(x, w, 1e-6)), head).square().sum().backward()
        return [x.grad, head.grad]

    assert identical(run("cheap"), run("keep"))
    n_computed = len(ledger.computed)
    assert n_computed == count or autocast and n_computed < count


def test_an_output_can_be_pickled_and_copied():
    with liger_hw.activations("cheap"):
        y = liger_rms_norm(normal(4, 8).requires_grad_(), torch.ones(8), 1e-6)
    for other in (pickle.loads(pickle.dumps(y)), copy.deepcopy(y.detach())):
        assert torch.equal(other, y) and "_liger_hw_recipe" not in vars(other.untyped_storage())


def test_a_recipe_does_not_outlive_its_outputs_memory(ledger):
    """An allocator uses the same addresses again."""
    w, head = torch.ones(8), normal(3, 8, seed=1).requires_grad_()
    results = []
    for level in ("cheap", "keep"):
        with liger_hw.activations(level):
            total = 0
            for seed in range(50):
                x = normal(5, 8, seed=seed).requires_grad_()
                recipe_alone = liger_rms_norm(x, w, 1e-6).exp()  # exp saves its result: the norm's output is freed
                total = total + linear(_Alias.apply(x * seed), head).square().sum() + recipe_alone.sum()
        results.append(torch.autograd.grad(total, head))
    assert identical(*results) and not ledger.computed


def test_two_outputs_in_one_memory_are_kept(ledger):
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            both = torch.stack((x * 2, x * 3))
            for i, output in enumerate(both):
                recipes.offer(ctx, output, torch.mul, (x, 2 + i))
            return both[0], both[1]

        @staticmethod
        def backward(ctx, a, b):
            return 2 * a + 3 * b

    x = normal(4, 8).requires_grad_()
    with liger_hw.activations("cheap"):
        a, b = Both.apply(x)
        (a.square() + b.square()).sum().backward()
    torch.testing.assert_close(x.grad, 26 * x.detach())
    assert not ledger.computed


@pytest.mark.parametrize("how", ["memory", "elements", "later"])
def test_a_weight_that_an_engine_frees_after_the_forward(how, ledger):
    """FSDP takes the memory of a weight, ZeRO-3 its elements; what ZeRO-3 may take after the output was saved says so.

    It is there again for the norm's own backward, which comes after that of the op that reads the norm's output.
    """

    def run(level):
        x, w = normal(5, 8).requires_grad_(), torch.nn.Parameter(normal(8, seed=2))
        head, whole = normal(3, 8, seed=1).requires_grad_(), w.detach().clone()
        if how == "later":
            w.ds_persist = False

        def gather(gradient):
            w.untyped_storage().resize_(whole.nbytes)
            w.data = whole

        def free():
            if how == "memory":
                w.untyped_storage().resize_(0)
            else:
                w.data = whole[:0]

        with liger_hw.activations(level):
            y = liger_rms_norm(x, w, 1e-6)
            y.register_hook(gather)
            if how != "later":
                free()
            out = linear(y, head)
            free()
            out.square().sum().backward()
        return [x.grad, w.grad, head.grad]

    assert identical(run("cheap"), run("keep")) and not ledger.computed


def test_tensors_without_memory_of_their_own_are_kept():
    x = normal(4, 8).requires_grad_()
    with liger_hw.activations("cheap"):
        torch.sparse.mm(x.detach().relu().to_sparse(), x.t()).square().sum().backward()
    found, x.grad = x.grad, None
    (x.detach().relu() @ x.t()).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


# -- backward, again and otherwise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["cheap", "mlp"])
def test_retain_graph_and_accumulation(level):
    def run(level):
        model, x = Decoder(count=2), some_input()
        with liger_hw.activations(level):
            loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with liger_hw.activations(level):
            model(x * 0.5).square().mean().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert identical(run(level), run("keep"))


def test_double_backward_is_refused():
    x = some_input()
    with liger_hw.activations("cheap"):
        loss = Decoder(count=1)(x).square().mean()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_dropped_graph_frees_its_recipes():
    x, w = normal(4, 8).requires_grad_(), torch.ones(8)
    with liger_hw.activations("cheap"):
        y = liger_rms_norm(x, w, 1e-6)
        recipe = weakref.ref(vars(y.untyped_storage())["_liger_hw_recipe"])
        out = (linear(y, normal(3, 8).requires_grad_()), y.exp(), y.square())
    del y, out
    gc.collect()
    assert recipe() is None


# -- other hooks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours_outside", [True, False])
def test_other_hooks(ours_outside, ledger):
    """The innermost hooks see every tensor of their region: ours step aside inside of others."""
    model = Decoder(count=2)
    expected = gradients(model, contextlib.nullcontext())
    seen = []
    foreign = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.detach(), lambda t: t)
    outer, inner = (
        (liger_hw.activations("cheap"), foreign) if ours_outside else (foreign, liger_hw.activations("cheap"))
    )
    first, second = model.layers

    class Mixed(torch.nn.Module):
        def forward(self, x):
            with outer:
                x = first(x)
                with inner:
                    return second(x)

    mixed = Mixed()
    mixed.layers = model.layers
    assert identical(gradients(mixed, contextlib.nullcontext()), expected)
    assert (len(ledger.computed) == 3) == ours_outside, "two norms and a gate of the layer that is ours"
    assert seen


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_checkpointing_on_some_layers(reentrant, backward_inside, ledger):
    model = Decoder(count=3)
    expected = gradients(model, contextlib.nullcontext())
    plain = model.layers[1].forward
    model.layers[1].forward = lambda x: torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=reentrant)
    found = gradients(model, liger_hw.activations("cheap"), backward_inside=backward_inside)
    assert identical(found, expected)
    assert len(ledger.computed) >= 6, "two layers of three"


def test_forbidden_hooks_are_respected():
    model = Decoder(count=1)
    expected = gradients(model, contextlib.nullcontext())
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert identical(gradients(model, liger_hw.activations("cheap")), expected)


# -- projections, rope -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_a_projection_with_hooks_or_a_replaced_forward_is_kept(how, ledger):
    """transformers' tensor parallelism replaces forwards; a plain product would be another number, or an error."""
    model = Decoder(count=1)
    projection = model.layers[0].mlp.gate_proj
    if how == "hook":
        projection.register_forward_hook(lambda *_: None)
    else:
        its_own = projection.forward
        projection.forward = lambda x: 2 * its_own(x)
    expected = gradients(model, contextlib.nullcontext())
    assert identical(gradients(model, liger_hw.activations("mlp")), expected)
    assert ledger.computed.count("linear") == 1


def test_one_computation_for_all_outputs(ledger):
    """q and k of the fused QK norm and rope: attention saves both, one launch makes both again."""
    angles = normal(1, 6, 4, seed=9)
    angles = torch.cat((angles, angles), -1)

    def run(level):
        heads = [normal(1, 6, count, 8, seed=count).requires_grad_() for count in (4, 2)]
        w = torch.ones(8, requires_grad=True)
        with liger_hw.activations(level):
            q, k = liger_qk_norm_rope(*(x.transpose(1, 2) * 1.5 for x in heads), w, w, angles.cos(), angles.sin())
            k = torch.cat((k, k), 1)
            out = (q @ k.transpose(-1, -2)) * q.sum()
        out.square().sum().backward()
        return [x.grad for x in heads]

    assert identical(run("cheap"), run("keep"))
    assert ledger.computed.count("qk_norm_rope_fwd") == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_rope_after_a_qk_norm(qk_norm, autocast, ledger):
    angles = normal(1, 6, 4, seed=9)
    angles = torch.cat((angles, angles), -1)

    def run(level):
        heads = [normal(1, 6, count, 8, seed=count).requires_grad_() for count in (4, 2)]
        w = torch.ones(8, requires_grad=True)
        with liger_hw.activations(level), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            q, k = (liger_rms_norm(x * 1.5, w, 1e-6) if qk_norm else x * 1.5 for x in heads)
            q, k = liger_rope(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin())
            k = k.repeat_interleave(2, 1)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        out.float().square().sum().backward()
        return [x.grad for x in heads]

    assert identical(run("cheap"), run("keep"))
    assert any("rope" in name for name in ledger.computed) == qk_norm


# -- what several read ------------------------------------------------------------------------------------------------


def test_a_value_is_kept_until_all_consumers_ran():
    """Two gates read one projection: the first to run backward must leave it for the second."""
    weights = [normal(6, 8, seed=i).requires_grad_() for i in range(3)]

    def run(level):
        x = normal(4, 8).requires_grad_()
        modules = [torch.nn.Linear(8, 6, bias=False) for _ in weights]
        for module, weight in zip(modules, weights):
            module.weight = torch.nn.Parameter(weight.detach().clone())
        with liger_hw.activations(level):
            a, b, c = (recipes.project(module, x) for module in modules)
            (liger_swiglu(a, b).square().sum() + liger_swiglu(a, c).square().sum()).backward()
        return [x.grad, *(m.weight.grad for m in modules)]

    assert identical(run("mlp"), run("keep"))


def test_tensors_without_a_recipe_cost_little():
    """Relative to `detach`, which is needed in any case."""
    t = (normal(4, 8).requires_grad_() * 2).view(32)
    with liger_hw.activations("cheap"), torch.no_grad():
        ours = min(timeit.repeat(lambda: recipes.unpack(recipes.pack(t)), number=100, repeat=300))
        detach = min(timeit.repeat(t.detach, number=100, repeat=300))
    assert ours < 4 * detach


# -- what makes it equal ---------------------------------------------------------------------------------------------


def test_torch_compile_decides_itself(caplog):
    model = Decoder(count=1)
    expected = gradients(model, contextlib.nullcontext())
    recipes._logged.clear()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        with liger_hw.activations("cheap"):
            return model(x)

    class Compiled(torch.nn.Module):
        def forward(self, x):
            return compiled(x)

    wrapped = Compiled()
    wrapped.layers = model.layers
    with caplog.at_level("INFO", "liger_hw"):
        inside = gradients(wrapped, contextlib.nullcontext())
        again = gradients(wrapped, liger_hw.activations("cheap"))
    for found in (inside, again):
        torch.testing.assert_close(found, expected)
    assert [r.message for r in caplog.records if "compile" in r.message] == [caplog.records[0].message]
