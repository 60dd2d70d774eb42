"""One rank of an engine: a tiny model trained for two steps, patched and unpatched, compared with one process.

    torchrun --nproc-per-node 2 tests/distributed/engines.py ENGINE:full,ENGINE:lora OUT.json [--device cuda]

Every rank trains on its part of each batch. The gradients follow from the whole weights after each step of SGD with a
learning rate of one. For each cell (engine:adapter), rank 0 writes how far losses and gradients are from plain torch in
one process on the whole batch, and how often all ranks together called each operator. On GPUs, vocabulary and rows are
larger, so that the logits' memory shows, and records also have the unpatched engine's errors and both peaks of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import threading
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist

VOCAB, HIDDEN, LAYERS, ROWS, TOKENS = 64, 32, 2, 4, 12
VOCAB_ON_GPU, TOKENS_ON_GPU = 4096, 256
RATE, STEPS = 1.0, 2
DEVICE = torch.device("cpu")
RECOMPUTED = "recomputed"
"""In place of an adapter: the whole model trains, patched with activations="full"."""
COMPUTE = torch.float32
"""The dtype of forwards: bfloat16 by autocast, with weights in float32."""


# -- what is trained -------------------------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    # Four ranks of tensor parallelism need four heads for keys and values.
    sizes |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": TOKENS_ON_GPU,
    }
    return LlamaConfig(**{**sizes, **changes})


def make_model(adapter: str = "full", **changes: Any) -> Any:
    """A model with the same weights on every rank, large enough to show a wrong kernel."""
    from objectives import OBJECTIVES, LlamaWithObjective
    from transformers import LlamaForCausalLM

    torch.manual_seed(11)
    objective, _, adapter = adapter.rpartition("-")
    if adapter in (*OBJECTIVES, RECOMPUTED):
        objective, adapter = adapter, "full"
    kind = LlamaWithObjective if objective in OBJECTIVES else LlamaForCausalLM
    model = mixture_of_experts() if adapter == "experts" else kind(config(**changes)).train()
    model.objective = objective
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return with_adapter(model, adapter)


def mixture_of_experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config().to_diff_dict(), "model_type": "qwen3_moe", **experts}))


def with_adapter(model: Any, adapter: str) -> Any:
    """adapter: full or experts, for none, or lora"""
    if adapter in ("full", "experts"):
        return model
    import peft

    torch.manual_seed(12)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "gate_proj"])
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped.train()


def batches(ranks: int) -> list[dict[str, torch.Tensor]]:
    """STEPS batches of ROWS rows for each rank. All ranks ignore equally many labels, so that means agree."""
    made = []
    for step in range(STEPS):
        ids = torch.randint(3, VOCAB, (ranks * ROWS, TOKENS), generator=torch.Generator().manual_seed(70 + step))
        labels = ids.clone()
        labels[::ROWS, :4] = -100
        labels[ROWS - 1 :: ROWS, -2:] = -100
        made.append({"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE)})
    return made


def own(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    return {name: value[rows] for name, value in batch.items()}


# -- what is seen ----------------------------------------------------------------------------------------------------


class Run:
    """Results of a training: the losses, the weights before and after every step, and operators' numbers of calls.

    recomputed: calls that compute activations again in backward, which `kernels` does not count
    peak_mib: what this rank allocated on its GPU while it trained
    """

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self.losses: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.kernels: Counter = Counter()
        self.recomputed: Counter = Counter()

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        return [
            {name: (before[name] - after[name]) / RATE for name in before}
            for before, after in zip(self.weights, self.weights[1:])
        ]


def named(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under names without wrappers'."""
    for word in ("_orig_mod.", "_fsdp_wrapped_module.", "module.", "base_model.model."):
        weights = {name.replace(word, ""): w for name, w in weights.items()}
    return {name: w.detach().float().cpu().clone() for name, w in weights.items()}


