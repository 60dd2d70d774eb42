"""fused_moe: uneven and missing experts, slots without an expert, rows of NaN, layouts, engines, refusals."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import make, verify
from torch.torch_version import TorchVersion

from liger_hw import private
from liger_hw.backends import known_target
from liger_hw.kernels.moe import products
from liger_hw.kernels.moe.fused_moe import FusedMoEFunction, LigerExperts, fused_moe_reference, liger_fused_moe
from liger_hw.kernels.moe.reference import ExpertOptions, Gate
from liger_hw.registry import Sample, backend, get_op, override, pretend

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 9, 24, 16, 6, 2
ROUTES = {
    "all to one expert": [[2, 2]] * TOKENS,
    "most experts without a token": [[0, 5]] * (TOKENS - 1) + [[5, 0]],
    "an expert twice in a row": [[t % EXPERTS, t % EXPERTS] for t in range(TOKENS)],
    "some slots without an expert": [[-1, 1], [EXPERTS, EXPERTS], [3, 1 << 30]] * (TOKENS // 3),
    "no slot with an expert": [[EXPERTS, -7]] * TOKENS,
    "one token": [[4, 1]],
    "no token": [],
}


def sample(lane, generator, route, dtype=torch.float32, weights=None):
    """A layer with this routing; its weights (default: random, one of them zero)."""
    index = torch.tensor(route, dtype=torch.int64).reshape(-1, TOP_K).to(lane.device)

    def leaf(*shape):
        scale = shape[-1] ** -0.5 if len(shape) == 3 else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(lane.device, dtype).requires_grad_()

    if weights is None:
        weights = torch.rand(index.shape, generator=generator)
        weights[:1, :1] = 0.0
    weights = weights.to(lane.device, dtype).requires_grad_()
    up, down = leaf(EXPERTS, 2 * INNER, HIDDEN), leaf(EXPERTS, HIDDEN, INNER)
    return Sample((leaf(len(index), HIDDEN), up, down, index, weights), {}, HIDDEN, index.numel() + HIDDEN)


@pytest.mark.daily("interpret", route=("most experts without a token", "some slots without an expert", "no token"))
@pytest.mark.parametrize("route", ROUTES)
def test_routes(lane, generator, seed, route):
    verify(get_op("fused_moe"), sample(lane, generator, ROUTES[route]), seed)


@pytest.mark.lanes("gpu")
@pytest.mark.parametrize("experts", [257, 1024])
def test_many_experts(lane, seed, experts):
    op = get_op("fused_moe")
    verify(op, make(op, (700, 64, 32, experts, 8), torch.float32, lane.device, seed), seed)


@pytest.mark.lanes("interpret", "gpu")
def test_a_row_of_nan_stays_in_its_row(lane):
    """Token 4 is NaN and the only one of expert 3: no bit of another token or expert changes."""
    route = [[t % 3, 4] for t in range(TOKENS)]
    route[4] = [3, 3]
    found = []
    for value in (1.0, float("nan")):
        made = sample(lane, torch.Generator().manual_seed(0), route)
        with torch.no_grad():
            made.args[0][4] = value
        out = liger_fused_moe(*made.args)
        dx, dup, ddown, _, dweights = (None if a.dtype == torch.int64 else a for a in made.args)
        given = torch.ones_like(out)
        given[4] = value
        grads = torch.autograd.grad(out, [dx, dup, ddown, dweights], given)
        found.append([out.detach(), *grads])
    for name, clean, dirty in zip(("out", "dx", "dup", "ddown", "dweights"), *found):
        own = torch.zeros(len(clean), dtype=torch.bool)
        own[3 if name in ("dup", "ddown") else 4] = True
        assert torch.equal(clean[~own], dirty[~own]), name
        assert dirty[own].isnan().all(), name


@pytest.mark.lanes("interpret", "gpu")
def test_an_expert_of_nan_stays_with_its_tokens(lane, generator):
    made = sample(lane, generator, [[t % 3, 4] for t in range(TOKENS)])
    x, up, down, index, weights = made.args
    clean = liger_fused_moe(x, up, down, index, weights)
    with torch.no_grad():
        up[1], down[5] = float("nan"), float("nan")  # expert 5 has no tokens
    dirty = liger_fused_moe(x, up, down, index, weights)
    own = (index == 1).any(1)
    assert torch.equal(clean[~own], dirty[~own]) and dirty[own].isnan().all()


@pytest.mark.lanes("cpu", "interpret", "gpu")
def test_a_limit_bounds_an_infinite_pre_activation(lane, generator):
    """As torch's clamp does, also in the gradients: gpt-oss's experts overflow fp16 and go on."""
    drawn = sample(lane, generator, ROUTES["an expert twice in a row"])
    bias = torch.zeros(EXPERTS, 2 * INNER, device=lane.device)
    bias[1, 0], bias[2, INNER], bias[3, INNER + 1] = float("inf"), float("inf"), float("-inf")
    leaves = *(t for t in drawn.args if t.requires_grad), bias.requires_grad_()
    results = []
    for function in liger_fused_moe, fused_moe_reference:
        out = function(*drawn.args, gate_up_bias=bias, limit=1.0)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for ours, exact in zip(*results):
        assert exact.isfinite().all()
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("is_transposed", [False, True])
def test_layouts(lane, generator, is_transposed):
    """Strided rows, weights that are views of the other layout, an index and weights that are not contiguous."""
    made = sample(lane, generator, ROUTES["an expert twice in a row"])
    x, up, down, index, weights = (t.detach() for t in made.args)
    wide = torch.randn(TOKENS, HIDDEN + 3, generator=generator).to(lane.device)
    wide[:, :HIDDEN] = x
    views = [
        wide[:, :HIDDEN],
        up.mT.contiguous().mT,
        down.mT.contiguous().mT,
        index.T.contiguous().T,
        weights.expand(1, -1, -1)[0],
    ]
    if is_transposed:
        views[1:3] = up.mT, down.mT
    grads = []
    for tensors, transposed in ((made.args, False), (views, is_transposed)):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        out = liger_fused_moe(*leaves, is_transposed=transposed)
        wanted = [t for t in leaves if t.requires_grad]
        grads.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b if a.shape == b.shape else b.mT, rtol=1e-5, atol=1e-5)


@contextlib.contextmanager
def _products(blocks, tunables=products.TUNABLES, config=None):
    """Force a configuration (default: the safe one) with these blocks; products of rows have no TILES."""
    with contextlib.ExitStack() as stack:
        for tunable in tunables:
            base = config or tunable.safe(known_target("sm90"), ())
            of_weights = tunable in (products.UP_WEIGHTS, products.DOWN_WEIGHTS)
            sizes = {name: n for name, n in (base.blocks | blocks).items() if of_weights or name != "TILES"}
            stack.enter_context(override(tunable.name, replace(base, blocks=sizes)))
        yield


@pytest.mark.daily("interpret", tile="(16, 32, 16)")
@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("tile", [(16, 32, 16), (32, 16, 32), (64, 64, 64)])
def test_tiles(lane, seed, tile):
    """Tiles that divide no size."""
    op, sizes = get_op("fused_moe"), get_op("fused_moe").small[0]
    blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile))
    with _products({**blocks, "GROUP": 2}):
        verify(op, make(op, sizes, torch.float32, lane.device, seed, op.options[1]), seed)


@pytest.mark.lanes("interpret", "gpu")
def test_the_last_tile_is_of_half_the_height(lane, generator, seed):
    """Experts of 64, 65, 129 and no rows under tiles of 128."""
    route = [[0, 3]] * 64 + [[1, 1]] + [[1, 2]] * 63 + [[2, 2]] * 33
    with _products({"BLOCK_M": 128, "BLOCK_K": 16}, (products.UP, products.DOWN, products.DOWN_BWD, products.UP_BWD)):
        verify(get_op("fused_moe"), sample(lane, generator, route), seed)


SMALL, LARGE = (2048, 768, 128, 9, 2), (4096, 14336, 8, 12, 2)


def test_which_engine():
    """The library needs many rows an expert, 16 bits, and a device on which it is one launch."""

    def by_library(name, key):
        configs = [tunable.heuristic(known_target(name), key) for tunable in products.TUNABLES]
        return any(config.blocks["ENGINE"] == products.LIBRARY for config in configs)

    assert by_library("h200", LARGE)
    assert not by_library("h200", (*SMALL[:3], 5, 2)) and not by_library("h200", (*LARGE[:4], 4))
    assert not any(by_library(name, LARGE) for name in ("sm80", "sm120", "gfx942", "pvc"))


def test_the_engines_of_the_workloads_on_an_h200():
    """Chosen by timing both engines: benchmarks/results/moe-h200.json."""
    all_but_one = {t.variant for t in products.TUNABLES} - {"down_bwd"}
    expected = {
        "qwen3_30b_a3b": {"down_weights", "up_weights"},
        "qwen3_30b_a3b_8k": {"down_weights", "up_weights"},
        "qwen3_next": {"up_weights"},
        "gpt_oss_20b": {"up", "down_weights", "up_weights"},
        "deepseek_v3_quarter": all_but_one,
        "mixtral_8x7b": all_but_one,
    }
    for name, sizes in get_op("fused_moe").workloads.items():
        key, h200 = products.product_key(*sizes, 2), known_target("h200")
        engines = {t.variant: t.heuristic(h200, key).blocks["ENGINE"] for t in products.TUNABLES}
        assert {v for v, engine in engines.items() if engine == products.LIBRARY} == expected[name], name


def test_the_tuner_is_offered_both_engines():
    """Among the first configurations that its search measures."""
    from liger_hw.autotune import space

    for target, engines in (("h200", {products.KERNELS, products.LIBRARY}), ("sm80", {products.KERNELS})):
        for tunable in products.TUNABLES:
            for key in (SMALL, LARGE):
                legal, _ = space.legal(tunable, known_target(target), key)
                near = [legal[0], *space.neighbours(legal, legal[0])]
                assert {config.blocks["ENGINE"] for config in near} == engines, (target, tunable.name, key)


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("tiles", [1, 2, 16])
@pytest.mark.parametrize("route", ["all to one expert", "most experts without a token", "some slots without an expert"])
def test_several_tiles_a_program(lane, generator, seed, route, tiles, clean_registry):
    """Experts of several steps, of one and of none; TILES that divides the number of tiles, and that does not."""
    config = products._tile(16, 16, 16, 1, 2, TILES=tiles)
    with override("fused_moe.up_weights", config), override("fused_moe.down_weights", config):
        verify(get_op("fused_moe"), sample(lane, generator, ROUTES[route]), seed)


@pytest.mark.daily("interpret", options="1")
@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("options", range(len(get_op("fused_moe").options)))
def test_the_library(lane, monkeypatch, seed, options):
    """Products by torch._grouped_mm, whose CPU version is a loop."""
    op, called = get_op("fused_moe"), []
    original = private.grouped_matmul

    def counted(*args, **kwargs):
        called.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(private, "grouped_matmul", counted)
    dtype, target = torch.bfloat16, known_target("h200")
    if lane.device == "cpu":
        dtype = torch.float32
        monkeypatch.setattr(products, "_uses_library", lambda plan, *operands: True)
    elif products.UP.plan(torch.empty(0, device=lane.device).device, LARGE).target.arch not in ("sm90", "sm100"):
        pytest.skip("this device has no grouped GEMM of its own")
    config = products.UP_WEIGHTS.heuristic(target, LARGE)
    assert config.blocks["ENGINE"] == products.LIBRARY
    with _products({}, config=config) if lane.device != "cpu" else pretend(known_target("sm80")):
        verify(op, make(op, (40, 64, 32, 9, 2), dtype, lane.device, seed, op.options[options]), seed)
    assert len(called) == 6


@pytest.mark.lanes("interpret")
def test_a_library_that_fails_is_quarantined(lane, monkeypatch, generator, seed, clean_registry, caplog):
    """The step continues with the kernels of the safe configuration, and the library is not called again."""
    called = []

    def refused(*args, **kwargs):
        called.append(args)
        raise RuntimeError("torch._grouped_mm is only supported on CUDA devices with compute capability = 9.0")

    monkeypatch.setattr(private, "grouped_matmul", refused)
    monkeypatch.setattr(products, "_uses_library", lambda plan, *_: plan.config.blocks["ENGINE"] == products.LIBRARY)
    by_library = products._tile(16, 16, 16, 1, 1, products.LIBRARY, TILES=1)
    with caplog.at_level("WARNING", "liger_hw"), _products({}, config=by_library):
        for _ in range(2):
            verify(get_op("fused_moe"), sample(lane, generator, ROUTES["one token"]), seed)
    assert len(called) == len(products.TUNABLES)
    assert len([r for r in caplog.records if "quarantined" in r.getMessage()]) == len(products.TUNABLES)


@pytest.mark.lanes("interpret")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_other_errors_of_the_library_are_raised(lane, monkeypatch, generator, clean_registry, error):
    def failing(*args, **kwargs):
        raise error("CUDA out of memory")

    monkeypatch.setattr(private, "grouped_matmul", failing)
    monkeypatch.setattr(products, "_uses_library", lambda plan, *operands: True)
    with pytest.raises(error, match="out of memory"):
        liger_fused_moe(*sample(lane, generator, ROUTES["one token"]).args)


@pytest.mark.parametrize(("version", "is_taken"), [("2.8.0+cu128", False), ("2.9.0+cu128", True), ("2.13.1", True)])
def test_torch_before_2_9_has_no_such_library(monkeypatch, version, is_taken):
    """Its grouped GEMM served sm90 alone, and at first only multiples of 8 rows."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    for name in ("h200", "b200"):
        target = known_target(name)
        assert backend(target.vendor).has_grouped_gemm(target) is is_taken


