"""The tensor-parallel head against the whole head on one GPU, torch's loss_parallel and heads that gather.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel_head.py --out results/tensor-parallel-head-2xh200.json
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel_head.py --device cpu --tokens 64 --hidden 32 --vocab 250

The second line only shows that everything runs, over gloo; its times mean nothing. With --profile FOLDER rank 0 leaves
there, for each arm, which GPU kernels one step ran: name, count, microseconds in all.

Any number of ranks, which must divide tokens and vocabulary. Each arm is one forward and backward with the gradients of
hidden states and weight. Times are medians over the steps, of the slowest rank, in ms; peak is what a step allocates
beyond its inputs, gradients included, of the rank with the most, in MiB (0 on a CPU). An arm that runs out of memory is
left out, with the reason.

gradient_error is the norm-wise difference from the whole head's gradients, the larger of the two.

    whole             every rank computes the whole head: what one GPU does
    tp, tp_sequence   the tensor-parallel head; hidden states the same on every rank, or sharded by rows
    tp_tokens         liger_fused_linear_scaled_cross_entropy_tp: one loss a token; whole_tokens: its whole head
    loss_parallel     torch.distributed.tensor: DTensor linear layer and cross entropy under loss_parallel(), in bf16
    loss_parallel_fp32  the same with the logits in fp32 before the loss, as training code has it
    gathered_logits   each rank's logits gathered, then cross entropy in fp32
    gathered_weight   the weight gathered, then the whole fused head
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from liger_hw.bench import report
from liger_hw.transformers.functional import (
    liger_fused_linear_cross_entropy,
    liger_fused_linear_cross_entropy_tp,
    liger_fused_linear_scaled_cross_entropy,
    liger_fused_linear_scaled_cross_entropy_tp,
)

WARMUP = 2


class Problem:
    """The same hidden states [tokens, hidden] and labels on every rank, and this rank's share of both."""

    def __init__(self, tokens: int, hidden: int, vocab: int, device: torch.device, dtype: torch.dtype) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        if tokens % world or vocab % world:
            raise SystemExit(f"{world} ranks must divide {tokens} tokens and a vocabulary of {vocab}")
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(tokens, hidden, generator=generator, device=device, dtype=dtype)
        self.weight = torch.randn(vocab, hidden, generator=generator, device=device, dtype=dtype) * hidden**-0.5
        self.y = torch.randint(vocab, (tokens,), generator=generator, device=device)
        self.y[::10] = -100
        self.output_grads = torch.randn(tokens, generator=generator, device=device)
        self.rows = self.x.chunk(world)[rank].clone()
        self.part = self.weight.chunk(world)[rank].clone()
        self.expected: dict[int, list[torch.Tensor]] = {}
        self.mesh, self.group = dist.init_device_mesh(device.type, (world,)), dist.group.WORLD
        for leaf in self.leaves:
            leaf.requires_grad_()

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.weight, self.rows, self.part

    def gradient_error(self, whole: bool, dim: int) -> float:
        """Of the gradients that this rank has now, after a loss of `dim` dimensions; those of a whole head are kept."""
        rank, world = dist.get_rank(), dist.get_world_size()
        if whole:
            found = self.x.grad, self.weight.grad.chunk(world)[rank]
            self.expected[dim] = [t.clone() for t in (*found, self.x.grad.chunk(world)[rank])]
        if dim not in self.expected:
            return float("nan")
        x, part, rows = self.expected[dim]
        pairs = (self.x.grad, x), (self.part.grad, part), (self.rows.grad, rows)
        differences = [(got - of).norm() / of.norm() for got, of in pairs if got is not None]
        return float(torch.stack(differences).max())

    # Each arm gives the loss of all tokens, the same on every rank.

    def whole(self) -> torch.Tensor:
        return liger_fused_linear_cross_entropy(self.x, self.weight, self.y)

    def tp(self) -> torch.Tensor:
        return liger_fused_linear_cross_entropy_tp(self.x, self.part, self.y, self.group)

    def tp_sequence(self) -> torch.Tensor:
        return liger_fused_linear_cross_entropy_tp(self.rows, self.part, self.y, self.group, sequence_parallel=True)

    def whole_tokens(self) -> torch.Tensor:
        return liger_fused_linear_scaled_cross_entropy(self.x, self.weight, self.y)

    def tp_tokens(self) -> torch.Tensor:
        return liger_fused_linear_scaled_cross_entropy_tp(self.x, self.part, self.y, self.group)

    def loss_parallel(self) -> torch.Tensor:
        x = DTensor.from_local(self.x, self.mesh, [Replicate()], run_check=False)
        weight = DTensor.from_local(self.part, self.mesh, [Shard(0)], run_check=False)
        return F.cross_entropy(F.linear(x, weight), self.y)

    def loss_parallel_fp32(self) -> torch.Tensor:
        x = DTensor.from_local(self.x, self.mesh, [Replicate()], run_check=False)
        weight = DTensor.from_local(self.part, self.mesh, [Shard(0)], run_check=False)
        return F.cross_entropy(F.linear(x, weight).float(), self.y)

    def gathered_logits(self) -> torch.Tensor:
        logits = F.linear(_SummedGradient.apply(self.x), self.part)
        return F.cross_entropy(_Gathered.apply(logits, 1).float(), self.y)

    def gathered_weight(self) -> torch.Tensor:
        return liger_fused_linear_cross_entropy(self.x, _Gathered.apply(self.part, 0), self.y)


