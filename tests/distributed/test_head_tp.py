"""The tensor-parallel head has the results of one process on the whole vocabulary, in fp64."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist

from liger_hw.kernels.heads import fused_linear_cross_entropy_tp as head_tp
from liger_hw.kernels.heads.fused_linear_cross_entropy import fused_linear_cross_entropy_reference
from liger_hw.transformers.functional import liger_fused_linear_cross_entropy_tp

N_ROWS, HIDDEN, VOCAB = 2600, 24, 46
OPTIONS = (
    {},
    {"bias": True, "label_smoothing": 0.1, "softcap": 5.0},
    {"reduction": "sum", "lse_square_scale": 1e-2, "return_z_loss": True, "return_token_accuracy": True},
    {"reduction": "none", "bias": True, "label_smoothing": 0.1, "return_predicted_tokens": True},
    {"reduction": "none", "softcap": 3.0, "lse_square_scale": 1e-2},
    {"compact": True, "return_predicted_tokens": True},
)


def inputs(device, n_rows=N_ROWS, dtype=torch.float32):
    """x, weight, bias, target with ignored rows, and an incoming gradient of every row."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, flowing = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((n_rows, HIDDEN), (VOCAB, HIDDEN), (VOCAB,), (n_rows,))
    )
    target = torch.randint(VOCAB, (n_rows,), generator=generator)
    target[5], target[6] = 0, VOCAB - 1
    target[::9] = -100
    return [t.to(device) for t in (x, weight, bias, target, flowing)]


def expected(x, weight, bias, target, flowing, options):
    """(output, gradients of x, weight and bias) of the reference in fp64, on the CPU."""
    exact = [t.detach().cpu().double().requires_grad_() for t in (x, weight, bias)]
    given = {**options, "bias": exact[2] if options.get("bias") else None}
    output = fused_linear_cross_entropy_reference(*exact[:2], target.cpu(), **given)
    loss = getattr(output, "loss", output)
    total = (loss * flowing.cpu().double()).sum() if loss.dim() else 2 * loss
    grads = torch.autograd.grad(total, exact if options.get("bias") else exact[:2])
    return output, grads


def compare(output, grads, wanted, slices):
    """slices: which part of each wanted gradient is this rank's."""
    wanted_output, wanted_grads = wanted
    for name in ("loss", "z_loss", "token_accuracy", "predicted_tokens"):
        of = getattr(wanted_output, name, wanted_output if name == "loss" else None)
        if of is not None:
            found = getattr(output, name, output).cpu().to(of.dtype)
            if name == "predicted_tokens":
                assert torch.equal(found, of)
            else:
                torch.testing.assert_close(
                    found, of.detach(), rtol=1e-5, atol=1e-5 * max(1.0, float(of.detach().abs().max()))
                )
    for grad, of, mine in zip(grads, wanted_grads, slices):
        of = of[mine]
        # fp32 sums of at most N_ROWS terms: (8 + 4 sqrt(2600)) / 2^24 of the largest
        torch.testing.assert_close(grad.cpu().double(), of, rtol=1e-5, atol=1.3e-5 * float(of.abs().max()))