@contextlib.contextmanager
def counting(run: Run) -> Iterator[None]:
    from liger_hw.recompute.recipes import Recipe
    from liger_hw.runtime.launch import Observer, observing

    again, compute = threading.local(), Recipe._compute

    def computed_again(recipe: Any) -> torch.Tensor:
        outer = getattr(again, "now", False)  # what a recipe reads may have a recipe itself
        again.now = True
        try:
            return compute(recipe)
        finally:
            again.now = outer

    class Count(Observer):
        def operator(self, proceed: Any, call: Any, args: tuple) -> Any:
            counter = run.recomputed if getattr(again, "now", False) else run.kernels
            counter[call.__name__] += 1
            return proceed(call, args)

    before = 0
    if DEVICE.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    Recipe._compute = computed_again
    try:
        with observing(Count(), every_thread=True):
            yield
    finally:
        Recipe._compute = compute
    if DEVICE.type != "cpu":
        run.peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20


def computing() -> Any:
    """The context in which forwards run."""
    return torch.autocast(DEVICE.type, COMPUTE, enabled=COMPUTE is not torch.float32)


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with computing():
        return model(**batch).loss


def mean_over_ranks(loss: torch.Tensor) -> float:
    value = loss.detach().float().clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def loop(
    model: Any,
    whole: Callable[[], dict[str, torch.Tensor]],
    ranks: int,
    step: Callable[[Any], torch.Tensor] | None = None,
    share: Callable[[dict], dict] = own,
) -> Run:
    """Two SGD steps of `model`. whole: returns the gathered weights; step: batch -> loss (default: torch's own)"""
    run = Run()
    optimizer = None
    if step is None:  # foreach, which is the default on GPUs, takes no mixture of DTensors and plain tensors
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, foreach=False)
    run.weights.append(named(whole()))
    with counting(run):
        for batch in batches(ranks):
            if step:
                loss = step(share(batch))
            else:
                loss = loss_of(model, share(batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            run.losses.append(mean_over_ranks(loss))
            run.weights.append(named(whole()))
    return run


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The weights that train, gathered."""
    with torch.no_grad():
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p)
            for name, p in model.named_parameters()
            if p.requires_grad
        }


def alone(adapter: str, ranks: int, **changes: Any) -> Run:
    model = make_model(adapter, **changes).to(DEVICE)
    return loop(model, lambda: trained(model), ranks, share=lambda batch: batch)


def patch(model: Any, patched: bool) -> Any:
    import liger_hw

    options = {}
    for module in model.modules():
        if hasattr(module, "objective"):
            module.fused = patched
            options = {"activations": "full"} if module.objective == RECOMPUTED else {}
    return liger_hw.patch(model, **options) if patched else None


# -- engines: (adapter, patched) -> Run ------------------------------------------------------------------------------

ENGINES: dict[str, Callable[[str, bool], Run]] = {}


def engine(function: Callable[[str, bool], Run]) -> Callable[[str, bool], Run]:
    ENGINES[function.__name__] = function
    return function


@engine
def ddp(adapter: str, patched: bool) -> Run:
    model = make_model(adapter).to(DEVICE)
    patch(model, patched)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    return loop(wrapped, lambda: trained(model), dist.get_world_size())


def _fsdp1(adapter: str, patched: bool, original: bool, late: bool) -> Run:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = make_model(adapter).to(DEVICE)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    if not late:
        patch(model, patched)
    wrapped = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=original,
        device_id=DEVICE if DEVICE.type == "cpu" else torch.cuda.current_device(),
    )
    if late:
        patch(wrapped, patched)

    def whole() -> dict[str, torch.Tensor]:
        with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
            return {name: w for name, w in wrapped.state_dict().items() if name in trains}

    return loop(wrapped, whole, dist.get_world_size())


def _fsdp2(adapter: str, patched: bool, tail: bool, late: bool = False, replicas: int = 0) -> Run:
    from torch.distributed.fsdp import fully_shard

    shape, names = (dist.get_world_size(),), None
    if replicas:
        shape, names = (replicas, dist.get_world_size() // replicas), ("replicate", "shard")
    mesh = dist.init_device_mesh(DEVICE.type, shape, mesh_dim_names=names)
    model = make_model(adapter).to(DEVICE)
    if not late:
        patch(model, patched)
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in bare.model.layers:
        fully_shard(layer, mesh=mesh)
    if tail:  # as accelerate and transformers do
        fully_shard(bare.model.embed_tokens, mesh=mesh)
        fully_shard([bare.model.norm, bare.lm_head], mesh=mesh, reshard_after_forward=False)
    else:
        fully_shard(bare.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if late:
        patch(model, patched)
    return loop(model, lambda: trained(model), dist.get_world_size())


def _deepspeed(stage: int, persistent: int = 0) -> dict[str, Any]:
    """DeepSpeed's settings. persistent: elements of a parameter that stays whole on each rank"""
    buckets = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persistent, **buckets},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    if COMPUTE is not torch.float32:  # it switches torch's own autocast off
        settings["torch_autocast"] = {"enabled": True, "dtype": str(COMPUTE).removeprefix("torch.")}
    return settings


def _zero(adapter: str, patched: bool, stage: int, init: bool = False) -> Run:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    settings = _deepspeed(stage)
    model = make_model(adapter)
    if init:  # what from_pretrained does under ZeRO-3: parameters are born in pieces
        whole_weights = copy.deepcopy(model.state_dict())
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = make_model(adapter)
        with torch.no_grad(), GatheredParameters(list(model.parameters()), modifier_rank=0):
            if dist.get_rank() == 0:
                for name, parameter in model.named_parameters():
                    parameter.copy_(whole_weights[name])
    report = patch(model, patched)
    if report is not None:
        assert not any("left alone" in row.state for row in report.rows), str(report)
    trains = [p for p in model.parameters() if p.requires_grad]
    runner, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trains, lr=RATE), config=settings)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(runner, batch)
        runner.backward(loss)
        runner.step()
        return loss

    def whole() -> dict[str, torch.Tensor]:
        if stage < 3:
            return trained(runner.module)
        with GatheredParameters(trains):
            return {n: p.detach().clone() for n, p in runner.module.named_parameters() if p.requires_grad}

    return loop(runner, whole, dist.get_world_size(), step=step)


