"""One training step of a whole model at long sequences: seconds, tokens/s and peak memory, beside the plan's.

    python benchmarks/long_context.py --out FILE.json 16384 65536 524288::documents 524288:4
    python benchmarks/long_context.py --out FILE.json --arm liger 65536
    torchrun --nproc-per-node 4 benchmarks/long_context.py --out FILE.json 1048576::documents 1048576:2

Each word is TOKENS[:LAYERS[:ATTENTION[:LEVEL]]]. Attention is `causal` over the whole sequence (the default), or within
`documents`, packed ones of 16384 tokens: the memory of the former and less of its time. Batch 1, bf16, sdpa. LEVEL is
one of activations=; by default the planner has the fastest mix that fits --memory and --host.

AdamW has its states on the GPU in bf16 and steps each parameter as soon as its gradient is complete, which is freed
then: gradients never exist together. Level `offload` puts layer inputs into pinned host memory; nothing else is there.

Of several processes each has an equal part of the sequence's tokens (Ulysses: around attention the ranks exchange
tokens for heads) and of the parameters (FSDP2, a layer at a time). Seconds and GiB are the slowest's and the fullest's.

Arms: ours; `hf` is Hugging Face as shipped, `checkpointing` the same with its checkpointing, `liger` adds Liger and its
tiled MLP to that. The planner knows ours alone. A step that the plan expects to end after --seconds is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
import torch.nn.functional as F
import training

import liger_hw
from liger_hw.autotune import models
from liger_hw.backends import with_index
from liger_hw.bench import report
from liger_hw.recompute import offload
from liger_hw.recompute.levels import in_words, level_of_each, parse_size
from liger_hw.recompute.planner import Assumptions, Planner, Prediction, usable

GIB, DOCUMENT = 1 << 30, 16384
ARMS = ("liger_hw", "hf", "checkpointing", "liger")
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="TOKENS[:LAYERS[:ATTENTION[:LEVEL]]]")
    parser.add_argument("--model", default="llama3", choices=training.MODELS)
    parser.add_argument("--arm", default="liger_hw", choices=ARMS)
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 on all linear layers")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate")
    parser.add_argument("--memory", help="what a step may use, as 78GiB (default: 96%% of the device's)")
    parser.add_argument("--host", type=float, help="GiB that a process may pin (default: four fifths of what is free)")
    parser.add_argument("--seconds", type=float, help="for all steps (default: no limit)")
    parser.add_argument("--hidden", type=int, help="smaller width, for a quick try")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    if options.lora and options.arm == "liger":
        parser.error("--lora is for the other arms")
    deadline = time.perf_counter() + (options.seconds or math.inf)
    if "WORLD_SIZE" in os.environ:
        device = torch.device(options.device)
        if device.type != "cpu":
            device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
            torch.get_device_module(device).set_device(device)
        dist.init_process_group(device_id=None if device.type == "cpu" else device)
    else:
        device = with_index(options.device)
    results: dict[str, Any] = {
        "options": vars(options),
        "machine": report.machine(device, os.environ.get("LIGER_COMMIT")),
    }
    results |= {"ranks": ranks(), "host_gib": round(offload.free_host_memory() / GIB, 1), "runs": []}
    for attention, document in (("causal", 0), ("documents", DOCUMENT)):
        register(attention, document)
    model, layers_built = None, 0
    for word in options.runs:
        tokens, layers, attention, level = (*word.split(":"), "", "", "")[:4]
        layers = int(layers or training.MODELS[options.model].layers)
        if layers != layers_built:
            for parameter in model.parameters() if model is not None else ():
                (parameter._post_accumulate_grad_hooks or {}).clear()  # a cycle that Python cannot collect
            model = None
            training.release(device)
            model, layers_built = build(options, layers, device), layers
        row = {"arm": options.arm, "tokens": int(tokens), "layers": layers, "attention": attention or "causal"}
        row |= run(model, row["tokens"], row["attention"], level, options, device, deadline)
        results["runs"].append(row)
        if first_rank():
            print(json.dumps(row), flush=True)
            Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# -- the model -------------------------------------------------------------------------------------------------------


def build(options: argparse.Namespace, layers: int, device: torch.device) -> Any:
    """The model as its arm has it, whose parameters are updated in backward."""
    schedule = training.Schedule(model=options.model, layers=layers, batch=1, hidden=options.hidden)
    model = training.build(schedule, device)
    blocks = list(model.model.layers)
    if options.lora:
        import peft

        adapters = peft.LoraConfig(r=16, target_modules="all-linear")
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)  # else adapters compute in fp32
    if options.arm == "liger_hw":
        liger_hw.patch(model)
    if options.arm == "liger":
        use_liger(model, blocks)
    if options.arm in ("checkpointing", "liger"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if ranks() > 1:
        from torch.distributed.fsdp import fully_shard

        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    for block in blocks if options.arm == "liger" else ():
        # its tiled MLP accumulates gradients a tile: they are complete when what is in front of the MLP has its own
        first = block.input_layernorm.weight
        update_in_backward([first, *block.mlp.parameters()], first, options)
    rest = [p for name, p in model.named_parameters() if options.arm != "liger" or ".mlp." not in name]
    for parameter in rest:
        if parameter.requires_grad and not parameter._post_accumulate_grad_hooks:
            update_in_backward([parameter], parameter, options)
    training.release(device)
    return model.train()


def use_liger(model: Any, blocks: list[Any]) -> None:
    from liger_kernel.transformers import LigerTiledSwiGLUMLP, apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    for block in blocks:
        block.mlp.forward = functools.partial(LigerTiledSwiGLUMLP.forward, block.mlp)
        block.mlp._mlp_forward = functools.partial(LigerTiledSwiGLUMLP._mlp_forward, block.mlp)
        block.mlp.num_shards = None


def update_in_backward(parameters: list[torch.Tensor], last: torch.Tensor, options: argparse.Namespace) -> None:
    """Let the gradient of `last` update `parameters` as soon as it is complete."""
    fused = {"fused": True} if options.optimizer == "adamw" else {}
    optimizer = OPTIMIZERS[options.optimizer](parameters, lr=options.lr, **fused)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer)  # makes the states
    last.register_post_accumulate_grad_hook(lambda _: update(optimizer))


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# -- attention -------------------------------------------------------------------------------------------------------


def register(name: str, document: int) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(name, functools.partial(attend, document))


def attend(
    document: int,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """sdpa of [1, heads, tokens, dim], causal in the whole sequence, or in its documents of that many tokens."""
    if attention_mask is not None or document and query.shape[2] * ranks() % document:
        raise ValueError(f"documents: no mask, and a multiple of {document} tokens; got {tuple(query.shape)}")
    if (heads := key.shape[1]) < ranks():
        key, value = (t.repeat_interleave(ranks() // heads, 1) for t in (key, value))
    q, k, v = (exchanged(t[0]) for t in (query, key, value))
    q, k, v = (t.unflatten(1, (-1, document or t.shape[1])).transpose(0, 1) for t in (q, k, v))  # a document is a row
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return exchanged(y.transpose(1, 2).flatten(0, 1))[None], None


def exchanged(t: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, dim] with a rank's tokens -> with a rank's heads, and [tokens, heads, dim] the other way."""
    return t if ranks() == 1 else _Exchange.apply(t, 0, 1)


