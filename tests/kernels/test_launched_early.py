"""Kernels that are launched early wait for what ran before them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

from liger_hw import registry
from liger_hw.autotune import compile_ahead
from liger_hw.autotune.compile import driver_stub
from liger_hw.autotune.fake import FakeTensors
from liger_hw.backends import LaunchConfig, backend, known_target
from liger_hw.runtime import launch as _launch
from liger_hw.runtime.launch import observing

DEPENDENT = [tunable for op in registry.ops().values() for tunable in op.tunables if tunable.dependent_launch]
FEW, MANY = (1, 512, 16, 16, 64), (1, 513, 16, 16, 64)  # 2^20 elements, and as a key has it twice that


def _statements(kernel) -> list[ast.stmt]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body[0].body
    return body[1:] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body


def _begins(kernel) -> bool:
    return ast.unparse(_statements(kernel)[0]) == "wait_for_previous(DEPENDENT)"


@pytest.mark.parametrize("op", registry.ops().values(), ids=lambda op: op.name)
def test_begins_before_it_touches_memory(op):
    """The first statement of each kernel that is launched early, and of no other, is `wait_for_previous(DEPENDENT)`."""
    for tunable in op.tunables:
        for kernel in tunable.kernels:
            if kernel.fn.__name__.endswith("_kernel"):
                assert _begins(kernel) is bool(tunable.dependent_launch), kernel.fn.__name__


@pytest.mark.parametrize("arch, early", [("sm90", True), ("sm80", False), ("gfx942", False), ("pvc", False)])
@pytest.mark.parametrize(
    "name, few, many",
    [
        *((name, (256, 4096), (257, 4096)) for name in ("swiglu", "relu_squared", "softmax", "sparsemax", "dyt")),
        ("rope", FEW, MANY),
        ("vision_rope", FEW, MANY),
        *((name, (256, 4096), (257, 4096)) for name in ("rms_norm", "fused_add_rms_norm", "layer_norm", "poly_norm")),
        ("modulated_rms_norm", (2, 256, 4096), (3, 257, 4096)),
    ],
)
def test_launched_early_where_the_device_can(name, few, many, arch, early):
    """DEPENDENT is True if the launch is: a kernel that did not wait would read too early."""
    tunables = [tunable for tunable in DEPENDENT if tunable.op == name]
    assert tunables
    with registry.pretend(known_target(arch)):
        for tunable in tunables:
            for sizes, expected in ((few, early), (many, False)):
                plan = tunable.plan(torch.device("cpu"), tunable.key(*sizes, 2))
                is_early = plan.options.get("launch_pdl", False)
                assert is_early is plan.constexprs["DEPENDENT"] is expected, (tunable, sizes)


def test_a_configuration_cannot_ask_for_it():
    """A kernel that does not wait would read what is not there yet."""
    config = LaunchConfig({"BLOCK_SIZE": 64}, vendor={"launch_pdl": True})
    for vendor, arch in (("cuda", "sm80"), ("cuda", "sm90"), ("rocm", "gfx942")):
        assert "launch_pdl" in backend(vendor).illegal(known_target(arch), config)


def test_the_fast_launcher_keeps_it(monkeypatch):
    """Triton's launcher object has it, not the metadata; in Triton 3.6 the C function takes it."""
    options = {"launch_cooperative_grid": False, "launch_pdl": True, "launch": "C function"}
    run = SimpleNamespace(**options, global_scratch_size=0, profile_scratch_size=0)
    compiled = SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(_launch, "_VERSION", "3.6")
    entry, head = _launch._launcher_of(compiled)
    assert entry == "C function" and head == (7, False, True, None, None, (4, 1, 0), None, None, None)