class _Gathered(torch.autograd.Function):
    """The parts of all ranks, along a dimension. All ranks compute the same from them, so its gradient is cut out."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        parts = part.new_empty((dist.get_world_size() * part.shape[0], part.shape[1]))
        dist.all_gather_into_tensor(parts, part)
        return torch.cat(parts.chunk(dist.get_world_size()), dim) if dim else parts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()].contiguous(), None


class _SummedGradient(torch.autograd.Function):
    """The input of a linear layer that is split by rows: each rank's gradient is a part of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


ARMS = ("whole", "tp", "tp_sequence", "loss_parallel", "loss_parallel_fp32", "gathered_logits", "gathered_weight")
ARMS += ("whole_tokens", "tp_tokens")


class Clock:
    """Milliseconds between marks, on the device where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.marks = device.type == "cuda", []

    def mark(self) -> None:
        if not self.on_gpu:
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def spans(self) -> list[float]:
        if not self.on_gpu:
            return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]


def step(problem: Problem, arm: Callable[[], torch.Tensor], clock: Clock) -> torch.Tensor:
    """One forward and backward; the loss."""
    for leaf in problem.leaves:
        leaf.grad = None
    dist.barrier()
    if clock.on_gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # the host gets ahead of the device
    with loss_parallel():
        clock.mark()
        loss = arm()
        clock.mark()
        loss.backward(problem.output_grads if loss.dim() else None)
        clock.mark()
    return loss.detach()


def measure(problem: Problem, name: str, steps: int) -> dict[str, Any]:
    """One arm's row of the table. Every rank must call it."""
    arm, device, times = getattr(problem, name), problem.x.device, []
    clock = Clock(device)
    for leaf in problem.leaves:
        leaf.grad = None
    before = 0
    for i in range(WARMUP + steps):
        if i == WARMUP and clock.on_gpu:
            for leaf in problem.leaves:
                leaf.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        clock.marks = []
        loss = step(problem, arm, clock)
        if i >= WARMUP:
            forward, backward = clock.spans()
            times.append((forward, backward, forward + backward))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if clock.on_gpu else 0.0
    worst = torch.tensor([*(statistics.median(column) for column in zip(*times)), peak], device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    forward, backward, both, peak = worst.tolist()
    row = {"arm": name, "forward_ms": forward, "backward_ms": backward, "both_ms": both, "peak_mib": peak}
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    error = problem.gradient_error(name.startswith("whole"), loss.dim())
    return row | {"loss": float(loss.mean()), "gradient_error": error}


def profile(problem: Problem, name: str, folder: Path) -> None:
    """One step's GPU kernels of rank 0 into FOLDER/NAME.txt, in the order of their total time. Every rank calls it."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        step(problem, getattr(problem, name), Clock(problem.x.device))
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        kernels = sorted(seen.key_averages(), key=lambda kernel: -kernel.device_time_total)
        lines = [f"{kernel.device_time_total:10.1f} us {kernel.count:5d} x {kernel.key[:120]}" for kernel in kernels]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
        seen.export_chrome_trace(str(folder / f"{name}.json.gz"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--profile", type=Path, metavar="FOLDER")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    given = parser.parse_args()
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = Problem(given.tokens, given.hidden, given.vocab, device, dtype)
    found = {"machine": report.machine(device, os.environ.get("LIGER_COMMIT")), "ranks": dist.get_world_size()}
    found |= {"sizes": [given.tokens, given.hidden, given.vocab], "rows": [], "left_out": []}
    for name in given.arms:
        try:
            row = measure(problem, name, given.steps)
            if given.profile:
                profile(problem, name, given.profile)
        except torch.OutOfMemoryError as error:  # the ranks have equal shares: all of them run out
            found["left_out"].append({"arm": name, "why": str(error).split(". ")[0]})
            continue
        found["rows"].append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if given.out:
                report.save(given.out, found)
    if dist.get_rank() == 0 and given.out:
        report.save(given.out, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