def tensor_parallel(patched: bool, adapter: str = "full") -> Any:
    """A Llama whose heads, MLPs and vocabulary are split by torch; norms and embeddings are on every rank."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make_model(adapter).to(DEVICE)
    patch(model, patched)
    mesh = dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {name: ColwiseParallel() for name in column}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh, plan)
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


@engine
def tp_torch(adapter: str, patched: bool) -> Run:
    model = tensor_parallel(patched, adapter)
    return loop(model, lambda: trained(model), 1, share=lambda batch: batch)


@engine
def tp_transformers(adapter: str, patched: bool) -> Run:
    from transformers import AutoModelForCausalLM

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if folder[0]:
        make_model().save_pretrained(folder[0])
    dist.broadcast_object_list(folder, 0)
    model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto").train()
    model.objective = make_model(adapter).objective
    patch(model, patched)
    return loop(model, lambda: trained(model), 1, share=lambda batch: batch)


@engine
def accelerate_fsdp2(adapter: str, patched: bool) -> Run:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=DEVICE.type == "cpu")
    if DEVICE.type == "cpu":  # accelerate shards on accelerators alone; the rest of its way is the same
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = make_model(adapter)
    patch(model, patched)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(type(p).__name__ == "DTensor" for p in model.parameters())

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return loop(model, lambda: trained(model), dist.get_world_size(), step=step)


def _trainer(adapter: str, patched: bool, **engine: Any) -> Run:
    """Hugging Face's Trainer, which finds the kernels through the shim."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    run, world = Run(), dist.get_world_size()
    rows = [{k: v[i].cpu() for k, v in batch.items()} for batch in batches(world) for i in range(world * ROWS)]

    def whole(model: Any) -> dict[str, torch.Tensor]:
        trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not hasattr(next(iter(trains.values())), "ds_shape"):
            return trained(model)
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p) for name, p in trains.items()}  # the model's own may be in bf16

    class InOrder(Trainer):
        def create_optimizer(self, *args: Any) -> Any:
            trains = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.SGD(trains, lr=RATE)
            return self.optimizer

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            run.losses.append(mean_over_ranks(loss))
            return loss

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if not state.global_step:
                run.weights.append(named(whole(model)))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            run.weights.append(named(whole(model)))

    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        lr_scheduler_type="constant",
        learning_rate=RATE,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE.type == "cpu",
        use_liger_kernel=patched,
        liger_kernel_config={"activations": "full"} if patched and adapter == RECOMPUTED else None,
        bf16=COMPUTE is torch.bfloat16,
        **engine,
    )
    trainer = InOrder(model=make_model(adapter), args=settings, train_dataset=rows, callbacks=[Watch()])
    with counting(run):
        trainer.train()
    return run


