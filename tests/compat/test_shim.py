"""`import liger_kernel` with the shim, in other processes."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import pytest

from liger_hw import compat
from liger_hw.cli import main
from liger_hw.compat import replaced

NAMES = Path(__file__).with_name("liger_names.json")


def environment(path: str = str(compat.PATH)) -> dict[str, str]:
    """Variables of a process with `path` first on PYTHONPATH and without LIGER_HW_SHADOW_LIGER."""
    paths = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {k: v for k, v in os.environ.items() if k != "LIGER_HW_SHADOW_LIGER"} | {"PYTHONPATH": paths}


def python(code: str, path: str = str(compat.PATH), **variables: str) -> subprocess.CompletedProcess:
    env = environment(path) | variables
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def passes(code: str) -> str:
    """What the code prints in a process that has not imported liger_kernel yet."""
    process = _interpreter()
    process.stdin.write(json.dumps(code) + "\n")
    process.stdin.flush()
    said, error = json.loads(process.stdout.readline())
    assert not error, error
    return said


_INTERPRETER = """
import contextlib, io, json, sys, traceback
answers = sys.stdout


def refused(what):
    "The error that a call or an import raises."
    try:
        exec(what) if isinstance(what, str) else what()
    except Exception as error:
        return error
    raise AssertionError(f"{what} is not refused")


for line in sys.stdin:
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    said, error = io.StringIO(), ""
    with contextlib.redirect_stdout(said):
        try:
            exec(compile(json.loads(line), "the code", "exec"), {"__name__": "__main__", "refused": refused})
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([said.getvalue(), error]), file=answers, flush=True)
"""


@functools.lru_cache(maxsize=1)
def _interpreter() -> subprocess.Popen:
    """One process for all of `passes`, since importing torch takes most of its time."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, "-c", _INTERPRETER], env=environment(), **pipes)
    atexit.register(process.kill)
    return process


@pytest.fixture
def real(tmp_path):
    """A folder that looks like an installed liger-kernel."""
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("real = True\n")
    (tmp_path / "liger_kernel-0.7.0.dist-info").mkdir()
    (tmp_path / "liger_kernel-0.7.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: liger_kernel\nVersion: 0.7.0\n"
    )
    return str(tmp_path)


def test_a_normal_environment_has_no_such_name():
    assert "No module named 'liger_kernel'" in python("import liger_kernel", path="").stderr


