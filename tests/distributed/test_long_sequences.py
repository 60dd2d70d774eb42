"""Long sequences under DeepSpeed: tiled MLPs with ZeRO-3, and Ulysses through Trainer and accelerate.

torchrun --nproc-per-node 2 tests/distributed/test_long_sequences.py check_ulysses cpu      # one rank of it
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

import liger_hw
from liger_hw.kernels.pointwise import tiled_mlp

ROWS, TOKENS, VOCAB, STEPS = 8, 64, 64, 3
"""Rows of a tile, tokens of a sequence, words, and steps."""


def model(attention="eager"):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, attn_implementation=attention)
    return LlamaForCausalLM(config).train()


def batch(step, device):
    return torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(step)).to(device)


def zero(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }


def check_tiles_under_zero3(device):
    """Gradients are the untiled model's, each one sum over all tiles."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.init_distributed()
    tiled_mlp.TILE_ROWS = ROWS
    ids = batch(dist.get_rank(), device)
    whole = model().to(device)
    whole(ids, labels=ids).loss.backward()
    ours = model()
    liger_hw.patch(ours, activations="tiled")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    settings = zero(3)
    settings["zero_optimization"]["memory_efficient_linear"] = False
    runner, *_ = deepspeed.initialize(model=ours, optimizer=optimizer, config=settings)
    complete, when_complete = [], tiled_mlp._Sum.when_complete

    def watched(total):
        complete.append(when_complete(total))
        return complete[-1]

    tiled_mlp._Sum.when_complete = watched
    for _ in range(2):
        complete.clear()
        runner.backward(runner(ids, labels=ids).loss)
        assert len(complete) == 2 * 3 * TOKENS // ROWS and sum(one is not None for one in complete) == 2 * 3
        for (name, p), of in zip(ours.named_parameters(), whole.parameters(), strict=True):
            expected = of.grad.clone()
            dist.all_reduce(expected)
            expected /= dist.get_world_size()
            torch.testing.assert_close(safe_get_full_grad(p), expected, rtol=1e-4, atol=1e-6, msg=name)
        runner.step()


def check_ulysses(device):
    """Trainer with sp_size, kernels and tiled MLPs has the losses of one process with whole sequences."""
    import tempfile

    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from engines import Run, counting
    from transformers import Trainer, TrainingArguments

    world = int(os.environ["WORLD_SIZE"])
    alone, expected = model().to(device), []  # eager: the engine replaces sdpa
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(STEPS):
        ids = batch(step // world, device)  # every rank loads the same sequence, and each takes its turn
        loss = alone(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    tiled_mlp.TILE_ROWS = ROWS
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            deepspeed={**zero(3), "train_micro_batch_size_per_gpu": "auto"},
            parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=world, sp_handler=handler),
        )
        ours, run = model("sdpa"), Run()
        liger_hw.patch(ours, activations="tiled")
        positions = torch.arange(TOKENS)
        rows = [batch(step, "cpu")[0] for step in range(STEPS)]
        rows = [{"input_ids": row, "labels": row, "position_ids": positions} for row in rows]
        with counting(run):
            trainer = Trainer(ours, arguments, train_dataset=rows)
            trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    calls = Counter(run.kernels)
    assert calls["fused_linear_cross_entropy_fwd"] == STEPS, calls
    assert calls["rms_norm_fwd"] >= 5 * STEPS and calls["rope"] >= 4 * STEPS, calls


@pytest.mark.parametrize("check", ["check_tiles_under_zero3", "check_ulysses"])
@ranks.everywhere
def test_deepspeed(check, kind):
    pytest.importorskip("deepspeed")
    kind = kind or ranks.accelerator()
    world = 2 if kind == "cpu" else ranks.accelerators()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ranks.ROOT), os.environ.get("PYTHONPATH", "")])
    if kind == "cpu":
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "LIGER_HW_CPU_REFERENCE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*command, __file__, check, kind], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    on = torch.device(sys.argv[2], int(os.environ["LOCAL_RANK"])) if sys.argv[2] != "cpu" else torch.device("cpu")
    if on.type != "cpu":
        torch.accelerator.set_device_index(on.index)
    globals()[sys.argv[1]](on)