@engine
def trainer_zero3(adapter: str, patched: bool) -> Run:
    return _trainer(adapter, patched, deepspeed=_deepspeed(3, HIDDEN))  # norms stay whole, as in large models


@engine
def pipeline(adapter: str, patched: bool) -> Run:
    """torch.distributed.pipelining: each rank has half of the layers; the last stage's loss is the fused one."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from liger_hw.transformers.functional import liger_fused_linear_cross_entropy

    model = make_model(adapter).to(DEVICE)
    patch(model, patched)
    stage = _Stage(model, dist.get_rank() == 0)
    ours = {name: p for name, p in model.named_parameters() if any(p is q for q in stage.parameters())}

    def loss_fn(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        with computing():
            if patched:
                return liger_fused_linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, shifted)
            return torch.nn.functional.cross_entropy(model.lm_head(hidden.flatten(0, 1)).float(), shifted)

    schedule = ScheduleGPipe(PipelineStage(stage, dist.get_rank(), 2, DEVICE), n_microbatches=1, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(ours.values(), lr=RATE)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if dist.get_rank() == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        loss = losses[0].detach().clone() if losses else torch.zeros((), device=DEVICE)
        dist.broadcast(loss, 1)
        return loss

    def whole() -> dict[str, torch.Tensor]:
        found = {}
        for name, p in model.named_parameters():
            there = torch.tensor(0 if name not in ours else dist.get_rank() + 1, device=DEVICE)
            dist.all_reduce(there, op=dist.ReduceOp.MAX)
            found[name] = p.detach().clone()
            dist.broadcast(found[name], int(there) - 1)
        return found

    return loop(model, whole, 1, step=step, share=lambda batch: batch)


ENGINES |= {
    "fsdp1_flat": partial(_fsdp1, original=False, late=False),
    "fsdp1_flat_patched_after": partial(_fsdp1, original=False, late=True),
    "fsdp1_original_patched_after": partial(_fsdp1, original=True, late=True),
    "fsdp2_head_alone": partial(_fsdp2, tail=False),
    "fsdp2_group": partial(_fsdp2, tail=True),
    "fsdp2_group_patched_after": partial(_fsdp2, tail=True, late=True),
    "hsdp": partial(_fsdp2, tail=True, replicas=2),
    "trainer_ddp": partial(_trainer, ddp_find_unused_parameters=False),
    "trainer_fsdp2": partial(
        _trainer,
        fsdp="full_shard auto_wrap",
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    ),
    "zero1": partial(_zero, stage=1),
    "zero2": partial(_zero, stage=2),
    "zero3": partial(_zero, stage=3),
    "zero3_init": partial(_zero, stage=3, init=True),
}


class _Stage(torch.nn.Module):
    """Half of a Llama: the embedding and the first layers, or the last layers and the norm."""

    def __init__(self, model: Any, first: bool) -> None:
        super().__init__()
        half = LAYERS // 2
        self.embed = model.model.embed_tokens if first else None
        self.layers = model.model.layers[:half] if first else model.model.layers[half:]
        self.norm, self.head = (None, None) if first else (model.model.norm, model.lm_head)
        self.rotary = model.model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with computing():
            return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        places = torch.arange(x.shape[1], device=x.device)[None]
        angles = self.rotary(x, position_ids=places)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=places, position_embeddings=angles)
        return x if self.norm is None else self.norm(x)


# -- comparing -------------------------------------------------------------------------------------------------------


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference, by norm, of two sets of gradients, and its parameter."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:4]
    most = max(float(w.norm()) for w in wanted.values())
    errors = {n: float((found[n] - w).norm()) / max(float(w.norm()), 1e-4 * most) for n, w in wanted.items()}
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def cell(name: str, adapter: str) -> dict[str, Any]:
    """A record. On GPUs and in bfloat16 it also has the unpatched engine's differences from plain float32."""
    global COMPUTE
    ranks = 1 if name.startswith(("tp_", "pipeline")) else dist.get_world_size()
    chosen, COMPUTE = COMPUTE, torch.float32
    expected = alone(adapter, ranks)
    COMPUTE = chosen
    record = {
        "engine": name,
        "adapter": adapter,
        "ranks": dist.get_world_size(),
        "compute": str(COMPUTE).removeprefix("torch."),
    }
    found = run_engine(name, adapter, True)
    record |= errors_of(found, expected)
    if COMPUTE is not torch.float32 or DEVICE.type != "cpu":
        unpatched = run_engine(name, adapter, False)
        record["unpatched"] = errors_of(unpatched, expected)
        record["peak_mib"], record["unpatched"]["peak_mib"] = largest(found.peak_mib), largest(unpatched.peak_mib)
    return {**record, "kernels": on_all_ranks(found.kernels), "recomputed": on_all_ranks(found.recomputed)}