def test_the_command_prints_the_folder(capsys, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert main(["shim"]) == 0
    assert capsys.readouterr().out.strip() == str(compat.PATH)


def test_names_are_those_of_liger_hw():
    passes("""
from liger_kernel.transformers import LigerRMSNorm, apply_liger_kernel_to_llama
from liger_kernel.transformers.rms_norm import LigerRMSNorm as again
from liger_kernel.transformers.functional import liger_cross_entropy
from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_mistral
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops import LigerSiLUMulFunction
from liger_kernel.transformers import *
import liger_kernel.ops.swiglu, liger_hw.transformers as ours
from liger_hw.compat import checked, functions
from liger_hw.kernels.norms import rms_norm
assert LigerRMSNorm is again is rms_norm.LigerRMSNorm is ours.LigerRMSNorm
assert LigerRMSNormFunction is functions.LigerRMSNormFunction
assert liger_cross_entropy is checked.liger_cross_entropy
assert LigerSiLUMulFunction is liger_kernel.ops.swiglu.LigerSiLUMulFunction is functions.LigerSiLUMulFunction
assert apply_liger_kernel_to_llama is ours.apply_liger_kernel_to_llama
assert LigerSwiGLUMLP is ours.LigerSwiGLUMLP
""")


def test_modules_are_the_shim_s():
    """Not those of liger_hw, even if these were imported before."""
    passes("""
import liger_hw.chunked_loss.dpo_loss, liger_hw.transformers.functional
from liger_kernel.chunked_loss import dpo_loss
from liger_kernel.transformers import functional
assert dpo_loss.__name__ == "liger_kernel.chunked_loss.dpo_loss"
assert functional.__name__ == "liger_kernel.transformers.functional"
""")


def test_modules_below_one_that_is_imported():
    """Programs find them as attributes, as Liger's modules import each other."""
    passes("""
import liger_kernel.transformers, liger_kernel.ops
assert liger_kernel.transformers.rms_norm.LigerRMSNorm is liger_kernel.transformers.LigerRMSNorm
assert liger_kernel.transformers.monkey_patch._apply_liger_kernel is liger_kernel.transformers._apply_liger_kernel
assert liger_kernel.ops.swiglu.LigerSiLUMulFunction is liger_kernel.ops.LigerSiLUMulFunction
assert callable(liger_kernel.transformers.model.llama.lce_forward)
assert not hasattr(liger_kernel.transformers, "nothing") and not hasattr(liger_kernel.transformers.model, "nothing")
""")


def test_forwards_of_families():
    """Their modules have the names that Liger's import; test_forwards.py runs the forwards."""
    passes("""
import importlib.util
from liger_kernel.transformers.model import loss_utils, output_classes
from liger_kernel.transformers.model.llama import (
    LigerCausalLMOutputWithPast, LigerForCausalLMLoss, lce_forward, lce_maybe_trainable_lm_head)
from liger_kernel.transformers.model.qwen2 import lce_forward as other, unpack_cross_entropy_result
import liger_kernel.transformers.model.qwen2 as qwen2
assert LigerForCausalLMLoss is loss_utils.LigerForCausalLMLoss and callable(unpack_cross_entropy_result)
assert LigerCausalLMOutputWithPast is output_classes.LigerCausalLMOutputWithPast
assert lce_forward is not other is qwen2.lce_forward and other.__module__ == qwen2.__name__
assert importlib.util.find_spec("liger_kernel.transformers.model.mixtral") is not None
for absent in ("model.nothing import lce_forward", "model.llama import lce_forward_deprecated"):
    error = refused("from liger_kernel.transformers." + absent)
    assert isinstance(error, ImportError) and "apply_liger_kernel_to_<family>" in str(error), error
""")


def test_frameworks_find_the_version():
    said = passes("""
import importlib.metadata, liger_kernel
from transformers.utils import is_liger_kernel_available
print(importlib.metadata.version("liger_kernel"), liger_kernel.__version__, is_liger_kernel_available())
""")
    assert said.split() == [compat.VERSION, compat.VERSION, "True"]


def test_names_that_liger_does_not_have_are_import_errors():
    passes("""
for code, said in {
    "from liger_kernel.transformers import LigerNothing": "cannot import name 'LigerNothing'",
    "import liger_kernel.ops.nothing": "No module named 'liger_kernel.ops.nothing'",
    "import liger_kernel.ops._op": "No module named 'liger_kernel.ops._op'",
}.items():
    error = refused(code)
    assert isinstance(error, ImportError) and said in str(error), error
""")


def test_liger_hw_transformers_has_the_names_of_the_shim_s():
    """liger_hw.transformers has the same names, and the same advice for missing ones."""
    code = """
import sys
import liger_hw.transformers
assert "torch" not in sys.modules
from liger_hw.transformers import LigerBlockSparseTop2MLP, LigerRMSNorm, liger_rope, liger_rotary_pos_emb
from liger_hw.compat import modules
assert modules.LigerBlockSparseTop2MLP is LigerBlockSparseTop2MLP
assert liger_hw.transformers.functional.liger_rope is liger_rope
try:
    from liger_hw.transformers import LigerExpertParallelFusedMoe
except ImportError as error:
    assert "from_pretrained" in str(error), error
else:
    raise AssertionError
assert not hasattr(liger_hw.transformers, "LigerNothing") and not hasattr(liger_hw.transformers, "nothing")
"""
    harness.python("-c", code)


def test_importing_the_helpers_asks_for_no_device():
    code = """
import torch
def refuse(*args):
    raise AssertionError("a device was asked for")
torch.accelerator.is_available = torch.accelerator.current_accelerator = torch.cuda.is_available = refuse
import liger_hw.compat.utils
"""
    harness.python("-c", code)
    torch, utils = importlib.import_module("torch"), importlib.import_module("liger_hw.compat.utils")
    fwd, bwd = utils.amp_custom_fwd, utils.amp_custom_bwd
    assert fwd.keywords == bwd.keywords == {"device_type": utils.infer_device()}
    assert (fwd.func, bwd.func) == (torch.amp.custom_fwd, torch.amp.custom_bwd)


def test_functions_take_every_argument_of_liger_s():
    """By position, also those that choose among Liger's implementations."""
    passes("""
import torch
from liger_kernel.ops import (
    LigerFusedCETVDFunction, LigerFusedLinearCrossEntropyFunction, LigerFusedLinearJSDFunction, LigerJSDFunction)
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as by_file
from liger_kernel.transformers.functional import LigerFusedLinearCrossEntropyFunction as by_functional
from liger_kernel.transformers.functional import (
    liger_fused_linear_cross_entropy, liger_fused_linear_jsd, liger_jsd)

assert by_file is by_functional is LigerFusedLinearCrossEntropyFunction
x, w, y = torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,))
settings = -100, 1e-4, 0.1, "mean", 30.0, True, torch.float32, False, False, False
for last in ((None, None), ("triton", "default", 2)):
    given = x.clone().requires_grad_()
    loss, z_loss, *others = LigerFusedLinearCrossEntropyFunction.apply(given, w, y, None, None, *settings, *last)
    wanted = liger_fused_linear_cross_entropy(x, w, y, None, None, *settings)
    torch.testing.assert_close((loss, z_loss), (wanted.loss, wanted.z_loss))
    loss.backward()
    assert others == [None, None] and given.grad.abs().sum() > 0

head = x, w, x + 1, w, y, 0.3, -100, 2.0, None
torch.testing.assert_close(LigerFusedLinearJSDFunction.apply(*head, None, None), liger_fused_linear_jsd(*head))
p, q = torch.randn(6, 11).log_softmax(-1), torch.randn(6, 11).log_softmax(-1)
torch.testing.assert_close(LigerJSDFunction.apply(p, q, y, 0.3, -100, None, None), liger_jsd(p, q, y, 0.3, -100))
for other in (q[:, :4], q[None]):
    assert "must be 2D and have the same shape" in str(refused(lambda: LigerFusedCETVDFunction.apply(p, other, y)))
""")


def test_helpers_that_patch_single_modules():
    """A module, and its copies in PEFT's wrapper, become Liger's layer with the module's epsilon."""
    pytest.importorskip("peft")
    passes("""
import copy
import torch
from peft.utils.other import ModulesToSaveWrapper
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from liger_kernel.transformers import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_kernel.transformers.monkey_patch import (
    _bind_method_to_module, _patch_geglu_module, _patch_layer_norm_module, _patch_rms_norm_module,
    _patch_swiglu_module)

x = torch.randn(3, 8)
same = torch.testing.assert_close
for norm, patch in ((LlamaRMSNorm(8, 0.3), _patch_rms_norm_module), (torch.nn.RMSNorm(8, 0.3), _patch_rms_norm_module),
                    (torch.nn.LayerNorm(8, 0.3), _patch_layer_norm_module)):
    torch.nn.init.normal_(norm.weight)
    expected, wrapped = norm(x), ModulesToSaveWrapper(copy.deepcopy(norm), "default")
    for module, parts in ((norm, [norm]), (wrapped, [wrapped.original_module, wrapped.modules_to_save["default"]])):
        patch(module)
        same(module(x), expected)
        for part in parts:
            assert part.impl is None and part.mode is None and "Liger" in repr(part) and "eps=0.3" in repr(part), part

gemma, without = LlamaRMSNorm(8), LlamaRMSNorm(8)
del without.variance_epsilon
_patch_rms_norm_module(gemma, offset=1.0, casting_mode="gemma")
same(gemma(x), 2 * LlamaRMSNorm(8)(x))
_patch_rms_norm_module(without, eps=0.7)
same(without(x), LlamaRMSNorm(8, 0.7)(x))

config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
for act, patch, name in (("silu", lambda mlp: _patch_swiglu_module(mlp, LigerSwiGLUMLP), "LigerSwiGLUMLP"),
                         ("gelu_pytorch_tanh", _patch_geglu_module, "LigerGEGLUMLP")):
    mlp = LlamaMLP(LlamaConfig(hidden_act=act, **config))
    expected = mlp(x)
    patch(mlp)
    assert mlp.forward.__func__ is globals()[name].forward and name in repr(mlp)
    same(mlp(x), expected)
_bind_method_to_module(mlp, "forward", lambda self, x: self.down_proj.out_features)
assert mlp(x) == 8
""")


def test_a_real_install_is_not_hidden(real):
    both = os.pathsep.join([str(compat.PATH), real])
    refused = python("import liger_kernel", path=both)
    assert refused.returncode == 1 and "would hide the installed liger-kernel 0.7.0" in refused.stderr
    allowed = python("import liger_kernel; print(liger_kernel.__version__)", path=both, LIGER_HW_SHADOW_LIGER="1")
    assert allowed.stdout.strip() == compat.VERSION
    shim = "import sys; from liger_hw.cli import main; sys.exit(main(['shim']))"
    command = python(shim, path=real)
    assert command.returncode == 2 and "liger-kernel 0.7.0 is installed" in command.stderr and not command.stdout
    check = "import sys; from liger_hw.cli import main; sys.exit(main(['shim', '--check']))"
    assert python(check, path=real).returncode == 1 and python(check).returncode == 0


def test_the_trainer_switches_it_on(tmp_path):
    """transformers.Trainer(use_liger_kernel=True, liger_kernel_config=...) against the same run without."""
    said = passes(
        f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, bos_token_id=None, eos_token_id=None)
rows = [{{"input_ids": torch.arange(i, i + 12) % 64, "labels": torch.arange(i, i + 12) % 64}} for i in range(8)]

def losses(**options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments({str(tmp_path)!r}, max_steps=3, per_device_train_batch_size=4, logging_steps=1,
                                  report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **options)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model

plain, _ = losses()
patched, model = losses(use_liger_kernel=True, liger_kernel_config={{"rope": False}})
assert "liger_hw" in model.model.norm.forward.__func__.__code__.co_filename
print(plain, patched)
assert len(plain) == 3 and all(abs(a - b) < 1e-4 for a, b in zip(plain, patched)), (plain, patched)
"""
    )
    assert said


def test_liger_s_public_names_resolve():
    """Every class and function in Liger 0.8.5's wheel (liger_names.json; of `ops` only the classes) can be imported, or
    the ImportError says what to use."""
    said = passes(f"""
import json
for module, names in json.load(open({str(NAMES)!r})).items():
    for name in names:
        try:
            exec(f"from liger_kernel.{{module}} import {{name}}")
        except ImportError as error:
            print(f"{{module}}.{{name}}: {{error}}")
""")
    missing = dict(line.split(": ", 1) for line in said.splitlines())
    if "transformers.trainer.orpo_trainer.LigerORPOTrainer" in missing:
        assert "pip install trl" in missing.pop("transformers.trainer.orpo_trainer.LigerORPOTrainer")
        assert importlib.util.find_spec("trl") is None
    words = "is not in liger_hw's shim: ", "No module named 'transformers.models"  # of a newer transformers
    assert not [name for name, error in missing.items() if not any(text in error for text in words)]
    idle = [
        pattern
        for pattern in replaced.REPLACED
        if not any(re.fullmatch(pattern, name) for name in (*missing, "backends", "triton", *UNLISTED))
    ]
    assert not idle, f"take these out of REPLACED: {idle}"


UNLISTED = (
    "ops.utils.element_mul_kernel",
    "ops.grpo_loss._grpo_loss_fwd_kernel",
    "ops.rms_norm.rms_norm_forward",
    "transformers.monkey_patch.llama_lce_forward",
    "env_report",
)
"""Names in REPLACED that are not in liger_names.json."""


def test_what_is_not_here_names_its_replacement():
    passes("""
import liger_kernel.transformers as layers
for code, said in {
    "import liger_kernel.backends.registry": "liger_hw.registry",
    "from liger_kernel.transformers.moe import LigerExpertParallelFusedMoe": "DistributedConfig",
    "from liger_kernel.ops.rms_norm import rms_norm_forward": "liger_kernel.transformers.functional",
    "from liger_kernel.env_report import print_env_report": "liger-hw doctor",
    "from liger_kernel.ops.dyt import _dyt_fwd_kernel": "liger_kernel.transformers.functional",  # ours is another
    "from liger_kernel.ops.grpo_loss import _grpo_loss_fwd_kernel": "triton_grpo_loss",
    "from liger_kernel.ops.utils import element_mul_kernel": "multiply in torch",
}.items():
    error = refused(code)
    assert isinstance(error, ImportError) and said in str(error), (code, error)
assert hasattr(layers, "LigerMHC")
""")


def test_the_ops_of_0_8_5():
    passes("""
import types
import torch
from liger_kernel.ops import GrpoLossFunction
from liger_kernel.transformers import LigerMHC
from liger_kernel.transformers.fused_neighborhood_attention import LigerFusedNeighborhoodAttentionConfig
from liger_kernel.transformers.grpo_loss import triton_grpo_loss
from liger_kernel.transformers.llama4_rope import apply_liger_llama4_rope_full
from liger_kernel.transformers.llama4_rope import liger_llama4_text_rotary_pos_emb as text
from liger_kernel.transformers.mhc import LigerMHC as same
assert same is LigerMHC and LigerFusedNeighborhoodAttentionConfig().to_dict()["num_heads"] == 12
modeling = types.SimpleNamespace(apply_rotary_emb=None, vision_apply_rotary_emb=None)
apply_liger_llama4_rope_full(modeling)
error = refused(lambda: apply_liger_llama4_rope_full(torch))
assert isinstance(error, TypeError) and "torch is not transformers.models.llama4" in str(error)
assert modeling.apply_rotary_emb is text
torch.manual_seed(0)
layer = LigerMHC(torch.nn.Linear(6, 6), hc=3, c=6, phi_dtype=torch.float32, allow_fp32=True)
x = torch.randn(2, 5, 3, 6, requires_grad=True)
layer(x).square().sum().backward()
assert x.grad.abs().sum() > 0 and all(p.grad.abs().sum() > 0 for p in layer.parameters())
logits, ids = torch.randn(2, 5, 11, requires_grad=True), torch.randint(11, (2, 4))
policy = logits, None, torch.zeros(2, 4), ids, torch.tensor([1.0, -1.0]), None
loss, kl, clipped = GrpoLossFunction.apply(*policy, 0.9, 0.04, 0.2, 0.4, False, "grpo")
expected, (expected_kl, _) = triton_grpo_loss(*policy, 0.9, 0.04, 0.2, 0.4, False, "grpo", reduce=True)
torch.testing.assert_close((loss, kl), (expected, expected_kl))
error = refused(lambda: GrpoLossFunction.apply(*policy, *[None] * 17))
assert isinstance(error, TypeError) and "at most 22" in str(error), "one argument too many"
""")


def test_what_axolotl_imports():
    """Names that the integration of Liger in Axolotl 0.19 imports."""
    passes("""
from liger_kernel.ops.backends.registry import IMPL_REGISTRY
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection as known
from liger_kernel.transformers.trainer.orpo_trainer import _FSDPForwardRedirection
assert _FSDPForwardRedirection is known and IMPL_REGISTRY == {}
""")


def test_experts():
    passes("""
import torch
from types import SimpleNamespace
from liger_kernel.ops import LigerFusedMoEFunction
from liger_kernel.ops.fused_moe import LigerFusedMoEFunction as again
from liger_kernel.transformers import LigerExperts
from liger_kernel.transformers.swiglu import LigerExperts as same
assert again is LigerFusedMoEFunction and same is LigerExperts
config = SimpleNamespace(hidden_size=8, intermediate_size=99, moe_intermediate_size=6, num_experts=3, hidden_act="silu")
experts = LigerExperts(config)
assert experts.gate_up_proj.shape == (3, 12, 8) and experts.down_proj.shape == (3, 8, 6)
up, down = (torch.nn.init.normal_(p) for p in experts.parameters())
x, index = torch.randn(2, 2, 8), torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1]])
weights = torch.rand(4, 2)
out = experts(x, index.view(2, 2, 2), weights.view(2, 2, 2))
assert torch.equal(out, experts(hidden_states=x, top_k_index=index, top_k_weights=weights))
flat = LigerFusedMoEFunction.apply(x.view(4, 8), up, down, index.to(torch.int32), weights)
assert torch.equal(out, flat.view(2, 2, 8))
for old in ("num_local_experts", "n_routed_experts"):
    made = LigerExperts(SimpleNamespace(hidden_size=8, intermediate_size=5, hidden_act="swish", **{old: 2}))
    assert made.num_experts == 2 and made.intermediate_dim == 5
