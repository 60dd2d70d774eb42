"""How long it takes to patch a 7B model (Mistral's shape, bf16), probes included.

    python benchmarks/patch_time.py [FILE.json] [--device cuda] [--hidden 4096] [--layers 32]

Each arm in a process of its own, forked after torch and transformers are imported and before anything touches the
device: `liger_hw.patch(model)`, which recognises every part by probing, and
`apply_liger_kernel_to_mistral(model=model)` of liger_hw and of liger-kernel. `cold` has empty kernel and tuning caches,
`warm` those that the cold run left. Seconds: importing the library, the first patch, a second one after `revert()`, and
the first step (which compiles where `cold`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or asking for devices would spoil the fork

import torch
import transformers
from transformers import MistralConfig, MistralForCausalLM

ARMS = (("patch", "cold"), ("patch", "warm"), ("function", "cold"), ("function", "warm"), ("liger", "cold"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "arms": []}
    for arm in dict.fromkeys(arm for arm, _ in ARMS):
        with tempfile.TemporaryDirectory() as folder:  # both caches of an arm
            for caches in [caches for name, caches in ARMS if name == arm]:
                result = Path(folder) / f"{caches}.json"
                child = os.fork()
                if not child:
                    code = 1
                    try:
                        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
                        os.environ["LIGER_HW_CACHE_DIR"] = f"{folder}/liger_hw"
                        result.write_text(json.dumps(measure(arm, options)))
                        code = 0
                    except Exception:
                        traceback.print_exc()
                    finally:
                        sys.stdout.flush()
                        os._exit(code)
                os.waitpid(child, 0)
                measured = (
                    json.loads(result.read_text()) if result.exists() else {"error": "it failed; see its traceback"}
                )
                found["arms"].append({"arm": arm, "caches": caches, **measured})
                print(json.dumps(found["arms"][-1]), flush=True)
    if options.file:
        Path(options.file).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    model = build(options, device)
    parameters = sum(p.numel() for p in model.parameters())
    found: dict[str, Any] = {"billion_parameters": round(parameters / 1e9, 3)}
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_device_name()
    start = time.perf_counter()
    if arm == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_mistral as function
    elif arm == "function":
        from liger_hw.transformers import apply_liger_kernel_to_mistral as function
    else:
        from liger_hw.transformers import patch
    found["import_seconds"] = time.perf_counter() - start

    def once() -> Any:
        _synchronize(device)
        began = time.perf_counter()
        report = patch(model) if arm == "patch" else function(model=model)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
        return report

    seconds: list[float] = []
    report = once()
    if arm != "liger":  # it has no way back
        found["patched"] = len(report.patched)
        report.revert()
        once()
    found["patch_seconds"] = seconds
    ids = torch.randint(model.config.vocab_size, (1, 64), device=device)
    began = time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    _synchronize(device)
    found["first_step_seconds"] = time.perf_counter() - began
    return found


def build(options: argparse.Namespace, device: torch.device) -> Any:
    """Memory for the weights, and small numbers in them: what they are does not matter."""
    config = MistralConfig(
        vocab_size=32768, hidden_size=options.hidden, num_hidden_layers=options.layers, head_dim=options.hidden // 32
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = MistralForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    rotary = type(model.model.rotary_emb)(config)  # its buffers are not among the weights
    model = model.to_empty(device=device).train()
    model.model.rotary_emb = rotary.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


if __name__ == "__main__":
    sys.exit(main())