def test_what_the_library_does_not_take():
    """Widths and strides that are no multiple of 16 bytes, other dtypes, and devices that are not the plan's."""
    aligned = torch.empty(3, 64, 32)
    assert all(map(products._is_aligned, (aligned, aligned.mT, aligned[0])))
    expanded = torch.empty(1, 64, 32).expand(3, 64, 32)[..., ::2]
    assert not any(map(products._is_aligned, (aligned[:, :, :28], aligned[:, :, 1:], aligned[:, :60], expanded)))
    with pretend(known_target("h200")):
        plan = products.UP_WEIGHTS.plan(torch.device("cpu"), LARGE)
        assert plan.config.blocks["ENGINE"] == products.LIBRARY
        assert not products._uses_library(plan, aligned.bfloat16())


@pytest.mark.lanes("gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_bits_every_time(lane, seed, dtype):
    op, found = get_op("fused_moe"), []
    for _ in range(3):
        made = make(op, (513, 256, 192, 16, 4), dtype, lane.device, seed, op.options[1])
        out = op.function(*made.args, **made.kwargs)
        leaves = [t for t in (*made.args, *made.kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@pytest.mark.lanes("gpu")
def test_more_than_two_to_the_31_elements(lane, seed):
    """2.4e9 elements in the rows of all slots, checked for a few tokens."""
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB")
    tokens, hidden, inner, experts, top_k = 150_000, 2048, 128, 8, 8
    generator = torch.Generator(lane.device).manual_seed(seed)
    x, up, down = (
        torch.randn(shape, generator=generator, device=lane.device, dtype=torch.bfloat16)
        for shape in ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    up, down = (up * hidden**-0.5).requires_grad_(), (down * inner**-0.5).requires_grad_()
    index = torch.arange(top_k, device=lane.device).repeat(tokens, 1)
    weights = torch.rand(tokens, top_k, generator=generator, device=lane.device)
    x.requires_grad_()
    out = liger_fused_moe(x, up, down, index, weights)
    dx = torch.autograd.grad(out, x, out.detach())[0]
    few = torch.cat([torch.arange(5), torch.arange(tokens - 5, tokens)]).to(lane.device)
    own = x.detach()[few].double().requires_grad_()
    exact = fused_moe_reference(own, up.detach().double(), down.detach().double(), index[few], weights[few].double())
    torch.testing.assert_close(out[few].double(), exact, rtol=0.05, atol=0.05)
    expected = torch.autograd.grad(exact, own, out.detach()[few].double())[0]
    torch.testing.assert_close(dx[few].double(), expected, rtol=0.1, atol=0.1)


@pytest.mark.lanes("cpu")
def test_what_it_refuses(lane, generator):
    x, up, down, index, weights = (t.detach() for t in sample(lane, generator, ROUTES["one token"]).args)
    for args, said in (
        ((x[0], up, down, index, weights), "x must be"),
        ((x, up[0], down, index, weights), "gate_up_proj must be"),
        ((x, up[:, :-1], down, index, weights), "gate_up_proj must be"),
        ((x, up, down.mT, index, weights), "must be"),
        ((x, up.bfloat16(), down, index, weights), "dtype"),
        ((x, up, down, index.float(), weights), "int32 or int64"),
        ((x, up, down, index[:, :1], weights), "top_k"),
        ((x[:0], up[:0], down[:0], index[:0], weights[:0]), "liger_fused_moe: down_proj must have at least one expert"),
    ):
        with pytest.raises(ValueError, match=said):
            liger_fused_moe(*args)
    for options, error in (
        ({"activation": "swish"}, ValueError),
        ({"limit": -1.0}, ValueError),
        ({"limit": 0.0}, ValueError),
        ({"limit": float("nan")}, ValueError),
        ({"limit": "7"}, TypeError),
        ({"alpha": 0.0}, ValueError),
        ({"alpha": 2.0, "activation": "gelu"}, ValueError),
        ({"alpha": "1"}, TypeError),
    ):
        with pytest.raises(error):
            liger_fused_moe(x, up, down, index, weights, **options)
    with pytest.raises(ValueError, match="liger_fused_moe: up_offset must be 0 if has_gate is False"):
        liger_fused_moe(x, up[:, :INNER], down, index, weights, has_gate=False, up_offset=1.0)
    for args in (
        (x.tolist(), up, down, index, weights),
        (x, None, down, index, weights),
        (x, None, None, index, weights),
        (x, [1] * EXPERTS, list(down), index, weights),
        (x, up, down, index.tolist(), weights),
    ):
        with pytest.raises(TypeError, match="liger_fused_moe: .* must be"):
            liger_fused_moe(*args)


@pytest.mark.lanes("cpu")
def test_a_limit_that_changes_under_torch_compile(lane, generator):
    """torch.compile makes a symbol of a number that changes; symbols cannot be formatted in a message."""
    torch._dynamo.reset()
    args = sample(lane, generator, ROUTES["one token"]).args
    compiled = torch.compile(lambda limit: liger_fused_moe(*args, limit=limit), backend="aot_eager", fullgraph=True)
    for limit in (0.1, 0.2):
        torch.testing.assert_close(compiled(limit), liger_fused_moe(*args, limit=limit))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_the_arguments(generator, dtype):
    """The products are in autocast's dtype, the result in x's, and gradients in the dtypes of their tensors."""
    lane = SimpleNamespace(device="cpu")
    x, up, down, index, weights = sample(lane, generator, ROUTES["all to one expert"]).args
    x = x.detach().to(dtype).requires_grad_()
    layer = LigerExperts(SimpleNamespace(hidden_act="silu", hidden_size=HIDDEN, intermediate_size=INNER, num_experts=6))
    layer.load_state_dict({"gate_up_proj": up, "down_proj": down})
    biases = {"gate_up_bias": torch.ones(EXPERTS, 2 * INNER), "down_bias": torch.ones(EXPERTS, HIDDEN)}
    low = [t.detach().bfloat16() for t in (x, up, down)]
    with torch.autocast("cpu", torch.bfloat16):
        out, biased = layer(x, index, weights), liger_fused_moe(x, up, down, index, weights, **biases)
    assert out.dtype is biased.dtype is dtype
    assert torch.equal(out, liger_fused_moe(*low, index, weights).to(dtype))
    biases = {name: bias.bfloat16() for name, bias in biases.items()}
    assert torch.equal(biased, liger_fused_moe(*low, index, weights, **biases).to(dtype))
    out.sum().backward()
    assert x.grad.dtype is dtype and layer.gate_up_proj.grad.dtype is layer.down_proj.grad.dtype is torch.float32


@pytest.mark.cpu
def test_a_configuration_without_experts_is_refused():
    with pytest.raises(ValueError, match="num_experts, num_local_experts or n_routed_experts"):
        LigerExperts(SimpleNamespace(hidden_act="silu", hidden_size=8, intermediate_size=8))


@pytest.mark.lanes("cpu", "interpret", "gpu")
@pytest.mark.parametrize(("index", "said"), [(-1, r"\[8, 0\] is -1"), (EXPERTS + 1, r"\[8, 0\] is 7")])
def test_an_index_out_of_range_is_an_error_on_request(lane, generator, set_env, index, said):
    made = sample(lane, generator, [[1, EXPERTS]] * (TOKENS - 1) + [[index, 0]])
    liger_fused_moe(*made.args)
    set_env("LIGER_HW_CHECK_TARGETS", 1)
    with pytest.raises(IndexError, match=said):
        liger_fused_moe(*made.args)
    rest = [t if t.dtype.is_floating_point and t.dim() == 3 else t[: TOKENS - 1] for t in made.args]
    liger_fused_moe(*rest)  # E itself marks another rank's expert


@pytest.mark.lanes("cpu", "interpret", "gpu")
@pytest.mark.parametrize("route", ["one token", "no token"])
def test_gradients_that_are_not_needed_are_as_in_the_fake(lane, generator, route):
    inputs = [t.detach() for t in sample(lane, generator, ROUTES[route], torch.float16).args]
    inputs[4] = inputs[4].float()
    how = *Gate(), False
    out, *made = FusedMoEFunction.fwd.overload(*inputs, None, None, *how)
    for needed in [False] * 6, [True] + [False] * 5:
        args = (torch.ones_like(out), *inputs, None, None, *made, needed, *how)
        torch.library.opcheck(FusedMoEFunction.bwd.overload, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.lanes("cpu", "interpret", "gpu")
@pytest.mark.parametrize("has_gate", [True, False])
def test_pre_activations_without_an_expert_are_zero(lane, generator, has_gate):
    """They are an output of the operator, so they must not be uninitialised memory."""
    route = ROUTES["some slots without an expert"]
    x, up, down, index, weights = (t.detach() for t in sample(lane, generator, route).args)
    up = up if has_gate else up[:, :INNER].contiguous()
    gate = Gate("relu2", has_gate=has_gate)
    z, offsets = FusedMoEFunction.fwd(x, up, down, index, weights, None, None, ExpertOptions(gate, False))[1:6:4]
    own = int(offsets[-1])
    assert own < len(z) and z[:own].any() and not z.isnan().any() and not z[own:].any()


@pytest.mark.lanes("interpret", "gpu")
def test_what_is_saved(lane, generator):
    """The pre-activations and five lists of integers; no row of x is stored a second time."""
    x, up, down, index, weights = (t.detach() for t in sample(lane, generator, ROUTES["all to one expert"]).args)
    _, z, *rest = FusedMoEFunction.fwd(x, up, down, index, weights, None, None, ExpertOptions(Gate(), False))
    assert z.shape == (TOKENS * TOP_K, 2 * INNER)
    assert all(t.dtype == torch.int32 and t.numel() <= TOKENS * TOP_K for t in rest)
