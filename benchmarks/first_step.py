"""First and second step of a patched 2-layer Mistral with empty kernel caches, each arm in a fresh process.

python benchmarks/first_step.py [FILE.json]
"""

import json
import os
import subprocess
import sys
import tempfile

ARM = """
import sys, time, torch
from transformers import MistralConfig, MistralForCausalLM
if sys.argv[1] == "liger":
    from liger_kernel.transformers import apply_liger_kernel_to_mistral
    apply_liger_kernel_to_mistral()
elif sys.argv[1] == "liger_hw":
    from liger_hw.transformers import apply_liger_kernel_to_mistral
    apply_liger_kernel_to_mistral()
config = MistralConfig(vocab_size=32768, num_hidden_layers=2)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = MistralForCausalLM(config).train()
ids = torch.randint(0, 32768, (1, 2048), device="cuda")
torch.mm(torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda"))
for _ in range(2):
    torch.cuda.synchronize()
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.cuda.synchronize()
    print(time.perf_counter() - start)
"""

seconds = {}
for arm in ("hf", "liger", "liger_hw"):
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton", "LIGER_HW_CACHE_DIR": f"{folder}/liger_hw"}
        run = subprocess.run([sys.executable, "-c", ARM, arm], env=environment, capture_output=True, text=True)
    seconds[arm] = [float(line) for line in run.stdout.split()[-2:]] if run.returncode == 0 else run.stderr[-300:]
text = json.dumps(seconds, indent=1)
print(text)
if len(sys.argv) > 1:
    with open(sys.argv[1], "w") as file:
        file.write(text)