error = refused(lambda: LigerExperts(SimpleNamespace(**{**vars(config), "hidden_act": "gelu"})))
assert isinstance(error, ValueError) and "hidden_act" in str(error), "gelu is not this layer's"
""")


def test_small_helpers():
    passes("""
import importlib.util, operator, torch, liger_kernel
from liger_kernel.ops import utils
from liger_kernel.ops.grpo_loss import fused_selective_log_softmax
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection
from liger_kernel.transformers.functional import LigerRMSNormFunction, LigerSiLUMulFunction
from liger_kernel.transformers.grpo_loss import _masked_mean, _reduce_grpo_loss, get_gamma_weights, triton_grpo_loss
from liger_kernel.transformers.jsd import LigerJSDFunction
from liger_kernel.transformers.kl_div import LigerKLDivLossFunction
from liger_kernel.transformers.monkey_patch import liger_cross_entropy, liger_rotary_pos_emb
from liger_kernel.transformers.trainer_integration import _apply_liger_kernel
from liger_kernel.transformers.tvd import LigerTVDLossFunction
same = torch.testing.assert_close

assert liger_kernel.utils.infer_device() == "cpu" and liger_kernel.utils.infer_comm_backend() == "gloo"
assert liger_kernel.get_impl() is None
liger_kernel.set_impl("triton")
assert liger_kernel.get_backend() == "triton" in liger_kernel.available_impls("rms_norm")

