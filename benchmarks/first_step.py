"""First and second step of patched models with empty kernel caches, each arm in a fresh process: Mistral and a
Mixtral-like MoE.

python benchmarks/first_step.py [FILE.json] [--models mistral,mixtral] [--arms liger_hw,liger,hf] [--rounds 2] [--budget
90]
    [--device cuda] [--small]

Two layers of the published width, 1 x 2048 tokens, bf16. `import` and `patch` are the seconds before the model is
built, `steps` forward and backward with a synchronisation at the end. One process runs at a time: the arms of a model
in turn, and in the opposite order for the next model and in the next round. What every arm reads from disk (torch,
transformers, Triton's compiler, which Triton hashes) is read once before, so that the first arm does not wait for it.
FILE is written after every arm; what the budget ends is there with the steps it made.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ARM = """
import json, sys, time
def say(**what): print("SAID " + json.dumps(what), flush=True)
arm, name, device, small = sys.argv[1:4] + [sys.argv[4] == "small"]
import torch, transformers
if device != "cpu":
    torch.mm(*[torch.ones(64, 64, device=device)] * 2)
title = name.capitalize()
Config, Model = (getattr(transformers, title + kind) for kind in ("Config", "ForCausalLM"))
before = time.perf_counter()
if arm == "liger":
    import liger_kernel.transformers as patches
elif arm == "liger_hw":
    import liger_hw.transformers as patches
say(seconds={"import": time.perf_counter() - before}, torch=torch.__version__, transformers=transformers.__version__)
before = time.perf_counter()
if arm != "hf":
    getattr(patches, f"apply_liger_kernel_to_{name}")()
say(seconds={"patch": time.perf_counter() - before})
shape = dict(num_hidden_layers=2, vocab_size=32000)
if small:
    shape |= dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=320)
config = Config(**shape)
torch.set_default_dtype(torch.bfloat16)
with torch.device(device):
    model = Model(config).train()
ids = torch.randint(0, config.vocab_size, (1, 64 if small else 2048), device=device)
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
for _ in range(3):
    wait()
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    wait()
    say(step=time.perf_counter() - start)
"""


def run(arm: str, model: str, device: str, small: bool, seconds: float) -> dict:
    """What one process said: {import, patch, steps, error}."""
    found: dict = {"model": model, "arm": arm, "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        places = {"TRITON_CACHE_DIR": f"{folder}/triton", "LIGER_HW_CACHE_DIR": f"{folder}/liger_hw"}
        places["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        command = [sys.executable, "-c", ARM, arm, model, device, "small" if small else "full"]
        try:
            ran = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, timeout=seconds)
            out, error = ran.stdout, "" if ran.returncode == 0 else ran.stderr[-300:]
        except subprocess.TimeoutExpired as late:
            out, error = (late.stdout or b"").decode(), f"ended after {seconds:.0f} s"
    for line in out.splitlines():
        if not line.startswith("SAID "):
            continue
        said = json.loads(line[5:])
        found |= said.pop("seconds", {})
        if "step" in said:
            found["steps"].append(said.pop("step"))
        found |= said
    return found | ({"error": error} if error else {})


def read_what_is_read() -> None:
    """Bring the files that every arm reads into the page cache."""
    subprocess.run([sys.executable, "-c", "import torch, transformers, triton"], capture_output=True)
    if triton := importlib.util.find_spec("triton"):
        for path in Path(triton.origin).parent.rglob("*"):
            if path.is_file():
                path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--models", default="mistral,mixtral")
    parser.add_argument("--arms", default="liger_hw,liger,hf")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a toy's widths, to try the script")
    arguments = parser.parse_args()
    read_what_is_read()
    began, took = time.monotonic(), {}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    found = {
        "what": " ".join(__doc__.split("\n\n")[-1].split()),
        "date": date,
        "commit": os.environ.get("LIGER_COMMIT"),
    }
    found["runs"] = []
    models, arms = arguments.models.split(","), arguments.arms.split(",")
    for number in range(arguments.rounds):
        for place, model in enumerate(models):
            for arm in arms[:: 1 if (number + place) % 2 == 0 else -1]:
                left = arguments.budget - (time.monotonic() - began)
                if left < max(8, 1.2 * took.get((model, arm), 0)):
                    continue
                start = time.monotonic()
                found["runs"].append(run(arm, model, arguments.device, arguments.small, left))
                took[model, arm] = time.monotonic() - start
                print(json.dumps(found["runs"][-1]), flush=True)
                if arguments.file:
                    with open(arguments.file, "w") as file:
                        json.dump(found, file, indent=1)

    for model in arguments.models.split(","):
        for arm in arguments.arms.split(","):
            first = [
                one["steps"][0] for one in found["runs"] if (one["model"], one["arm"]) == (model, arm) and one["steps"]
            ]
            print(f"{model:8} {arm:9} first step {', '.join(f'{s:.2f}' for s in first) or 'not reached'} s")


if __name__ == "__main__":
    main()