def on_all_ranks(calls: Counter) -> dict[str, int]:
    counted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counted, calls)
    return dict(sorted(sum(counted, Counter()).items()))


def run_engine(name: str, adapter: str, patched: bool) -> Run:
    """A run; afterwards accelerate's plugin is removed from the environment and from classes."""
    environment = dict(os.environ)
    try:
        return ENGINES[name](adapter, patched)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(True)


def largest(value: float) -> float:
    """The largest value of all ranks."""
    value = torch.tensor(value, device=DEVICE)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def errors_of(found: Run, expected: Run) -> dict[str, Any]:
    worst = max(error(a, b) for a, b in zip(found.gradients(), expected.gradients()))
    loss = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses))
    return {"loss_error": loss, "gradient_error": worst[0], "gradient": worst[1]}


def versions() -> dict[str, str]:
    """Versions of Python and of the engines' packages."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "deepspeed", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    global DEVICE, COMPUTE, VOCAB, TOKENS
    from liger_hw.transformers import replacing

    replacing.LEAST_BYTES = 0  # these models are small
    parser = argparse.ArgumentParser()
    parser.add_argument("cells", help="engine:adapter, with commas")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compute", default="float32")
    options = parser.parse_args()
    COMPUTE = getattr(torch, options.compute)
    torch.set_num_threads(1)
    if options.device != "cpu":
        DEVICE = torch.device(options.device, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(DEVICE).set_device(DEVICE)
        VOCAB, TOKENS = VOCAB_ON_GPU, TOKENS_ON_GPU
    dist.init_process_group("gloo" if options.device == "cpu" else None)
    found, here = [], versions()
    if DEVICE.type != "cpu":
        here["device"] = torch.get_device_module(DEVICE).get_device_name(DEVICE)
    for name, adapter in (chosen.split(":") for chosen in options.cells.split(",")):
        try:
            found.append(cell(name, adapter))
        except Exception as problem:
            traceback.print_exc()
            failed = f"{type(problem).__name__}: {problem}"
            found.append({"engine": name, "adapter": adapter, "compute": options.compute, "failed": failed})
        found[-1]["versions"] = here
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(found, indent=1))
            print(json.dumps(found[-1]), flush=True)
    sys.stdout.flush()
    os._exit(0)  # an orderly goodbye may hang where one rank has failed


if __name__ == "__main__":
    main()