assert [utils.calculate_settings(n) for n in (1, 2047, 2048, 5000, 9000)] == [
    (1, 4), (2048, 8), (2048, 8), (8192, 16), (16384, 16)]
assert utils.compare_version("torch", operator.ge, "2.0") and not utils.compare_version("no_such", operator.ge, "0")
seen = utils.ensure_contiguous(lambda ctx, x, y=None: (ctx, x.is_contiguous(), y.is_contiguous()))
t = torch.ones(2, 3).t()
assert seen(1, t, y=t) == (1, True, True)
with utils.device_context(torch.device("cpu")):
    assert not utils.is_hip()
if importlib.util.find_spec("triton"):
    assert {str(t) for t in utils.torch_to_triton_dtype.values()} == {"fp32", "fp16", "bf16"}

logits, ids = torch.randn(2, 5, 11), torch.randint(11, (2, 6))
mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
expected = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[:, -4:, None])[..., 0]
same(fused_selective_log_softmax(logits, ids), expected)
same(fused_selective_log_softmax(logits, ids, 0.9, mask), expected * mask)

counted = expected * mask
same(_masked_mean(expected, mask != 0), counted.sum() / 6)
for kind, mean in {"grpo": (counted.sum(1) / mask.sum(1)).mean(), "bnpo": counted.sum() / 6, "dapo": counted.sum() / 6,
                   "dr_grpo": counted.sum() / 14, "luspo": counted.sum() / 2}.items():
    same(_reduce_grpo_loss(expected, mask, kind, 7), mean)