def check_options(rank, device):
    tensors = inputs(device)
    x, weight, bias, target, flowing = tensors
    world = dist.get_world_size()
    for widths in {2: ((23, 23), (26, 20)), 4: ((12, 12, 12, 10), (5, 20, 1, 20))}[world]:
        mine = slice(sum(widths[:rank]), sum(widths[: rank + 1]))
        for options in OPTIONS:
            wanted = expected(*tensors, {k: v for k, v in options.items() if k != "compact"})
            for sequence_parallel in (False, True):
                rows = slice(rank * N_ROWS // world, (rank + 1) * N_ROWS // world) if sequence_parallel else slice(None)
                own = [t.clone().requires_grad_() for t in (x[rows], weight[mine], bias[mine])]
                given = {**options, "bias": own[2] if options.get("bias") else None}
                output = liger_fused_linear_cross_entropy_tp(
                    *own[:2], target, dist.group.WORLD, sequence_parallel=sequence_parallel, **given
                )
                loss = getattr(output, "loss", output)
                total = (loss * flowing).sum() if loss.dim() else 2 * loss
                grads = torch.autograd.grad(total, own if options.get("bias") else own[:2])
                compare(output, grads, wanted, (rows, mine, mine))
                losses = [torch.empty_like(loss) for _ in range(world)]
                dist.all_gather(losses, loss.detach())
                assert all(torch.equal(loss, other) for other in losses), "the ranks disagree"


@ranks.everywhere
def test_ranks(kind):
    ranks.run(__file__, "check_options", kind)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.daily("cpu", "interpret", options=str(OPTIONS[1]))
def test_without_a_group_it_is_the_whole_head(lane, options):
    tensors = inputs(lane.device, 40)
    leaves = [t.requires_grad_() for t in tensors[:3]]
    given = {**options, "bias": leaves[2] if options.get("bias") else None}
    output = liger_fused_linear_cross_entropy_tp(*leaves[:2], tensors[3], None, **given)
    loss = getattr(output, "loss", output)
    total = (loss * tensors[4]).sum() if loss.dim() else 2 * loss
    grads = torch.autograd.grad(total, leaves if options.get("bias") else leaves[:2])
    wanted = expected(*tensors, {k: v for k, v in options.items() if k != "compact"})
    compare(output, grads, wanted, (slice(None),) * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ignored_rows_alone_have_a_gradient_of_zero(lane, dtype):
    """As in a padded micro-batch: the mean is 0 / 0, as torch's, but accumulated gradients must stay finite."""
    if lane.name == "interpret" and dtype is torch.bfloat16:
        pytest.skip("the interpreter's bf16 is not right")
    x, weight, _, target, _ = inputs(lane.device, 8, dtype)
    leaves = [t.requires_grad_() for t in (x, weight)]
    loss = liger_fused_linear_cross_entropy_tp(*leaves, torch.full_like(target, -100), None)
    assert loss.isnan()
    assert not any(grad.any() for grad in torch.autograd.grad(loss, leaves))


@pytest.mark.cpu
def test_it_compiles_to_one_graph(recwarn):
    tensors = inputs("cpu", 40)
    x, weight, _, target, flowing = tensors

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x, weight):
        return 2 * liger_fused_linear_cross_entropy_tp(x, weight, target, None)

    leaves = [t.requires_grad_() for t in (x, weight)]
    total = loss(*leaves)
    compare(total / 2, torch.autograd.grad(total, leaves), expected(*tensors, {}), (slice(None),) * 2)
    assert not [w for w in recwarn if "liger_hw" in str(w.message)]


@pytest.mark.cpu
def test_every_rank_plans_the_same_chunks():
    """They must not depend on the width of a rank's part."""
    plans = head_tp.plan_shared(8192, 4096, 2, wide=False)
    assert [stop - start for start, stop in plans.bounds] == [4096] * 2
    scattered = head_tp.plan_shared(6 * 700, 64, 4, wide=False, world=6)
    assert scattered.bounds[-1][1] == 4200 and all(start % 6 == 0 for start, _ in scattered.bounds)


@pytest.mark.cpu
def test_what_is_refused():
    x, weight, _, target, _ = inputs("cpu", 8)
    with pytest.raises(TypeError, match="tp_group must be a torch.distributed.ProcessGroup"):
        liger_fused_linear_cross_entropy_tp(x, weight, target, "tp")
    with pytest.raises(IndexError, match=r"target\[3\] = 46 is out of bounds"):
        liger_fused_linear_cross_entropy_tp(x, weight, target.index_fill(0, torch.tensor(3), 46), None)
    with pytest.raises(ValueError, match="target must have shape"):
        liger_fused_linear_cross_entropy_tp(x, weight, target[:4], None, sequence_parallel=True)