class _Exchange(torch.autograd.Function):
    """Dimension `split` of t is divided among the ranks, and `gather` becomes whole."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, split: int, gather: int) -> torch.Tensor:
        ctx.dims = gather, split
        sent = torch.stack(t.chunk(ranks(), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        del sent
        return torch.cat(received.unbind(), gather)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return _Exchange.forward(ctx, gradient, *ctx.dims), None, None


# -- a step ----------------------------------------------------------------------------------------------------------


def run(
    model: Any, tokens: int, attention: str, level: str, options: argparse.Namespace, device: torch.device, until: float
) -> dict[str, Any]:
    """What the plan says of one step, and what it took, after a short one that compiles."""
    planner = planner_of(model, tokens, attention, options)
    prediction = planned(planner, level, options, device)
    seconds = prediction.seconds
    row: dict[str, Any] = {}
    if options.arm == "liger_hw":
        row = {"levels": in_words(prediction.levels), "planned_gib": round(prediction.peak / GIB, 2)}
        row |= {"planned_seconds": round(seconds, 3)}
    if of_all(seconds > until - time.perf_counter(), "max", device):
        return row | {"failure": f"not tried: expected to take {seconds:.0f} s, which were not left"}
    if first_rank():
        print(f"{options.arm}, {tokens} tokens: planned {row}", flush=True)
    levels = liger_hw.activations(prediction.levels, model) if row else contextlib.nullcontext()
    model.set_attn_implementation(attention)
    try:
        with levels:
            if device.type != "cpu" and "offload" in prediction.levels:
                row["pinning_seconds"] = pin(prediction, device, options.host)
            step(model, min(tokens, DOCUMENT * ranks()), device)
            row |= step(model, tokens, device)
    except torch.OutOfMemoryError as error:
        if ranks() > 1:  # the others wait for this one
            raise
        row["failure"] = str(error).splitlines()[0][:300]
        for parameter in model.parameters():
            parameter.grad = None
    training.release(device)
    return row


def planner_of(model: Any, tokens: int, attention: str, options: argparse.Namespace) -> Planner:
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad) / sum(p.numel() for p in parameters)
    assumptions = Assumptions(
        optimizer=options.optimizer, trainable=trained, shards=ranks(), sequence=ranks(), in_backward=True
    )
    batch, seq = (tokens // DOCUMENT, DOCUMENT) if attention == "documents" else (1, tokens)
    return Planner(models.from_config(model.config.to_dict(), "model"), batch, seq, assumptions)


def planned(planner: Planner, level: str, options: argparse.Namespace, device: torch.device) -> Prediction:
    if level or options.arm != "liger_hw":
        return planner.predict(level_of_each(level or "tiled", planner.model.layers))
    if device.type == "cpu":
        return planner.best(sys.maxsize, 0)
    host = offload.SHARE * offload.free_host_memory() if options.host is None else options.host * GIB
    return planner.best(parse_size(options.memory) if options.memory else usable(device), host)


def pin(prediction: Prediction, device: torch.device, host: float | None) -> float:
    """Seconds that it takes to pin what the first step would pin."""
    memory, began = offload.host_memory(device), time.perf_counter()
    memory.limit = memory.limit if host is None else int(host * GIB)
    memory.reserve(prediction.host - memory.pinned)
    return round(time.perf_counter() - began, 1)


def step(model: Any, tokens: int, device: torch.device) -> dict[str, Any]:
    """One step on random tokens, of which each rank has its part."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=device, generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    if ranks() > 1:
        batch |= {"shift_labels": F.pad(ids, (0, 1), value=-100)[:, 1:]}
        batch |= {"position_ids": torch.arange(tokens, device=device)[None]}
        batch = {name: t.chunk(ranks(), 1)[dist.get_rank()].contiguous() for name, t in batch.items()}
        batch |= {"num_items_in_batch": tokens - 1}
        dist.barrier()
    if module is not None:
        module.synchronize()
        module.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = model(**batch, use_cache=False).loss
    value = of_all(loss.item(), "sum", device)
    forward = time.perf_counter() - began
    (loss * ranks()).backward()  # FSDP2 takes the mean of the ranks' gradients, and each loss is a share
    if module is not None:
        module.synchronize()
    seconds = of_all(time.perf_counter() - began, "max", device)
    row = {"seconds": round(seconds, 3), "forward_seconds": round(forward, 3), "loss": round(value, 4)}
    row["tokens_per_second"] = round(tokens / seconds, 1)
    if module is not None:
        row["peak_gib"] = round(of_all(module.max_memory_allocated() / GIB, "max", device), 2)
        row["reserved_gib"] = round(of_all(module.max_memory_reserved() / GIB, "max", device), 2)
        row["pinned_gib"] = round(offload.host_memory(device).pinned / GIB, 2)
    return row


def of_all(value: float, how: str, device: torch.device) -> float:
    """The sum or the largest of the ranks' values."""
    if ranks() == 1:
        return value
    values = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return values.item()


if __name__ == "__main__":
    sys.exit(main())
