"""Frameworks that call Liger run their own code on the shim: the real packages, each in its own process, on the CPU.

Each trains a tiny model one step before and after its call, which must give the same loss and gradients. Skipped where
a package is not installed: FRAMEWORKS=1 TRL=1.16.0 bash ci/cpu.sh, and TRL=0.24.0 for LLaMA-Factory, ms-swift, verl.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import torch
from harness import python

from liger_hw import compat

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, os, sys, types
import torch
import transformers
from liger_hw.transformers.tiny import tiny_model

TOKENS = torch.arange(18).view(2, 9) % 32


def step(model):
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad()
    return float(loss.detach()), gradients


def compare(cls, call, **config):
    "Loss and gradients before and after the call, and the classes whose forward is ours."
    before = step(tiny_model(cls, **config))
    model = tiny_model(cls, **config)
    call(model)
    after = step(model)
    apart = max(float((g - after[1][n]).abs().max() / g.abs().max().clamp(1e-3)) for n, g in before[1].items())
    ours = sorted({type(m).__name__ for m in model.modules() if hasattr(m.forward, "_liger_hw_part")})
    return {"loss": [before[0], after[0]], "apart": apart, "ours": ours}


results = {}
"""

AXOLOTL = """
from axolotl.integrations.liger.plugin import LigerPlugin
from axolotl.utils.dict import DictDefault
import axolotl.integrations.liger.models.base as base
import axolotl.integrations.kd.kernels.liger
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection

assert base._FSDPForwardRedirection is _FSDPForwardRedirection


def load(model_type, **more):
    cfg = DictDefault({"model_config_type": model_type, "liger_rope": True, "liger_rms_norm": True,
                       "liger_glu_activation": True, "liger_fused_linear_cross_entropy": True, **more})
    LigerPlugin().register(cfg)
    LigerPlugin().pre_model_load(cfg)


results["llama"] = compare(transformers.LlamaForCausalLM, lambda model: load("llama"))
results["qwen3"] = compare(transformers.Qwen3ForCausalLM, lambda model: load("qwen3"))
for family in ("mistral", "gemma2", "granite", "qwen3_5", "deepseek_v3", "smollm3"):
    load(family)
import liger_kernel.ops  # from here on another implementation is refused, by a look into IMPL_REGISTRY
try:
    load("llama", liger_kernel_impl="cutedsl")
except ValueError as error:
    results["impl"] = str(error)
"""

LLAMAFACTORY = """
from llamafactory.model.model_utils.liger_kernel import apply_liger_kernel

arguments = types.SimpleNamespace(enable_liger_kernel=True)


def load(family, **options):
    apply_liger_kernel(types.SimpleNamespace(model_type=family), arguments, is_trainable=True, **options)


results["llama"] = compare(transformers.LlamaForCausalLM, lambda model: load("llama", require_logits=False))
results["qwen3"] = compare(transformers.Qwen3ForCausalLM, lambda model: load("qwen3", require_logits=True))
for family in ("mistral", "gemma2", "gemma3_text", "glm4", "granite", "mixtral", "olmo2", "phi3", "qwen2", "qwen3_moe"):
    load(family, require_logits=False)
"""

