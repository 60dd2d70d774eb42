"""`plan` and `estimate`: memory and speed of a model's training step on a device, which need not be here."""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import asdict, replace
from typing import Any

from ..autotune.models import Model
from ..backends import known_target
from ..recompute.estimate import GPUS, LORA_SHARE, Estimate, estimates, trains_in_fp32
from ..recompute.levels import DEFAULT, in_words, level_of_each, parse_size
from ..recompute.planner import ENGINES, Assumptions, Planner, Prediction, longest, model_named, usable
from ..text import fold, json_text, table
from . import UsageError, user_errors
from .arguments import A_MODEL, dtype_name, positive, share, tokens, torch_dtype

MAX = 0
"""The number for which `--seq max` stands."""
MEASURED = "h200"
"""The GPU on which the rates behind the estimates were measured."""


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help=A_MODEL)
    add("--batch", type=positive, default=1, help="sequences a device takes at a time (default 1)")
    add("--seq", type=_length, required=True, help="tokens of a sequence, as 8192 or 8k, or max")
    add("--memory", nargs="+", default=[], metavar="80GiB", help="what a step may use (default: the device here)")
    pinned = "host memory that a device may pin (default: four fifths of what is free here; no limit with --memory)"
    add("--host-memory", metavar="100GiB", help=pinned)
    add("--layers", type=positive, help="number of layers (default: the model's)")
    add("--dtype", type=dtype_name, default="bfloat16", help="of the parameters (default bf16)")
    add("--autocast", type=dtype_name, help="dtype of activations, as bf16 under autocast (default: --dtype)")
    add("--optimizer", default="adamw", help="adamw (default), adam, sgd, momentum, adafactor, adamw8bit")
    add("--shards", type=positive, default=1, help="devices that share the model's state (default 1)")
    add("--engine", help="how the model's state is divided: fsdp2 (default), zero1, zero2, zero3")
    add("--trainable", type=share, default=1.0, help="share of the parameters that train, for LoRA 0.005 (default 1)")
    add("--lora", action="store_const", const=LORA_SHARE, dest="trainable", help=f"as --trainable {LORA_SHARE}")
    adapters = "what LoRA computes in: fp32 (default, as PEFT loads it), autocast (default with --autocast), or model"
    add("--adapters", help=adapters)
    add("--gpus", type=positive, default=1, help="devices that share each sequence and the parameters (default 1)")
    add("--float8", action="store_true", help="linears multiply in FP8 (liger_hw.float8)")
    add("--json", action="store_true", help="print JSON")


def run_plan(arguments: argparse.Namespace) -> int:
    """`liger-hw plan --model llama-3-8b --batch 4 --seq 4096 --memory 80GiB`: activation levels, memory and speed.

        liger-hw plan --model mistral-7b --batch 4 --seq 4096              every level, and what fits the device here
        liger-hw plan --model my/config.json --batch 1 --seq 32768 --memory 80GiB 140GiB
        liger-hw plan --model llama-3-8b --seq max --memory 140GiB --gpus 4   the longest sequence

    Predicted from the model's shape, without a device. Below the table are the assumptions and, with one --memory, how
    to launch the mix that fits. A patched model's `activations="fit"` and `"80GiB"` use the same planner.
    """
    with user_errors():
        budgets, host = _budgets(arguments.memory), _host(arguments)
        planner = _planner(arguments, budgets, host)
        rows: list[tuple[str, Any]] = [("default", planner.predict(level_of_each(DEFAULT, planner.model.layers)))]
        rows += [(one.levels[0], one) for one in planner.pure()]
        for name, budget in budgets:
            try:
                rows.append((name, planner.best(budget, host)))
            except ValueError as error:
                rows.append((name, str(error)))
    if arguments.json:
        print(json_text([{"batch": planner.batch, "seq": planner.seq} | _as_json(*row) for row in rows], indent=2))
    else:
        _print(planner, rows)
        if len(budgets) == 1 and not isinstance(rows[-1][1], str):
            print(_launch(planner, rows[-1][1]))
    return 1 if any(isinstance(answer, str) for _, answer in rows) else 0


def _length(text: str) -> int:
    return MAX if text == "max" else tokens(text)