same(_reduce_grpo_loss(expected, mask, "dapo", None, 3), counted.sum() / 3)
same(_reduce_grpo_loss(expected, mask, "dr_grpo", None), counted.sum() / 8)
same(_reduce_grpo_loss(expected, None, "bnpo", None), expected.mean())
given = (logits, None, None, ids[:, -4:], torch.ones(2), mask)
losses = triton_grpo_loss(*given, beta=0.0, loss_type="bnpo")[0]
mean = triton_grpo_loss(*given, beta=0.0, loss_type="bnpo", reduce=True)[0]
same(_reduce_grpo_loss(losses, mask, "bnpo", None), mean)
same(triton_grpo_loss(*given, beta=0.0, loss_type="dr_grpo", reduce=True)[0], losses.sum() / 8)
""")


def test_a_method_runs_inside_the_forward_of_an_fsdp_root(tmp_path):
    passes(f"""
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import FullyShardedDataParallel
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection

init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
x, seen = torch.randn(2, 4), []

def part(x, *, times):
    seen.append(model[0].weight.shape)
    return times * model(x)

torch.testing.assert_close(_FSDPForwardRedirection()(wrapped, part, x, times=2), 2 * wrapped(x))
assert seen == [(4, 4)] and "forward" not in vars(model)
error = refused(lambda: _FSDPForwardRedirection()(model, part, x))
assert isinstance(error, TypeError) and "FullyShardedDataParallel, got Sequential" in str(error)
destroy_process_group()
""")


def test_liger_kernel_functional():
    """Liger's signatures and defaults, with any impl, mode and backend."""
    passes("""
import torch, liger_kernel
import torch.nn.functional as F
L, same = liger_kernel.functional, torch.testing.assert_close
x, w = torch.randn(6, 8), torch.randn(8)
chosen = dict(impl="triton", mode=None, backend="triton")
same(L.rms_norm(x, w, **chosen), F.rms_norm(x, (8,), w, 1e-6))
same(L.rms_norm(x, w, 1e-3, row_mode=True), F.rms_norm(x, (8,), w, 1e-3))
same(L.layer_norm(x, w, **chosen), F.layer_norm(x, (8,), w, None, 1e-6))
same(L.softmax(x, **chosen), x.softmax(-1))
same(L.swiglu(x, x, **chosen), F.silu(x) * x)
same(L.geglu(x, x, **chosen), F.gelu(x, approximate="tanh") * x)
p, q = x.log_softmax(-1), torch.randn(6, 8).softmax(-1)
same(L.kl_div(p, q, **chosen), F.kl_div(p, q, reduction="batchmean"))
same(L.jsd(p, q.log(), beta=0.0, **chosen), F.kl_div(p, q, reduction="batchmean"))
y = torch.tensor([1, -100, 3, 4, 5, 6])
loss, z, accuracy, tokens = L.cross_entropy(x, y, None, -100, 0.0, 0.1, "sum", **chosen)
same(loss, F.cross_entropy(x, y, reduction="sum", label_smoothing=0.1))
assert z is accuracy is tokens is None
head = torch.randn(11, 8)
loss, z, accuracy, tokens = L.fused_linear_cross_entropy(x, head, y, return_token_accuracy=True, **chosen)
same(loss, F.cross_entropy(x @ head.t(), y))
same(accuracy, ((x @ head.t()).argmax(-1) == y)[y != -100].float().mean())
s, r = L.fused_add_rms_norm(x, x, w, **chosen)
same(s, F.rms_norm(2 * x, (8,), w, 1e-6)); same(r, 2 * x)
""")


