"""Public functions on DTensors have the results of plain tensors and the placements of their rules, or raise."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import liger_hw
import liger_hw.kernels
from liger_hw.distributed import dtensor
from liger_hw.distributed.dtensor import ShardingError
from liger_hw.runtime.sharding import LossRule, RotaryRule, RowsRule
from liger_hw.transformers import functional as F

B, T, H, D = 2, 6, 4, 8


def random(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size)))


def same(function, mesh, given, placements, wanted=None, **options):
    """Check results and gradients of `function` on DTensors against those on whole tensors.

    given: name -> tensor; placements: name -> placement of a DTensor; wanted: the results' placement
    """
    leaves = {
        n: t.clone().requires_grad_() if t.is_floating_point() and n in placements else t for n, t in given.items()
    }
    expected = function(**leaves, **options)
    shards = {
        n: distribute_tensor(t, mesh, [placements[n]]).requires_grad_(t.is_floating_point()) if n in placements else t
        for n, t in given.items()
    }
    found = function(**shards, **options)
    several = (expected, found) if isinstance(expected, tuple) else ((expected,), (found,))
    total, sharded_total = 0.0, 0.0
    for i, (of, got) in enumerate(zip(*several)):
        assert wanted is None or got.placements == (wanted,), (got.placements, wanted)
        torch.testing.assert_close(got.full_tensor(), of)
        bend = random(*of.shape, seed=9 + i).to(of.device)
        total = total + (of * bend).sum()
        sharded_total = sharded_total + (got * distribute_tensor(bend, mesh, got.placements)).sum()
    total.backward()
    sharded_total.backward()
    for name in placements:
        if leaves[name].is_floating_point():
            torch.testing.assert_close(
                shards[name].grad.full_tensor(), leaves[name].grad, msg=partial("{}: {}".format, name)
            )


def check_norms_and_gates(mesh, device):
    x, r, w = (random(B, T, 16, seed=s).to(device) for s in range(3))
    w = w[0, 0].clone()
    for placement, wanted in (
        (Shard(0), Shard(0)),
        (Shard(1), Shard(1)),
        (Shard(2), Replicate()),
        (Replicate(), Replicate()),
    ):
        at = {"X": placement, "W": Replicate()}
        same(F.liger_rms_norm, mesh, {"X": x, "W": w}, at, wanted, eps=1e-5)
        same(F.liger_fused_add_rms_norm, mesh, {"X": x, "R": r, "W": w}, {**at, "R": Replicate()}, wanted, eps=1e-5)
        same(F.liger_layer_norm, mesh, {"X": x, "W": w, "B": w + 1}, {**at, "B": Replicate()}, wanted, eps=1e-5)
        same(F.liger_swiglu, mesh, {"a": x, "b": r}, {"a": placement, "b": Shard(1)}, placement)
        same(F.liger_geglu, mesh, {"a": x, "b": r}, {"a": placement, "b": placement}, placement)
        same(F.liger_softmax, mesh, {"x": x}, {"x": placement}, wanted)
    uneven = random(B, 5, 16).to(device)
    same(F.liger_rms_norm, mesh, {"X": uneven, "W": w}, {"X": Shard(1), "W": Replicate()}, Shard(1), eps=1e-5)
    halves = DTensor.from_local(x / 2, mesh, [Partial()])
    found = F.liger_rms_norm(halves, DTensor.from_local(w, mesh, [Replicate()]), 1e-5)
    torch.testing.assert_close(found.full_tensor(), F.liger_rms_norm(x, w, 1e-5))


def check_rope(mesh, device):
    q, k = random(B, H, T, D).to(device), random(B, 2, T, D, seed=1).to(device)
    angle = random(B, T, D // 2, seed=2).to(device)
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos(), angle.sin()
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        at = {"q": placement, "k": placement}
        same(F.liger_rope, mesh, {"q": q, "k": k, "cos": cos, "sin": sin}, at, placement)
        norms = {"q_weight": random(D).to(device), "k_weight": random(D, seed=4).to(device)}
        at |= dict.fromkeys(norms, Replicate())
        same(F.liger_qk_norm_rope, mesh, {"q": q, "k": k, **norms, "cos": cos, "sin": sin}, at, placement)


def check_losses(mesh, device):
    n, vocab = 12, 47
    logits, x, w, bias = (random(*s).to(device) for s in ((n, vocab), (n, 16), (vocab, 16), (vocab,)))
    target = torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(1)).to(device)
    target[3] = -100
    for how in ("mean", "sum", "none"):
        for placement in (Shard(0), Shard(1), Replicate()):
            options = {"reduction": how, "label_smoothing": 0.1}
            wanted = Shard(0) if how == "none" and placement == Shard(0) else Replicate()
            same(
                F.liger_cross_entropy,
                mesh,
                {"input": logits, "target": target},
                {"input": placement},
                wanted,
                **options,
            )
        for rows in (Replicate(), Shard(0), Shard(1)):
            for columns in (Shard(0), Replicate()):
                options = {"reduction": how, "softcap": 4.0}
                given = {"input": x, "weight": w, "target": target, "bias": bias}
                at = {"input": rows, "weight": columns, "bias": columns, "target": Replicate()}
                same(F.liger_fused_linear_cross_entropy, mesh, given, at, None, **options)
    for columns in (Shard(0), Replicate()):
        at = {"input": Shard(0), "weight": columns}
        given = {"input": x / 4, "weight": w, "target": target}  # an entropy is a difference of scores: small ones
        for options in ({}, {"return_entropy": True, "temperature": 0.7}):
            same(F.liger_fused_linear_scaled_cross_entropy, mesh, given, at, None, **options)
    at = {"input": Shard(0), "weight": Replicate(), "target": Shard(0)}
    given = {"input": x[:1], "weight": w, "target": target[:1]}  # one rank has no row: its results are DTensors too
    for options in ({}, {"return_entropy": True}):
        same(log_probs, mesh, given, at, Shard(0), **options)
    with pytest.raises(ShardingError, match="fused_linear_log_probs: the tensor-parallel head has no options but"):
        parts = distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(w, mesh, [Shard(0)])
        F.liger_fused_linear_log_probs(*parts, target, softcap=4.0)


def log_probs(**given):
    """The requested results, as a tuple."""
    found = F.liger_fused_linear_log_probs(**given)
    return tuple(t for t in found if t is not None) if isinstance(found, tuple) else (found,)


def check_errors(mesh, device):
    x, w = random(B, T, 16).to(device), random(16).to(device).requires_grad_()
    shard = distribute_tensor(x, mesh, [Shard(1)])
    with pytest.raises(ShardingError, match=r"rms_norm: a plain tensor that needs a gradient.*from_local"):
        F.liger_rms_norm(shard, w, 1e-5)
    with pytest.raises(ShardingError, match=r"rms_norm: its input is a plain tensor"):
        F.liger_rms_norm(x, distribute_tensor(w.detach(), mesh, [Replicate()]), 1e-5)
    with pytest.raises(ShardingError, match=r"sparsemax takes no DTensor.*Shard\(dim=1\).*full_tensor\(\)"):
        F.liger_sparsemax(shard)
    with pytest.raises(ShardingError, match="leaves one of 2 ranks without a part"):
        F.liger_cross_entropy(
            distribute_tensor(x[0, :, :1], mesh, [Shard(1)]), torch.zeros(T, dtype=torch.long, device=device)
        )
    head = distribute_tensor(random(20, 16).to(device), mesh, [Shard(1)])
    with pytest.raises(ShardingError, match="shard the weight by rows, or replicate it"):
        tokens = distribute_tensor(x.flatten(0, 1), mesh, [Shard(0)])
        F.liger_fused_linear_cross_entropy(tokens, head, torch.zeros(B * T, dtype=torch.long, device=device))
    try:
        tokens = shard.flatten(0, 1)  # of neither rank one piece: gathered
    except RuntimeError as error:
        assert "flatten multiple dimensions" in str(error), error  # torch 2.11 makes no such DTensor
        return
    weight = distribute_tensor(random(20, 16).to(device), mesh, [Shard(0)])
    target = torch.arange(B * T, device=device)
    found = F.liger_fused_linear_cross_entropy(tokens, weight, target)
    expected = F.liger_fused_linear_cross_entropy(x.flatten(0, 1), weight.full_tensor(), target)
    torch.testing.assert_close(found.full_tensor(), expected)


class Block(torch.nn.Module):
    """A norm, a gated MLP and a head, of liger_hw's functions or of torch's."""

    def __init__(self, ours):
        super().__init__()
        self.ours = ours
        self.norm = liger_hw.transformers.LigerRMSNorm(16, eps=1e-6) if ours else torch.nn.RMSNorm(16, eps=1e-6)
        self.gate, self.up = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down, self.head = torch.nn.Linear(24, 16, bias=False), torch.nn.Linear(16, 50, bias=False)

    def forward(self, x):
        y, act = self.norm(x), F.liger_swiglu if self.ours else lambda a, b: torch.nn.functional.silu(a) * b
        x = x + self.down(act(self.gate(y), self.up(y)))
        return self.head(x)


def check_torch_tensor_parallel(mesh, device):
    """torch's own plan: sequence-parallel norm, DTensor MLP, a loss over a sharded vocabulary."""
    torch.manual_seed(0)
    plain = Block(False).to(device)
    x = random(B, T, 16).to(device)
    target = torch.randint(50, (B * T,), generator=torch.Generator().manual_seed(1)).to(device)
    expected = torch.nn.functional.cross_entropy(plain(x).flatten(0, 1), target)
    expected.backward()
    ours = Block(True).to(device)
    ours.load_state_dict(plain.state_dict())
    plan = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    ours = parallelize_module(ours, mesh, plan)
    with loss_parallel():
        logits = ours(distribute_tensor(x, mesh, [Shard(1)]))
        loss = F.liger_cross_entropy(logits.flatten(0, 1), target)
        loss.backward()
    assert loss.placements == (Replicate(),)
    torch.testing.assert_close(loss.full_tensor(), expected)
    for (name, got), of in zip(ours.named_parameters(), plain.parameters()):
        grad = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
        torch.testing.assert_close(grad, of.grad, msg=partial("{}: {}".format, name))


