"""Logits in a patched model's outputs, in collectives and through the engines that touch every output."""

from __future__ import annotations

import copy
import itertools

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F

VOCAB = 61


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x**2).mean()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad / x.numel()


def models():
    """(unpatched, patched)"""
    from transformers import LlamaForCausalLM

    import liger_hw
    from liger_hw.transformers.tiny import tiny_model

    plain = tiny_model(LlamaForCausalLM, vocab_size=VOCAB, num_hidden_layers=1)
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    return plain, patched


def tokens(rank, length):
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(rank))


def gathered(logits):
    out = [torch.empty(logits.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(out, logits)
    return torch.cat(out)


def summed(logits):
    with torch.no_grad():
        dist.all_reduce(logits)
    return logits


def sent(logits):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, logits.detach())
    return torch.cat(out)


def check_collectives(rank, device):
    from accelerate import Accelerator
    from accelerate.utils import operations

    accelerator = Accelerator(cpu=True)
    uneven = {
        "pad": lambda o: accelerator.pad_across_processes(o.logits, dim=1),
        "gather": lambda o: accelerator.gather({"x": accelerator.pad_across_processes(o.logits, dim=1)})["x"],
        "for metrics": lambda o: accelerator.gather_for_metrics(accelerator.pad_across_processes(o.logits, dim=1)),
        "reduce": lambda o: accelerator.reduce(o.logits[:, :5]),
    }
    even = {
        "all_gather": lambda o: gathered(o.logits),
        "all_reduce": lambda o: summed(o.logits),
        "all_gather_object": lambda o: sent(o.logits),
        "broadcast": lambda o: operations.broadcast(o.logits.detach()),
        "apply": lambda o: operations.recursively_apply(torch.exp, {"x": o.logits}, error_on_other_type=True)["x"],
        "send": lambda o: operations.send_to_device(o, "cpu")["logits"],
        "fp32": lambda o: operations.convert_outputs_to_fp32(lambda: o)()["logits"],
        "concatenate": lambda o: operations.concatenate([o.logits, o.logits]),
        "batch": lambda o: torch.tensor(operations.find_batch_size({"x": o.logits})),
    }
    pair = models()
    for length, cases in ((5 + rank, uneven), (5, even)):
        ids = tokens(rank, length)
        for name, case in cases.items():
            expected, found = (case(model(input_ids=ids, labels=ids)) for model in pair)
            assert isinstance(found, torch.Tensor) and found.requires_grad == expected.requires_grad, name
            torch.testing.assert_close(found + 0, expected + 0, rtol=1e-4, atol=1e-5, msg=name)


LOSSES = {
    "own": lambda o, ids: o.loss,
    "fused": lambda o, ids: F.cross_entropy(o.logits.view(-1, VOCAB), ids.view(-1)),
    "computed": lambda o, ids: o.logits.logsumexp(-1).square().mean(),
    "function": lambda o, ids: Squared.apply(o.logits),
    "mixed": lambda o, ids: o.loss + Squared.apply(o.logits[:, 1:].float()) + o.logits.mean(),
}
WRAPPED = {"plain": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}


def check_ddp(rank, device):
    """DDP passes every output through its own function, in whose backward it may start to average gradients."""
    ids = tokens(rank, 6)
    for wrapped, name in itertools.product(WRAPPED, LOSSES):
        gradients = []
        for model in models():
            parallel = torch.nn.parallel.DistributedDataParallel(model, **WRAPPED[wrapped])
            for _ in range(2):
                model.zero_grad()
                outputs = parallel(input_ids=ids, labels=ids)
                assert type(outputs.logits) is torch.Tensor or outputs.logits.is_deferred, "an output was read"
                LOSSES[name](outputs, ids).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for expected, found in zip(*gradients):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=f"{wrapped} {name}")


@pytest.mark.cpu
def test_collectives_take_them():
    pytest.importorskip("accelerate")
    ranks.run(__file__, "check_collectives")


@pytest.mark.cpu
def test_ddp_averages_the_gradients_of_every_loss():
    ranks.run(__file__, "check_ddp")