def test_cross_entropy_checks_targets_on_the_host_as_liger_does():
    """Under every name of Liger's, but not fused heads, liger_hw's own names, and captured or traced calls.

    On the CPU every loss checks its targets; this test counts the checks before the loss is called.
    """
    passes("""
import copy, inspect, pickle
import torch
import liger_hw.transformers as ours
from liger_hw.compat import checked
import liger_kernel
from liger_kernel.ops import LigerCrossEntropyFunction
from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss as by_file
from liger_kernel.transformers.functional import liger_cross_entropy
from liger_kernel.transformers.monkey_patch import liger_cross_entropy as by_patch

assert by_file is LigerCrossEntropyLoss and by_patch is liger_cross_entropy
seen, real, quiet = [], checked.check_targets, []
checked.check_targets = lambda *args: seen.append(args[2:]) or real(*args)
plain_quiet = checked.is_capturing_or_tracing
checked.is_capturing_or_tracing = lambda: bool(quiet) or plain_quiet()
x = torch.randn(6, 11, requires_grad=True)
y, weight = torch.tensor([1, 7, 3, 7, 5, 6]), torch.rand(11)

CALLS = {
    "class": lambda x, y: LigerCrossEntropyLoss(weight, ignore_index=7)(x, y),
    "function": lambda x, y: liger_cross_entropy(x, y, weight, None, 7),
    "by name": lambda x, y: liger_cross_entropy(target=y, input=x, weight=weight, ignore_index=7),
    "apply": lambda x, y: LigerCrossEntropyFunction.apply(x, y, weight, 7)[0],
    "functional": lambda x, y: liger_kernel.functional.cross_entropy(x, y, weight, 7)[0],
}
expected = torch.nn.functional.cross_entropy(x, y, weight, ignore_index=7)
for name, call in CALLS.items():
    torch.testing.assert_close(call(x, y), expected)
    assert seen == [(11, 7)], (name, seen)
    for bad in (11, -1):
        error = refused(lambda: call(x, y.index_fill(0, torch.tensor([2]), bad)))
        assert isinstance(error, IndexError) and isinstance(error, AssertionError), name
        assert f"target[2] = {bad} is out of bounds" in str(error), name
    seen.clear()
    quiet.append("a graph is captured")
    torch.testing.assert_close(call(x, y), expected)
    assert not seen, name
    quiet.clear()
assert liger_cross_entropy(x[:0], y[:0], reduction="none").shape == (0,)
seen.clear()
liger_cross_entropy(x.detach().to("meta"), y.to("meta"))
for wrong in ((x[0], y), (x, y.float()), (x, [1]), (None, y)):
    assert isinstance(refused(lambda: liger_cross_entropy(*wrong)), (ValueError, TypeError))
ours.LigerCrossEntropyLoss()(x, y)
ours.functional.liger_cross_entropy(x, y)
LigerFusedLinearCrossEntropyLoss()(torch.randn(11, 4), torch.randn(6, 4), y)
traced = torch.compile(CALLS["class"], backend="eager", fullgraph=True)
torch.testing.assert_close(traced(x, y), expected)
assert not seen, seen

loss = LigerCrossEntropyLoss(weight, ignore_index=7)
same = ours.LigerCrossEntropyLoss(torch.ones(11))
same.load_state_dict(loss.state_dict())
assert torch.equal(same.weight, weight) and isinstance(loss, ours.LigerCrossEntropyLoss)
for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
    torch.testing.assert_close(other(x, y), expected)
assert pickle.loads(pickle.dumps(liger_cross_entropy)) is liger_cross_entropy
assert inspect.signature(liger_cross_entropy) == inspect.signature(ours.functional.liger_cross_entropy)
assert repr(loss) == repr(ours.LigerCrossEntropyLoss(weight, ignore_index=7))
""")