def check_all(rank, device):
    mesh = dist.init_device_mesh(device.type, (2,))
    check_norms_and_gates(mesh, device)
    check_rope(mesh, device)
    check_losses(mesh, device)
    check_errors(mesh, device)
    check_torch_tensor_parallel(mesh, device)


@ranks.everywhere
def test_ranks(kind):
    ranks.run(__file__, "check_all", kind, world=2)


def functions_with_rules():
    """Every autograd Function of the kernels that names a sharding rule."""
    for module in pkgutil.walk_packages(liger_hw.kernels.__path__, "liger_hw.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("Function") and getattr(value, "sharding", None) and value.__module__ == module.name:
                yield pytest.param(value, id=name)


@pytest.mark.cpu
@pytest.mark.parametrize("function", list(functions_with_rules()))
def test_a_rule_names_arguments_of_its_function(function):
    arguments = set(inspect.signature(function.forward).parameters)
    match function.sharding:
        case RowsRule(inputs, weights):
            assert {*inputs, *weights} <= arguments
        case RotaryRule(weights):
            assert {"q", "k", "cos", "sin", "unsqueeze_dim", *weights} <= arguments
        case LossRule(kind):
            assert kind in dtensor.LOSSES


@pytest.fixture
def mesh_of_one(one_rank):
    """A mesh of this process alone."""
    return dist.device_mesh.init_device_mesh("cpu", (1,))


@pytest.mark.cpu
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_divergence_of_dtensors_is_refused(mesh_of_one, grad, needs_grad):
    """Also without gradients, where the operator is called without its Function."""
    rows = distribute_tensor(random(3, 4).log_softmax(-1), mesh_of_one, [Replicate()]).requires_grad_(needs_grad)
    for function in (F.liger_jsd, F.liger_kl_div, F.liger_tvd):
        with torch.set_grad_enabled(grad), pytest.raises(ShardingError, match="takes no DTensor"):
            function(rows, rows.detach())