SWIFT = """
import swift.rlhf_trainers.gkd_trainer as gkd
from swift.trainers.arguments import TrainArgumentsMixin
from transformers.integrations.liger import apply_liger_kernel


def load(model):  # its arguments' patch of the loss function, then what Trainer does under `use_liger_kernel`
    TrainArgumentsMixin._init_liger(types.SimpleNamespace(
        use_liger_kernel=True, _patch_liger_kernel=TrainArgumentsMixin._patch_liger_kernel))
    apply_liger_kernel(model, None)


results["llama"] = compare(transformers.LlamaForCausalLM, load)
results["qwen3"] = compare(transformers.Qwen3ForCausalLM, load)

# the GKD trainer's loss, made and called as it does; and a subclass, as its pull request 10114 has one
arguments = types.SimpleNamespace(use_liger_kernel=True, sft_alpha=0)
trainer = types.SimpleNamespace(args=arguments, teacher_model=object(), gkd_logits_topk=None, beta=0.5, temperature=0.9)
gkd.GKDTrainer._prepare_liger_loss(trainer)
torch.manual_seed(0)
student, teacher = (torch.randn(7, 16, requires_grad=True) for _ in range(2))
heads = [torch.randn(40, 16, requires_grad=True) for _ in range(2)]
labels = torch.tensor([3, -100, 5, 39, 0, -100, 7])
loss = trainer.liger_jsd_loss(
    student_input=student, student_weight=heads[0], teacher_input=teacher.detach(), teacher_weight=heads[1].detach(),
    true_labels=labels, student_bias=None, teacher_bias=None)
p, q = ((x @ w.T / 0.9).log_softmax(-1) for x, w in zip((student, teacher), heads))
m = torch.logsumexp(torch.stack((p, q)), 0) - torch.log(torch.tensor(2.0))
rows = (0.5 * (q.exp() * (q - m)).sum(-1) + 0.5 * (p.exp() * (p - m)).sum(-1))[labels != -100]
results["jsd"] = [float(rows.mean()), float(loss if isinstance(loss, torch.Tensor) else loss[0])]


class Weighted(gkd.LigerFusedLinearJSDLoss):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


twice = Weighted(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, ignore_index=-100, temperature=0.9,
                 compiled=False)
results["subclass"] = float(twice(student, heads[0], teacher.detach(), heads[1].detach(), labels))
"""

VERL = """
import pathlib, re
from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.experimental.torch_functional import FusedLinearForPPO


def load(model):  # the engine's call, verl/workers/engine/fsdp/transformer_impl.py
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)


results["llama"] = compare(transformers.LlamaForCausalLM, load)
results["qwen3"] = compare(transformers.Qwen3ForCausalLM, load)

page = pathlib.Path(os.environ["LOSSES"]).read_text()
names = {}
exec(next(b for b in re.findall(r"```python\\n(.*?)```", page, re.DOTALL) if "verl_head" in b), names)
torch.manual_seed(0)
hidden, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
ids, seeds = torch.randint(40, (2, 5)), torch.randn(2, 2, 5)
heads = {"torch": FusedLinearForPPO(impl_backend="torch"), "liger": FusedLinearForPPO(impl_backend="liger")}
outcomes = {}
for name, head in {**heads, "ours": names["verl_head"]}.items():
    both = head(hidden, weight, ids, 0.7)
    loss = sum((one * seed).sum() for one, seed in zip(both, seeds))
    outcomes[name] = [*(one.detach() for one in both), *torch.autograd.grad(loss, (hidden, weight))]
for name in ("liger", "ours"):
    results[name] = max(float((a - b).abs().max()) for a, b in zip(outcomes["torch"], outcomes[name]))
results["largest"] = min(float(one.abs().max()) for one in outcomes["torch"])

model = tiny_model(transformers.Qwen3ForCausalLM)  # its whole forward, under its own switch
load(model)
apply_monkey_patch(model, use_remove_padding=False, use_fused_kernels=True, fused_kernels_backend="liger")
output = model(input_ids=TOKENS, temperature=0.7, return_dict=True)
fresh = tiny_model(transformers.Qwen3ForCausalLM)
hidden = fresh.model(input_ids=TOKENS).last_hidden_state
logp = (hidden @ fresh.lm_head.weight.T / 0.7).log_softmax(-1)
rolled = TOKENS.roll(-1, -1)
results["forward"] = float((output.log_probs - logp.gather(-1, rolled[..., None])[..., 0]).abs().max().detach())
"""

NEMO = """
from nemo_automodel._transformers.kernel_patches import _patch_liger_kernel
import nemo_automodel._transformers.kernel_patches as kernel_patches

assert kernel_patches.HAS_LIGER_KERNEL
results["llama"] = compare(transformers.LlamaForCausalLM, _patch_liger_kernel)
results["qwen3"] = compare(transformers.Qwen3ForCausalLM, _patch_liger_kernel)
"""

FRAMEWORKS = {
    "axolotl": (AXOLOTL, "axolotl", "1.0"),
    "llamafactory": (LLAMAFACTORY, "llamafactory", ""),
    "ms-swift": (SWIFT, "swift", ""),
    "verl": (VERL, "verl", ""),
    "nemo-automodel": (NEMO, "nemo_automodel", None),
}
"""Distribution -> (program, module, TRL: its least version, "" for one before 1.0, None for any)."""

LAYERS = {"LlamaMLP", "LlamaRMSNorm"}


