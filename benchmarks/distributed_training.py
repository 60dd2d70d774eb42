"""Tokens a second and memory of Trainer on several GPUs: Hugging Face, Liger Kernel and liger_hw.

    python benchmarks/distributed_training.py [--gpus 8 --engine fsdp2,zero3 --layers 32 --batch 2 --seq 4096 --out DIR]

One arm is one torchrun of this file: Llama-3-8B or Qwen3-30B-A3B (--config; as many layers as --layers says) with
random weights and tokens, trained by Hugging Face's Trainer in bf16 with fused AdamW, sharded over all GPUs by FSDP2 or
ZeRO-1, 2 or 3 (need deepspeed; arm `liger` needs liger-kernel). Speed and peak memory are measured over the steps after
a warm-up. An arm that runs out of memory says so. `--config tiny --device cpu` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ARMS = ("huggingface", "liger", "liger_hw")
WARMUP = 3
# --config -> transformers' model type and the sizes, as the models' authors published them
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3_8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen3_30b_a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "tiny": (
        "llama",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "tiny_moe": (
        "qwen3_moe",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
ZERO = {
    "zero_optimization": {"overlap_comm": True, "contiguous_gradients": True},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, help="inside torchrun: the one arm that this process trains")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--engine", default="fsdp2", help="of fsdp2, zero1, zero2 and zero3, with commas")
    parser.add_argument("--config", choices=tuple(CONFIGS), default="llama3_8b")
    parser.add_argument("--gpus", type=int, help="processes; default: the GPUs of this machine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2, help="sequences a GPU and step")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8, help=f"timed steps, after {WARMUP} that are not")
    parser.add_argument("--seconds", type=int, default=120, help="limit of one arm")
    parser.add_argument("--out", type=Path, default=Path("distributed-training"))
    return parser.parse_args()


# -- one arm, inside torchrun ----------------------------------------------------------------------------------------


def make_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = CONFIGS[options.config]
    config = AutoConfig.for_model(model_type, **sizes, num_hidden_layers=options.layers, use_cache=False)
    on = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, int(os.environ["LOCAL_RANK"]))
    if on.type != "cpu":
        torch.get_device_module(on).set_device(on)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if on.type != "cpu" else before)
    try:
        with on:
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    if options.arm == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if options.arm == "liger_hw":
        from liger_hw import transformers

        transformers.patch(model)
    return model


def versions() -> dict[str, str]:
    """Of the packages that an arm is made of, where they are installed."""
    installed = {}
    for package in ("transformers", "accelerate", "deepspeed", "liger-kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def train(options: argparse.Namespace) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from liger_hw.bench import report

    on_gpu = options.device != "cpu"
    device = torch.get_device_module(options.device) if on_gpu else None

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            vocab = CONFIGS[options.config][1]["vocab_size"]
            ids = torch.randint(vocab, (options.seq,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids}

    class Watch(TrainerCallback):
        started = seconds = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARMUP:
                if device:
                    device.synchronize()
                    device.reset_peak_memory_stats()
                self.started = time.perf_counter()
            if state.global_step == WARMUP + options.steps:
                if device:
                    device.synchronize()
                self.seconds = time.perf_counter() - self.started

    model = make_model(options)
    engine: dict[str, Any]
    if options.engine.startswith("zero"):
        stage = {**ZERO["zero_optimization"], "stage": int(options.engine[-1])}
        engine = {"deepspeed": {**ZERO, "zero_optimization": stage, "bf16": {"enabled": on_gpu}}}
    else:
        engine = {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": [type(model.model.layers[0]).__name__]},
        }
    watch = Watch()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.out / "trainer"),
            per_device_train_batch_size=options.batch,
            max_steps=WARMUP + options.steps,
            bf16=on_gpu,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not on_gpu,
            dataloader_num_workers=0,
            **engine,
        ),
        train_dataset=Rows(),
        callbacks=[watch],
    )
    trainer.train()
    if int(os.environ["RANK"]) == 0:
        record = {
            "tokens_per_second": options.batch * options.seq * options.steps / watch.seconds,
            "peak_GiB": device.max_memory_allocated() / 2**30 if device else None,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "machine": report.machine(torch.device(options.device), os.environ.get("LIGER_COMMIT")),
            "versions": versions(),
        }
        (options.out / f"{options.engine}-{options.arm}.json").write_text(json.dumps(record))


# -- all arms --------------------------------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> None:
    count = options.gpus
    if count is None:
        import torch

        count = torch.get_device_module(options.device).device_count()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for engine in options.engine.split(","):
        for arm in options.arms.split(","):
            record = run_arm(options, engine, arm, count)
            record |= {"engine": engine, "arm": arm, "gpus": count, "config": options.config, "layers": options.layers}
            record |= {"batch": options.batch, "seq": options.seq}
            lines.append(record)
            shown = {key: value for key, value in record.items() if key not in ("losses", "machine", "versions")}
            print(json.dumps(shown), flush=True)
            (options.out / "all.json").write_text(json.dumps(lines, indent=1) + "\n")
    print(table(lines))


def run_arm(options: argparse.Namespace, engine: str, arm: str, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), __file__]
    command += ["--arm", arm, "--engine", engine]
    for name in ("config", "device", "layers", "batch", "seq", "steps", "out"):
        command += [f"--{name}", str(getattr(options, name))]
    answer = options.out / f"{engine}-{arm}.json"
    answer.unlink(missing_ok=True)
    started = time.time()
    with open(options.out / f"{engine}-{arm}.log", "w") as log:
        try:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=options.seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {options.seconds} s"}
    if answer.exists():
        return {**json.loads(answer.read_text()), "seconds": round(time.time() - started)}
    text = (options.out / f"{engine}-{arm}.log").read_text()
    reasons = [line.strip() for line in text.splitlines() if "Error" in line and "ChildFailed" not in line]
    return {"failed": "out of memory" if "OutOfMemoryError" in text else (reasons or [text])[-1][-300:]}


def table(lines: list[dict[str, Any]]) -> str:
    text = [f"{'engine':8}{'arm':14}{'tokens/s/GPU':>14}{'GiB/GPU':>10}"]
    for line in lines:
        if "failed" in line:
            text.append(f"{line['engine']:8}{line['arm']:14}  {line['failed']}")
            continue
        memory = "-" if line["peak_GiB"] is None else f"{line['peak_GiB']:.1f}"
        text.append(f"{line['engine']:8}{line['arm']:14}{line['tokens_per_second']:14.0f}{memory:>10}")
    return "\n".join(text)


if __name__ == "__main__":
    options = arguments()
    train(options) if options.arm else run_all(options)