def test_models_patched_through_the_shim_do_not_check_on_the_host():
    passes("""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from liger_hw.compat import checked
from liger_kernel.transformers import apply_liger_kernel_to_llama
checked.check_targets = lambda *args: seen.append(args)
seen, ids = [], torch.arange(8)[None]
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, bos_token_id=None, eos_token_id=None)
for fused in (True, False):
    model = LlamaForCausalLM(config)
    apply_liger_kernel_to_llama(model=model, cross_entropy=not fused, fused_linear_cross_entropy=fused)
    model(ids, labels=ids).loss.backward()
assert not seen
""")


def test_the_loss_for_forwards_of_one_s_own():
    passes("""
import torch, torch.nn.functional as F
from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss
x, w, labels = torch.randn(2, 5, 8), torch.randn(11, 8), torch.randint(11, (2, 5))
labels[0, 3] = -100
x.requires_grad_()
logits = (x @ w.t()).float()
shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
rows = logits.flatten(0, 1), shifted.flatten()
expected, grad = F.cross_entropy(*rows), None
same = torch.testing.assert_close
mine = LigerForCausalLMLoss(x, w, labels, 8, unknown=1)
same(mine, expected)
same(torch.autograd.grad(mine, x), torch.autograd.grad(expected, x, retain_graph=True))
same(LigerForCausalLMLoss(x, w, None, 8, shift_labels=shifted), expected)
same(LigerForCausalLMLoss(x, w, labels, 8, num_items_in_batch=3), F.cross_entropy(*rows, reduction="sum") / 3)
found = LigerForCausalLMLoss(x, w, labels, 8, num_items_in_batch=torch.tensor(3), return_token_accuracy=True)
counts = rows[1] != -100
same(found.token_accuracy, (rows[0].argmax(-1) == rows[1])[counts].float().mean())
same(found.loss, F.cross_entropy(*rows, reduction="sum") / 3)
capped = LigerForCausalLMLoss(x, w, labels, 8, final_logit_softcapping=5.0)
same(capped, F.cross_entropy(5 * torch.tanh(rows[0] / 5), rows[1]))
""")