def _run(name: str, tmp_path: Path) -> dict:
    program, module, trl = FRAMEWORKS[name]
    if not importlib.util.find_spec(module):
        pytest.skip(f"{name} not installed (FRAMEWORKS=1 TRL=1.16.0 bash ci/cpu.sh)")
    if trl is not None:
        version = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "none"
        if (version == "none") or (int(version.split(".")[0]) >= 1) == (trl == ""):
            pytest.skip(f"{name} needs TRL {f'{trl} or later' if trl else 'before 1.0'}, here is {version}")
    out = tmp_path / "results.json"
    paths = [str(compat.PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "LIGER_HW_CPU_REFERENCE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "LOSSES": str(ROOT / "docs" / "losses.md")}
    python("-c", f"{PROGRAM}{program}\njson.dump(results, open({str(out)!r}, 'w'))\n", env=environment, cwd=tmp_path)
    return json.loads(out.read_text())


def _is_the_same(one: dict, *, fused_loss: bool) -> None:
    assert one["loss"][1] == pytest.approx(one["loss"][0], rel=1e-5) and one["apart"] < 1e-3
    assert ("LlamaForCausalLM" in one["ours"]) == fused_loss


def test_axolotl(tmp_path):
    """Its plugin's `register` and `pre_model_load`, with the options that a configuration sets."""
    results = _run("axolotl", tmp_path)
    _is_the_same(results["llama"], fused_loss=True)
    assert LAYERS <= set(results["llama"]["ours"])
    assert results["qwen3"]["loss"][1] == pytest.approx(results["qwen3"]["loss"][0], rel=1e-5)
    assert "liger_kernel_impl: 'cutedsl' cannot take effect" in results["impl"]


def test_llamafactory(tmp_path):
    results = _run("llamafactory", tmp_path)
    _is_the_same(results["llama"], fused_loss=True)
    assert LAYERS <= set(results["llama"]["ours"]) and results["qwen3"]["apart"] < 1e-3


def test_ms_swift(tmp_path):
    """Its arguments, the loss of its GKD trainer, and a subclass of that."""
    results = _run("ms-swift", tmp_path)
    _is_the_same(results["llama"], fused_loss=True)
    assert LAYERS <= set(results["llama"]["ours"]) and results["qwen3"]["apart"] < 1e-3
    assert results["jsd"][1] == pytest.approx(results["jsd"][0], rel=1e-5)
    assert results["subclass"] == pytest.approx(2 * results["jsd"][0], rel=1e-5)


def test_verl(tmp_path):
    results = _run("verl", tmp_path)
    _is_the_same(results["llama"], fused_loss=False)
    assert LAYERS <= set(results["llama"]["ours"]) and results["qwen3"]["apart"] < 1e-3
    assert results["largest"] > 0.1 and results["liger"] < 1e-4 and results["ours"] < 1e-4
    assert results["forward"] < 1e-4


def test_nemo_automodel(tmp_path):
    results = _run("nemo-automodel", tmp_path)
    _is_the_same(results["llama"], fused_loss=True)
    assert LAYERS <= set(results["llama"]["ours"]) and results["qwen3"]["apart"] < 1e-3


def test_prime_rl_s_head_as_the_page_writes_it():
    """prime-rl is not on PyPI: its head's formula, with a temperature a token, is written out here."""
    page, names = (ROOT / "docs" / "losses.md").read_text(), {}
    exec(next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "prime_rl_head" in b), names)
    head = torch.nn.Linear(16, 40, bias=False)
    hidden, labels = torch.randn(2, 5, 16, requires_grad=True), torch.randint(40, (2, 5))
    temperature = torch.rand(2, 5) + 0.5
    output = names["prime_rl_head"](head, hidden, labels, temperature)
    logp = (head(hidden) / temperature[..., None]).log_softmax(-1)
    expected = {"logprobs": logp.gather(-1, labels[..., None])[..., 0], "entropy": -(logp.exp() * logp).sum(-1)}
    gradients = []
    for results in (output, expected):
        loss = results["logprobs"].square().sum() + results["entropy"].sum()
        gradients.append(torch.autograd.grad(loss, (hidden, head.weight), retain_graph=True))
    for name, value in expected.items():
        torch.testing.assert_close(output[name], value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