def _host(arguments: argparse.Namespace) -> float:
    """Bytes of host memory that a device may pin."""
    from ..recompute.offload import SHARE, free_host_memory

    if arguments.host_memory is not None:
        return _size("--host-memory", arguments.host_memory)
    return math.inf if arguments.memory else SHARE * free_host_memory() / max(arguments.shards, arguments.gpus)


def _size(option: str, text: str) -> int:
    """Bytes of a size. Raises `ValueError`."""
    if (size := parse_size(text)) is None:
        raise ValueError(f"{option} {text!r} is no size; write it as 80GiB or 80000MB")
    return size


def _planner(arguments: argparse.Namespace, budgets: list[tuple[str, int]], host: float) -> Planner:

    if arguments.engine and arguments.shards == arguments.gpus == 1:
        raise ValueError(f"--engine {arguments.engine} divides the state over several devices: --shards N or --gpus N")
    if arguments.shards > 1 and arguments.shards % arguments.gpus:
        raise ValueError(f"--gpus {arguments.gpus} share each sequence; --shards has to be a multiple of it")
    if arguments.adapters and arguments.trainable == 1:
        raise ValueError(f"--adapters {arguments.adapters} is for LoRA: add --lora, or --trainable 0.005")
    if arguments.autocast == "float32":
        raise ValueError("--autocast computes in bf16 or fp16; without it a model in fp32 computes in fp32")
    model = model_named(arguments.model)
    model = replace(model, layers=arguments.layers or model.layers)
    assumptions = Assumptions(
        dtype_bytes=torch_dtype(arguments.dtype).itemsize,
        compute_bytes=torch_dtype(arguments.autocast or arguments.dtype).itemsize,
        optimizer=arguments.optimizer,
        trainable=arguments.trainable,
        adapters=arguments.adapters or ("autocast" if arguments.autocast else "fp32"),
        shards=max(arguments.shards, arguments.gpus),
        engine=arguments.engine or "fsdp2",
        sequence=arguments.gpus,
        float8=arguments.float8,
    )

    def planner_at(seq: int) -> Planner:
        return Planner(model, arguments.batch, seq, assumptions)

    if arguments.seq != MAX:
        return planner_at(arguments.seq)
    if len(budgets) != 1:
        raise ValueError("--seq max takes one --memory, such as 139GiB for an H200; without it, this device's is taken")
    return longest(planner_at, budgets[0][1], host)


def _launch(planner: Planner, prediction: Prediction) -> str:
    """How to launch a training at these levels."""
    runs = ((level, len(list(run))) for level, run in itertools.groupby(prediction.levels))
    levels = " + ".join(f'["{level}"] * {count}' for level, count in runs)
    count, engine, sequence = planner.assumptions.shards, planner.assumptions.engine, planner.assumptions.sequence
    lines = ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    if count == 1:
        lines[0] += " python train.py"
    elif engine == "fsdp2":
        lines.append(f"torchrun --nproc-per-node {count} train.py")
    else:
        ulysses = [f"--use_parallelism_config --parallelism_config_sp_size {sequence}"] if sequence > 1 else []
        lines.append(f"accelerate launch --num_processes {count} --mixed_precision bf16")
        lines += [f"--use_deepspeed --zero_stage {engine[-1]}", *ulysses, "train.py"]
    command = (" \\\n" + " " * 14).join(lines)
    return f"In train.py:  liger_hw.patch(model, activations={levels})\nLaunch:       {command}"


def _budgets(texts: list[str]) -> list[tuple[str, int]]:
    """(name, bytes) of each --memory; without one, of the accelerator here."""
    import torch

    if not texts and torch.accelerator.is_available():
        return [("fit", usable(torch.device(torch.accelerator.current_accelerator().type, 0)))]
    return [(text, _size("--memory", text)) for text in texts]


def _as_json(name: str, answer: Prediction | str) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"setting": name, "error": answer}
    return {
        "setting": name,
        "levels": list(answer.levels),
        "peak_bytes": answer.peak,
        "host_bytes": answer.host,
        "speed": round(answer.speed, 4),
        "h200_seconds": round(answer.seconds, 4),
    }