@pytest.mark.parametrize("early", [False, True])
def test_tritons_launcher_keeps_it(early):
    """The C function gets the same arguments from the fast launcher and from the installed Triton's launcher."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    calls = []
    run = object.__new__(driver.CudaLauncher)  # without the C function: that takes a device
    for field in ("global_scratch", "profile_scratch"):
        vars(run).update({f"{field}_size": 0, f"{field}_align": 1})
    vars(run).update(launch=lambda *args: calls.append(args), launch_cooperative_grid=False, launch_pdl=early)
    vars(run).update(num_ctas=1, arg_annotations=(), kernel_signature=b"", gsan_enabled=False)
    entry, head = _launch._launcher_of(SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0)))
    with driver_stub(None):  # newer launchers look at the driver
        run(2, 1, 1, 9, 7, (4, 1, 0), None, None, None, "X_ptr", 8)
        entry(2, 1, 1, 9, *head, "X_ptr", 8)
    assert calls[0] == calls[1] and calls[1][:7] == (2, 1, 1, 9, 7, False, early)


# -- chains ----------------------------------------------------------------------------------------------------------
# Every op that is launched early on what the last one left, forward and, with that for dy, backward.

CHAIN = ("rms_norm", "swiglu", "rope", "layer_norm", "dyt", "softmax", "interleaved_rope", "relu_squared", "poly_norm")
CHAIN += ("sparsemax", "geglu", "modulated_rms_norm", "rope", "fused_add_rms_norm")
CHAIN = tuple(name for name in CHAIN if registry.get_op(name).tunables[0].dependent_launch)
SHAPES = [(4, 512), (33, 2048), (128, 4096)]


def _once(name, x):
    """y like x, and the gradients of x and of all else the op takes."""
    ones = torch.ones(x.shape[1], device=x.device)
    others = {
        "rms_norm": (ones, 1e-6),
        "layer_norm": (ones, ones * 0.1, 1e-6),
        "dyt": (ones[:1] * 0.7, ones, ones * 0.1),
        "poly_norm": (ones[:3] / 3, ones[:1] * 0.1, 1e-6),
        "fused_add_rms_norm": (x * 0.5, ones, 1e-6),
        "modulated_rms_norm": (ones, x * 0.1, x * 0.2, 1e-6),
        "swiglu": (x.flip(0),),
        "geglu": (x.flip(0),),
    }.get(name, ())
    args = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for t in (x, *others)]
    if "rope" in name:  # its heads, 64 wide: the first half of them is q, the others k
        angles = torch.arange(x.shape[0], device=x.device)[:, None] * 0.5 ** torch.arange(32, device=x.device).repeat(2)
        heads = args[0].view(1, x.shape[0], -1, 64).transpose(1, 2).chunk(2, 1)
        y = registry.get_op(name).function(*heads, angles.cos()[None], angles.sin()[None])
        y = torch.cat(y, 1).transpose(1, 2).flatten(2)[0]
    else:
        y = registry.get_op(name).function(*args)
        y = y[0] if isinstance(y, tuple) else y
    grads = torch.autograd.grad(y, [t for t in args if isinstance(t, torch.Tensor)], y.detach())
    return [y.detach(), *grads]


def _chain(x, between=lambda t: t, rounds=2):
    """`between` is called with what an op left, and may give a tensor that is equal."""
    results = []
    for name in CHAIN * rounds:
        y, *grads = _once(name, x)
        results += y, *grads
        x = between(y)
    return results


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_chain_is_launched_early(shape):
    """On the device that can; but for the sums of a weight's gradient, by a kernel of its own."""
    early = {}

    def note(plan, *_launch):
        early.setdefault(plan.tunable.name, set()).add(plan.constexprs["DEPENDENT"])

    with registry.pretend(known_target("sm90")), FakeTensors(), observing(compile_ahead.LaunchTracer(note)):
        with torch.autograd.set_multithreading_enabled(False):
            _chain(torch.empty(shape), rounds=1)
    assert {name.split(".")[0] for name in early} == set(CHAIN) and early["rope.fwd"] == early["rope.bwd"] == {True}
    assert all(said == {True} or name.endswith(".dw") for name, said in early.items()), early


def _same(results, expected):
    for number, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(a, b), number


@pytest.fixture(params=SHAPES, ids=str)
def chained(request, gpu, seed):
    """x, and what the chain gives where the host waits after every op."""
    x = torch.randn(request.param, generator=torch.Generator().manual_seed(seed)).to(gpu)

    def wait(t):
        torch.get_device_module(x.device).synchronize()
        return t

    expected = _chain(x, wait)
    assert all(t.isfinite().all() for t in expected)
    return x, expected


@pytest.mark.gpu
def test_chains_without_waiting(chained):
    x, expected = chained
    for _ in range(3):
        _same(_chain(x), expected)


@pytest.mark.gpu
def test_chains_beside_torch(chained):
    """Copies and products of torch's, which read what ours wrote and are read by ours."""
    x, expected = chained
    kept, one = torch.empty_like(x), torch.eye(x.shape[1], device=x.device)
    for _ in range(3):
        _same(_chain(x, lambda t: kept.copy_(t) @ one), expected)


@pytest.mark.gpu
def test_chains_across_streams(chained):
    """Every other op on a second stream; each waits for an event of the other's."""
    x, expected = chained
    module = torch.get_device_module(x.device)
    streams = [module.current_stream(), module.Stream()]

    def cross(t):
        now = streams.index(module.current_stream())
        event = module.Event()
        event.record(streams[now])
        streams[1 - now].wait_event(event)
        module.set_stream(streams[1 - now])
        return t

    try:
        for _ in range(3):
            results = _chain(x, cross)  # holds all that passes between the streams: no memory is given out again
            module.synchronize()
            _same(results, expected)
    finally:
        module.set_stream(streams[0])


@pytest.mark.gpu
def test_chains_in_a_graph(chained):
    """Each replay with an x that was written just before it."""
    x, expected = chained
    given, other = x.clone(), x.flip(0) * 0.5
    expected = [expected, _chain(other)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _chain(given)
    for number in range(10):
        given.copy_((x, other)[number % 2])
        graph.replay()
        _same(results, expected[number % 2])
