"""`liger-hw estimate llama-3-8b --gpu h100 --batch 2 --seq 4096`: a training step's speed and memory.

    liger-hw estimate mistral-7b --gpu h200 --batch 2 --seq 4096 --layers 8
    liger-hw estimate my/config.json --gpu mi300x --batch 1 --seq 8k --lora
    liger-hw estimate llama-3-8b --gpu h100 --batch 2 --seq 4096 --gpus 8 --engine fsdp2

Tokens a second and GiB of one GPU, for Hugging Face, Liger and liger_hw, from the planner and from rates measured on
one H200. It needs no GPU and no weights, and says what it does not know. `liger-hw plan` has the memory dial's levels.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..backends import known_target
from ..recompute.estimate import GPUS, LORA_SHARE, Estimate, trains_in_fp32
from ..recompute.planner import ENGINES, model_named
from ..text import fold, json_text, table
from . import UsageError, user_errors
from .arguments import A_MODEL, positive, tokens

if TYPE_CHECKING:
    from ..autotune.models import Model

MEASURED = "h200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=A_MODEL)
    add("--gpu", choices=GPUS, required=True, metavar="NAME", help=f"what to train on: {', '.join(GPUS)}")
    add("--batch", type=positive, required=True, help="sequences a GPU takes at a time")
    add("--seq", type=tokens, required=True, help="tokens of a sequence, as 8192 or 8k")
    add("--layers", type=positive, help="number of layers (default: the model's)")
    add("--lora", action="store_true", help="adapters on every linear layer; the rest does not train")
    add("--gpus", type=positive, default=1, help="of one host, that share the model's state (default 1)")
    add("--engine", choices=ENGINES, metavar="NAME", help=f"what shards them: {', '.join(ENGINES)} (default fsdp2)")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict, replace

    from ..recompute.estimate import estimates

    if arguments.engine and arguments.gpus == 1:
        raise UsageError(f"estimate: --engine {arguments.engine} shards over several GPUs; add --gpus N")
    arguments.engine = arguments.engine or "fsdp2"
    with user_errors("estimate"):
        model = model_named(arguments.model)
        model = replace(model, layers=arguments.layers or model.layers)
        rows = estimates(
            model,
            arguments.batch,
            arguments.seq,
            GPUS[arguments.gpu][0],
            known_target(arguments.gpu).bandwidth,
            lora=arguments.lora,
            gpus=arguments.gpus,
            engine=arguments.engine,
        )
    unknown = _unknown(arguments, model)
    if arguments.json:
        print(
            json_text({"model": model.name, "estimates": [asdict(row) for row in rows], "unknown": unknown}, indent=2)
        )
        return 0
    gpus = f"{arguments.gpus} x {arguments.gpu}, {arguments.engine}" if arguments.gpus > 1 else arguments.gpu
    print(f"{model.name}, {model.layers} layers, batch {arguments.batch} x {arguments.seq}, bf16, AdamW, {gpus}")
    print(_table(rows))
    if crowded := [row.arm.removeprefix("+ ") for row in rows if row.peak > GPUS[arguments.gpu][1] << 30]:
        print(fold(_too_large(arguments, model, crowded)))
    print(fold("Not known: " + "; ".join(unknown) + "."))
    return 0


def _table(rows: list[Estimate]) -> str:
    base = rows[0].tokens_per_second
    lines = [("a GPU", "tokens/s", "gain", "peak GiB")]
    for row in rows:
        gain = "" if row is rows[0] else f"{row.tokens_per_second / base - 1:+.0%}"
        lines.append((row.arm, f"{row.tokens_per_second:,.0f}", gain, f"{row.peak / 2**30:.1f}"))
    return table(lines)


def _too_large(arguments: argparse.Namespace, model: "Model", arms: list[str]) -> str:
    room = GPUS[arguments.gpu][1]
    too_large = f"More than {arguments.gpu}'s {room} GiB: {', '.join(arms)}."
    plan = f"plan --model {arguments.model} --batch {arguments.batch} --seq {arguments.seq} --memory {room - 2}GiB"
    plan += f" --layers {arguments.layers}" if arguments.layers else ""
    if arguments.gpus > 1:
        plan += f" --shards {arguments.gpus} --engine {arguments.engine}"
    if trains_in_fp32(arguments.gpus, arguments.engine, arguments.lora):
        plan += " --dtype float32 --autocast bfloat16"
    plan += f" --trainable {LORA_SHARE}" if arguments.lora else ""
    return f"{too_large} `liger-hw {plan}` looks for levels that fit."


def _unknown(arguments: argparse.Namespace, model: "Model") -> list[str]:
    """What the estimate for this command line leaves out or assumes."""
    notes = ["the data loader, logging and checkpoints", "an attention other than transformers' default"]
    if arguments.gpu != MEASURED:
        notes.append(f"{arguments.gpu} was not timed: what an H200 reaches of its data sheet's rates stands for it")
    if known_target(arguments.gpu).vendor != "cuda":
        notes.append(f"whether liger_hw gains as much on {arguments.gpu}: none of its kernels has run there")
    if arguments.batch * arguments.seq < 4096:
        notes.append("the host's own time, which sets the pace of small batches")
    if arguments.lora:
        notes.append("the speed of LoRA, which was timed for liger_hw alone")
    if model.vocab % 8:
        notes.append("how slow the logits' products are elsewhere, at a vocabulary that is no multiple of 8")
    if model.experts:
        notes.append("how tokens spread over experts, evenly here; Mixtral-8x7B's peers stand for all")
    if arguments.gpus > 1:
        notes.append("a link other than NVLink" + ", and more GPUs than the four timed" * (arguments.gpus > 4))
    return notes
