"""In tensor-parallel training, replicated parameters stay equal bit for bit: 200 steps on GPUs, 12 on the CPU."""

from __future__ import annotations

from collections import Counter

import engines
import pytest
import ranks
import torch
import torch.distributed as dist

STEPS_ON_GPU, STEPS_ON_CPU, EVERY = 200, 12, 4


def check_bits(rank: int, device: torch.device) -> None:
    """Norms, embeddings and losses of a Llama under torch's tensor parallelism and AdamW, every fourth step."""
    engines.DEVICE = device
    on_cpu = device.type == "cpu"
    engines.VOCAB, engines.TOKENS = (64, 12) if on_cpu else (4096, 256)
    model = engines.tensor_parallel(patched=True)
    shared = {n: p for n, p in model.named_parameters() if type(p).__name__ != "DTensor"}
    assert any("norm" in n for n in shared) and any("embed" in n for n in shared), list(shared)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    run, given = engines.Run(), engines.batches(1)
    steps, first = STEPS_ON_CPU if on_cpu else STEPS_ON_GPU, None
    with engines.counting(run):
        for step in range(steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**given[step % len(given)]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first = loss.detach() if first is None else first
            if step % EVERY == EVERY - 1:
                differing = [n for n, t in (*shared.items(), ("loss", loss)) if not same_bits(t.detach())]
                assert not differing, f"step {step}: {differing}"
    assert loss < first - 0.5, (float(first), float(loss))
    calls = Counter(run.kernels)
    assert calls["fused_linear_cross_entropy_tp_fwd"] == steps and calls["rms_norm_bwd"] == 5 * steps, calls


def same_bits(t: torch.Tensor) -> bool:
    """Whether every rank has the same tensor."""
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return all(torch.equal(part, parts[0]) for part in parts)


@pytest.mark.cpu
@pytest.mark.full
def test_two_processes():
    ranks.run(__file__, "check_bits")


@pytest.mark.multigpu
def test_two_gpus():
    ranks.run(__file__, "check_bits", ranks.accelerator())