def _print(planner: Planner, rows: list[tuple[str, Any]]) -> None:
    model = planner.model
    print(f"{model.name}, {model.layers} layers, batch {planner.batch} x {planner.seq}")
    lines = [("activations=", "levels, first layer first", "peak GiB", "speed", "H200 s", "host GiB")]
    notes = [f"{name}: {answer}" for name, answer in rows if isinstance(answer, str)]
    for name, answer in rows:
        if not isinstance(answer, str):
            cells = f"{100 * answer.speed:.1f}%", f"{answer.seconds:.2f}", f"{answer.host / 2**30:.1f}"
            lines.append((name, in_words(answer.levels), f"{answer.peak / 2**30:.1f}", *cells))
    print(table(lines))
    kinds = {"masked": "attention with a mask (a sliding window)", "eager": "eager attention (its scores in memory)"}
    attention = kinds.get(planner.attention, "flash attention")
    if 0 < model.positions < planner.seq:
        notes.append(
            f"{model.name} was made for sequences of at most {model.positions} tokens. Memory is predicted for --seq "
            f"{planner.seq} all the same; the position embeddings have to be extended first."
        )
    if planner.assumptions.shards > 1:
        notes.append(
            f"{planner.assumptions.engine} divides the model's state; what it gathers and its buffers are counted. "
            "Trainer's bf16 under FSDP2 has parameters and states in fp32: --dtype float32 --autocast bfloat16. Not in "
            "it: activations split over devices by tensor or pipeline parallelism. --gpus is by Ulysses: under FSDP2 "
            "train.py splits sequences as benchmarks/long_context.py does, under --engine zero3 Trainer and accelerate "
            "do (sp_size). torch's context_parallel (cp_size) took 1.7 times the memory."
        )
    if planner.assumptions.float8:
        notes.append(f"--float8: a step at `keep` is predicted to be {planner.float8_gain():.2f}x as fast as in bf16.")
    parts = planner.layer.growing | {"two layer inputs at `offload`": 2 * planner.layer.kept["full"]}
    words = ", ".join(f"{name} {size / planner.tokens / 1024:.1f}" for name, size in parts.items())
    notes.append(f"What grows at `tiled` and `offload` during a layer's backward, in KiB a token: {words}.")
    meaning = "Speed is against `keep`; seconds are a step's on an H200; `default` is a patch without activations=."
    print(fold("\n".join([*notes, f"Assumed: {planner.assumptions}; {attention}. {meaning}"])))


# -- estimate ----------------------------------------------------------------------------------------------------------


def estimate_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_estimate(arguments: argparse.Namespace) -> int:
    """`liger-hw estimate llama-3-8b --gpu h100 --batch 2 --seq 4096`: a training step's speed and memory.

        liger-hw estimate mistral-7b --gpu h200 --batch 2 --seq 4096 --layers 8
        liger-hw estimate my/config.json --gpu mi300x --batch 1 --seq 8k --lora
        liger-hw estimate llama-3-8b --gpu h100 --batch 2 --seq 4096 --gpus 8 --engine fsdp2

    Tokens per second and GiB of one GPU, for Hugging Face, Liger and liger_hw, from the planner and from rates measured
    on one H200. Needs no GPU and no weights. `liger-hw plan` has the levels of the memory dial.
    """

    if arguments.engine and arguments.gpus == 1:
        raise UsageError(f"--engine {arguments.engine} shards over several GPUs; add --gpus N")
    arguments.engine = arguments.engine or "fsdp2"
    with user_errors():
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


def _too_large(arguments: argparse.Namespace, model: Model, arms: list[str]) -> str:
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


def _unknown(arguments: argparse.Namespace, model: Model) -> list[str]:
    """What the estimate does not include, or assumes."""
    notes = ["the data loader, logging and checkpoints", "an attention other than transformers' default"]
    if arguments.gpu != MEASURED:
        notes.append(f"{arguments.gpu} was not timed: it is assumed to reach an H200's share of its data sheet's rates")
    if known_target(arguments.gpu).vendor != "cuda":
        notes.append(f"whether liger_hw gains as much on {arguments.gpu}: none of its kernels has run there")
    if arguments.batch * arguments.seq < 4096:
        notes.append("the host's time, which limits small batches")
    if arguments.lora:
        notes.append("the speed of LoRA, which was timed for liger_hw alone")
    if model.vocab % 8:
        notes.append("the peers' slower products at a vocabulary that is not a multiple of 8")
    if model.experts:
        notes.append("how tokens spread over experts (assumed: evenly; peers as measured for Mixtral-8x7B)")
    if arguments.gpus > 1:
        notes.append("a link other than NVLink" + ", and more GPUs than the four timed" * (arguments.gpus > 4))
    return notes
