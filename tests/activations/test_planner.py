"""Predictions: against bytes that autograd saves here, against an H200, and what is chosen from them."""

from __future__ import annotations

import json
import math
import re
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training
from harness import printed

import liger_hw
from liger_hw.autotune import models
from liger_hw.cli import main
from liger_hw.kernels.heads.head_targets import max_frequent
from liger_hw.kernels.heads.linear_head import MAX_PLAIN_CHUNKS, padded, plan_chunks
from liger_hw.recompute import recipes
from liger_hw.recompute.levels import DEFAULT, LEVELS, level_of_each
from liger_hw.recompute.planner import ADAM_RATE, ADAPTERS, Assumptions, Planner, longest, of_module
from liger_hw.transformers.tiny import tiny_model

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
GIB = 1 << 30
LORA = "llama3-lora-32"


def levels_of(words):
    """`mlp x16, cheap x16` -> the levels of every layer; one word is that level in all 32."""
    parts = [part.split(" x") for part in words.split(", ")]
    return tuple(level for level, *count in parts for _ in range(int(count[0]) if count else 32))


def measured(name):
    found = json.loads((RESULTS / name).read_text())
    runs = [found["measured"]] if "measured" in found else [run["measured"] for run in found["runs"]]
    for run in runs:
        ours = [row for row in run if row["library"] == "liger_hw"]
        kept = next(row for row in ours if levels_of(row["levels"]) == ("keep",) * 32)
        for row in ours:
            yield levels_of(row["levels"]), row["peak_gib"], row["tokens_per_second"], kept["tokens_per_second"]


def agrees(one, gib, seconds=None, *, memory=0.01, time=0.03, what=None):
    """Fail unless a prediction is as near to what was measured as the docs say."""
    assert one.peak / GIB == pytest.approx(gib, rel=memory), what
    assert seconds is None or one.seconds == pytest.approx(seconds, rel=time), what


@pytest.mark.parametrize("name, window", [("mistral-7b", 0), ("mistral-7b-window", 4096)])
def test_an_h200_agrees(name, window):
    """Every mix that was run: peak memory within 1%, speed against keep within 1%, seconds within 3%."""
    planner = Planner(replace(models.find("mistral-7b"), window=window), 4, 4096)
    rows = list(measured(f"activations-{name}-h200.json"))
    assert len(rows) >= 8
    for levels, gib, speed, kept in rows:
        one = planner.predict(levels)
        agrees(one, gib, 4 * 4096 / speed, what=levels)
        assert one.speed == pytest.approx(speed / kept, rel=0.01), levels


def test_an_h100_agrees_at_long_sequences():
    """3 layers of Llama-3-8B, forward and backward: peak memory within 1%, and seconds within 3% of an H200's."""
    rows = json.loads((RESULTS / "long-levels-h100.json").read_text())["levels"]
    rows = [row for row in rows if row["level"] in LEVELS]
    assert len(rows) == 8
    for row in rows:
        planner = Planner(replace(models.find("llama-3-8b"), layers=3), 1, row["tokens"], Assumptions(optimizer="sgd"))
        agrees(planner.predict([row["level"]] * 3), row["peak_gib"], row["ms"] / 1000, what=row)


def test_steps_of_long_sequences():
    """Llama-3-8B from 16K tokens to 512K on one H200 and of a million on four: peak memory within 1%, seconds 3%."""
    rows = json.loads((RESULTS / "long-context-h200.json").read_text())["runs"]
    rows = [row for row in rows if row["arm"] == "liger_hw"]
    assert len(rows) >= 11 and {row["gpus"] for row in rows} == {1, 4} and any("trainable" in row for row in rows)
    for row in rows:
        shards = {"shards": row["gpus"], "sequence": row["gpus"]}
        others = {"optimizer": row.get("optimizer", "adamw"), "trainable": row.get("trainable", 1.0)}
        others["adapters"] = "model"  # as benchmarks/long_context.py loads them
        assumptions = Assumptions(in_backward=True, **others, **shards)
        batch = row["tokens"] // 16384 if row["attention"] == "documents" else 1
        model = replace(models.find("llama-3-8b"), layers=row["layers"])
        one = Planner(model, batch, row["tokens"] // batch, assumptions).predict(levels_of(row["levels"]))
        if row["layers"] == 2:  # the 32 layers before it, and their states, were still there
            before = Planner(models.find("llama-3-8b"), 1, 1, assumptions).parameters * (2 + 4) / 4
            one = replace(one, peak=one.peak + before)
        # 512K: 3.5% short, an older commit, whose forward did not hide all copies to the host
        seconds = None if row["tokens"] == 1 << 19 else row["seconds"]
        agrees(one, row["peak_gib"], seconds, memory=0.02 if row["layers"] == 2 else 0.01, what=row)


def test_the_longest_steps():
    """Mistral-7B alone at each level's longest: memory within 1%; seconds within 3% but where 97% of memory was full,
    and the allocator had to start over."""
    for run in json.loads((RESULTS / "longest-sequence-h200.json").read_text())["levels"]:
        ran = next(row for row in run["tries"] if row["outcome"] == "ran")
        planner = Planner(replace(models.find("mistral-7b"), window=0), 1, ran["seq"])
        seconds = None if run["level"] == "keep" else ran["seconds"]
        agrees(planner.predict(levels_of(run["levels"])), ran["peak_gib"], seconds, what=run["level"])


@pytest.mark.parametrize("gpus", (2, 4))
def test_engines_of_several_devices(gpus):
    """Llama-3-8B in Trainer under FSDP2 and each stage of ZeRO: peak memory within 2%, seconds within 3%."""
    rows = json.loads((RESULTS / f"distributed-training-{gpus}xh200.json").read_text())["rows"]
    rows = [row for row in rows if row["arm"] == "liger_hw" and "environment" not in row]
    assert rows and {row["engine"] for row in rows} >= {"fsdp2"}
    for row in rows:
        in_fp32 = row["engine"] == "fsdp2"  # as accelerate has them
        assumptions = Assumptions(4 if in_fp32 else 2, shards=gpus, engine=row["engine"])
        model = replace(models.find("llama-3-8b"), layers=row["layers"])
        ran_at = "keep" if row["engine"] == "zero3" else DEFAULT  # the default saved nothing under ZeRO-3 then
        one = Planner(model, 2, 4096, assumptions).predict(level_of_each(ran_at, row["layers"]))
        agrees(one, row["peak_GiB"], 8192 / row["tokens_per_second"], memory=0.02, what=row)


@pytest.mark.parametrize("engine", ["", "fsdp2", "zero3"])
@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "qwen3-8b"])
@pytest.mark.parametrize("batch", [2, 4])
def test_the_default_pays_for_a_chunk_of_logits(name, batch, engine):
    """The step's peak is in the loss. There the last layer at `cheap` keeps less by more than what our chunk takes
    beyond Liger's, which has as many rows as make its logits about as large as the head's input, in powers of two."""
    model, rows = models.find(name), batch * 4096
    planner = Planner(model, batch, 4096, Assumptions(shards=4, engine=engine) if engine else Assumptions())
    chunks = plan_chunks(rows, model.hidden, model.vocab, 2, with_targets=True)
    ours = chunks.rows * padded(model.vocab) * 2
    if len(chunks.bounds) > MAX_PLAIN_CHUNKS:  # sums of frequent targets, and their columns of a chunk
        ours += max_frequent(rows, model.vocab) * (model.hidden * 4 + chunks.rows * 2)
    liger = 1 << (math.ceil(rows / math.ceil(model.vocab / model.hidden)) - 1).bit_length()
    assert ours - liger * model.vocab * 2 < planner.layer.kept["keep"] - planner.layer.kept["cheap"]


@pytest.mark.parametrize(
    "name", ["llama3", *(f"{one}-layers" for one in ("llama3-32", "mistral-32", "qwen3-36", LORA))]
)
def test_float8_on_an_h200(name):
    """Peaks within 1% in bf16 and in FP8, seconds within 3%, and so how much faster the latter is."""
    record = json.loads((RESULTS / f"float8-{name}-h200.json").read_text())
    ran = record.get("options") or record["plan"]
    rows = {row["arm"]: row for row in record.get("rows") or record["runs"]}
    schedule = training.Schedule(model=ran["model"], layers=ran["layers"], batch=2, seq=4096)
    shape = models.from_config(training.config(schedule).to_dict(), name)
    levels, both = level_of_each(DEFAULT, ran["layers"]), []
    trainable = 0.0052 if LORA in name else 1.0  # rank 16
    for arm, float8 in ((("bf16", "liger_hw"), False), (("rowwise", "float8"), True)):
        row = next(rows[one] for one in arm if one in rows)
        planned = Planner(shape, 2, 4096, Assumptions(float8=float8, trainable=trainable)).predict(levels)
        agrees(planned, row["peak_gib"], 8192 / row["tokens_per_second"], what=arm)
        both.append((planned.seconds, 1 / row["tokens_per_second"]))
    (bf16, bf16_ran), (float8, float8_ran) = both
    assert bf16 / float8 == pytest.approx(bf16_ran / float8_ran, rel=0.03)


def test_adapters_of_each_kind_on_an_h200():
    """Three layers with adapters of rank 16, forward and backward in bf16: seconds within 3%. AdamW's rate: 5%."""
    rows = json.loads((RESULTS / "lora-adapters-h200.json").read_text())["rows"]
    model = replace(models.find("llama-3-8b"), layers=3, vocab=4096)
    trainable = 16 * 81920 * 3 / Planner(model, 2, 4096).parameters
    layers = [row for row in rows if row["what"] == "three layers, LoRA" and not row["float8"]]
    assert {row["adapters"] for row in layers} == set(ADAPTERS)
    for row in layers:
        assumptions = Assumptions(trainable=trainable, adapters=row["adapters"], optimizer="sgd")
        one = Planner(model, 2, 4096, assumptions).predict(["keep"] * 3)
        assert one.seconds == pytest.approx(row["ms"] / 1000, rel=0.03), row
    adam = next(row for row in rows if row.get("dtype") == "torch.bfloat16")
    assert ADAM_RATE == pytest.approx(adam["parameters_per_s"] * 1e9, rel=0.05)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_on_an_h200(name):
    """Four layers, 2 x 4096: peak memory within 1%, seconds within 3%. gpt-oss, whose flex_attention counts as flash
    attention, takes longer."""
    record = json.loads((RESULTS / f"e2e-experts-{name}-h200.json").read_text())
    row = next(row for row in record["summary"] if row["arm"] == "liger_hw")
    schedule = training.Schedule(model=name, layers=4, batch=2, seq=4096)
    shape = models.from_config(training.config(schedule).to_dict(), name)
    one = Planner(shape, 2, 4096, Assumptions(attention="flash")).predict(level_of_each(DEFAULT, 4))
    assert one.peak / GIB == pytest.approx(row["peak_gib"], rel=0.01)
    share = one.seconds / (8192 / row["tokens_per_second"])
    assert 0.9 < share < 1 if name == "gpt_oss" else share == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("gpus", (2, 4))
def test_experts_over_several_devices(gpus):
    """16 layers of Qwen3-30B-A3B's shape under FSDP2: peak memory within 1%, seconds within 2%."""
    row = json.loads((RESULTS / f"distributed-training-qwen3-30b-{gpus}xh200.json").read_text())[0]
    planner = Planner(replace(models.find("qwen3-30b-a3b"), layers=16), 2, 4096, Assumptions(4, shards=gpus))
    one = planner.predict(level_of_each(DEFAULT, 16))
    agrees(one, row["peak_GiB"], 8192 / row["tokens_per_second"], time=0.02)


@pytest.fixture
def kept(monkeypatch):
    """The tensors that autograd keeps from now on, for itself or for a recipe."""
    pack, tensors = recipes.pack, []

    def noting(t):
        packed = pack(t)
        tensors.extend([t] if type(packed) is tuple else [])
        return packed

    monkeypatch.setattr(recipes, "pack", noting)
    return tensors


def kept_by_a_layer(make, levels, kept, compute_bytes=None):
    """({level: bytes that a layer's forward leaves, parameters apart}, the planner). make: a model of n layers"""
    saved = {level: 0 for level in levels}
    for layers, sign in ((2, -0.5), (4, 0.5)):
        model = make(layers)
        liger_hw.patch(model, fused_linear_cross_entropy=False)
        body = (model.get_base_model() if hasattr(model, "get_base_model") else model).model
        for level in levels:
            kept.clear()
            hooks = (lambda t: kept.append(t) or t, lambda t: t) if level == "keep" else (recipes.pack, recipes.unpack)
            with liger_hw.activations(level, model), torch.autograd.graph.saved_tensors_hooks(*hooks):
                out = body(input_ids=torch.randint(5, 61, (2, 512)), use_cache=False)
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
            of_parameters = sum(storages.get(p.untyped_storage()._cdata, 0) for p in model.parameters())
            saved[level] += sign * (sum(storages.values()) - of_parameters)
            del out
    return saved, of_module(model, model.config, 2, 512, compute_bytes)


EXACT = ("Mistral", "Qwen3", "Gemma2", "Qwen3Moe", "Mixtral")
NEAR = ("Glm4", "Phi3", "Exaone4", "Gemma3", "HunYuanDenseV1", "StableLm", "FlexOlmo", "Mellum", "Cohere")


@pytest.mark.parametrize("name", EXACT + NEAR)
def test_all_bytes_of_a_layer(name, kept):
    """All that a layer's forward saves, parameters apart, is what the planner counts at `keep`, within 1%; and what it
    saves less of from level to level is what the planner counts, to the byte.

    Norms and projections are read from the model: a config does not say which it has. NEAR within 2%, narrow as it is:
    the planner leaves out what the norms of q and k keep of a head.
    """
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, f"{name}ForCausalLM", None)
    if cls is None:
        pytest.skip("not in this transformers")
    window = {"sliding_window": 4096} if hasattr(cls.config_class(), "sliding_window") else {}
    options = {"num_key_value_heads": 4, "attn_implementation": "eager" if name == "Gemma2" else "sdpa", **window}
    levels = ("keep", "cheap", "mlp") if name in EXACT else ("keep",)

    def make(layers):
        return tiny_model(cls, num_hidden_layers=layers, **options)

    saved, planner = kept_by_a_layer(make, levels, kept)
    planned = planner.layer.kept
    assert planned["keep"] == pytest.approx(saved["keep"], rel=0.02 if name in NEAR else 0.01)
    for more, less in (("keep", "cheap"), ("cheap", "mlp")) if name in EXACT else ():
        assert saved[more] - saved[less] == planned[more] - planned[less], (more, less)


def test_eager_attention_with_sinks_is_refused():
    model = tiny_model(pytest.importorskip("transformers").GptOssForCausalLM, attn_implementation="eager")
    with pytest.raises(ValueError, match="does not know eager attention with sinks"):
        liger_hw.activations("80GiB", model)


@pytest.mark.parametrize("name", ["BitNet", "DiffLlama"])
def test_layers_with_other_norms_are_refused(name, tmp_path, capsys):
    """A few more norms are far less than the share of parameters that may differ, and much of what a layer keeps."""
    transformers = pytest.importorskip("transformers")
    model = tiny_model(getattr(transformers, f"{name}ForCausalLM"))
    with pytest.raises(ValueError, match="one, two or four norms of the hidden size"):
        liger_hw.activations("80GiB", model)
    model.config.save_pretrained(tmp_path)
    assert "norms of the hidden size" in printed(capsys, "plan", "--model", str(tmp_path), "--seq", "128", code=2)


def test_the_dtype_of_a_model_with_kept_weights():
    """Not FP8, although its largest weights are."""
    transformers = pytest.importorskip("transformers")
    model = tiny_model(transformers.LlamaForCausalLM, hidden_size=64, intermediate_size=512).bfloat16()
    liger_hw.float8(model.requires_grad_(False), smallest=16, keep_frozen=True)
    assert of_module(model, model.config, 2, 16).assumptions.dtype_bytes == 2


@pytest.mark.parametrize("float8", (False, True))
@pytest.mark.parametrize("adapters", ("fp32", "autocast", "model"))
def test_bytes_that_adapters_keep(adapters, float8, kept):
    """A layer with PEFT's adapters, at each level, within 1%: as PEFT loads them, also under autocast, and in bf16."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    def make(layers):
        sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, attn_implementation="sdpa")
        lora = peft.LoraConfig(r=4, target_modules="all-linear")
        model = transformers.LlamaForCausalLM(config).bfloat16()
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=adapters != "model")
        if float8:
            liger_hw.float8(model, smallest=16)
        return model

    with torch.autocast("cpu", torch.bfloat16, enabled=adapters == "autocast"):
        saved, planner = kept_by_a_layer(make, ("keep", "cheap", "mlp"), kept, 2)
    assert planner.assumptions.adapters == adapters
    assert {level: planner.layer.kept[level] for level in saved} == pytest.approx(saved, rel=0.01)


def test_what_each_stage_of_zero_divides():
    """Bytes of a parameter on each of 8 devices in bf16 with AdamW, counted where activations weigh nothing."""
    model = replace(models.find("llama-3-8b"), layers=320, vocab=8)

    def bytes_of_each(engine):
        planner = Planner(model, 1, 1, Assumptions(shards=8, engine=engine, in_backward=False))
        return planner.predict(["keep"] * 320).peak / planner.parameters

    fsdp2, zero1, zero2, zero3 = (bytes_of_each(engine) for engine in ("fsdp2", "zero1", "zero2", "zero3"))
    assert fsdp2 == pytest.approx(8 / 8, rel=0.02)
    assert zero1 == pytest.approx(2 + 2 + 12 / 8, rel=0.02)
    assert zero2 == pytest.approx(2 + 14 / 8, rel=0.02)
    assert zero3 == pytest.approx(16 / 8, rel=0.03)
    with pytest.raises(ValueError, match="unknown engine 'zero4'; known: fsdp2, zero1, zero2, zero3"):
        Assumptions(engine="zero4")
    planner = Planner(models.find("llama-3-8b"), 2, 4096, Assumptions(shards=4, engine="zero3"))
    kept = planner.layer.kept
    assert kept["keep"] > kept["cheap"] == kept["mlp"] > kept["full"], "its hooks on projections forbid mlp"
    assert "mlp" not in planner.best(60 << 30).levels


@pytest.mark.parametrize("model", ["llama3", "qwen3", "gemma2"])
def test_an_h200_agrees_on_shapes_without_fitted_constants(model):
    """Every level, mix and rival: memory and speed within 1%, seconds within 3%; Gemma-2's speed was fitted."""
    pytest.importorskip("transformers")
    found = json.loads((RESULTS / f"activations-{model}-h200.json").read_text())
    ran = found["options"]
    schedule = training.Schedule(model=model, layers=ran["layers"], batch=ran["batch"], seq=ran["seq"])
    shape = models.from_config(training.config(schedule).to_dict(), model)
    planner = Planner(
        shape, schedule.batch, schedule.seq, Assumptions(attention=schedule.shape.attention.replace("sdpa", ""))
    )
    rows = [row for row in found["runs"] if row["library"] == "liger_hw" and "tokens_per_second" in row]
    assert len(rows) >= 10 and rows[0]["arm"] == "keep"
    for row in rows:
        one = planner.predict(levels_of(row["levels"]))
        agrees(one, row["peak_gib"], ran["batch"] * ran["seq"] / row["tokens_per_second"], what=row["arm"])
        speed = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        assert one.speed == pytest.approx(speed, rel=0.01), row["arm"]


def test_eager_attention_leaves_a_margin_and_its_planned_mix_stays_within():
    """Gemma-2 overran its budgets when its scores' temporaries were not counted."""
    planner = Planner(models.find("gemma-2-2b"), 3, 4096)
    assert planner.attention == "eager"
    for gib in (30, 60, 75, 90, 105, 120):
        assert 0.9 * gib < planner.best(gib * GIB).peak / GIB <= 0.98 * gib
    flash = Planner(models.find("gemma-2-2b"), 3, 4096, Assumptions(attention="flash")).layer
    scores, copies = (
        8 * (3 * 8 * 4096**2),
        2 * 3 * 4096 * 2 * (8 - 4) * 256,
    )  # tanh, fp32 softmax, cast; k and v for 8 heads
    assert planner.layer.kept["keep"] - flash.kept["keep"] == scores + copies
    with pytest.raises(ValueError, match="unknown attention 'sdpa'; known: eager, masked, flash"):
        Assumptions(attention="sdpa")


@pytest.mark.parametrize(
    "implementation, window, attention",
    [("eager", 8, "eager"), ("sdpa", 8, "masked"), ("sdpa", 64, "flash"), ("flash_attention_2", 8, "flash")],
)
def test_the_attention_is_the_one_that_the_model_uses(implementation, window, attention):
    transformers = pytest.importorskip("transformers")
    model = tiny_model(transformers.Gemma2ForCausalLM, sliding_window=window)
    model.config._attn_implementation = implementation
    assert of_module(model, model.config, 2, 16).attention == attention


@pytest.mark.parametrize("meshes", (1, 2))
def test_a_model_sharded_by_fsdp2_is_planned(meshes):
    """Parameters, gradients and states are divided, what is gathered is counted; the shape is the whole model's. Some
    weights may be sharded over another mesh."""
    transformers = pytest.importorskip("transformers")
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp
    from torch.distributed.tensor import Shard

    model = tiny_model(transformers.LlamaForCausalLM)
    whole = of_module(model, model.config, 2, 16)
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    try:
        mesh, options = dist.device_mesh.init_device_mesh("cpu", (4,)), {}
        if meshes == 2:
            if not hasattr(fsdp, "ShardPlacementResult"):
                pytest.skip(f"torch {torch.__version__} shards a module's weights over one mesh")
            halves = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))["rows"]
            infos = [fsdp.FSDPMeshInfo(one, shard_mesh_dim=0) for one in (mesh, halves)]
            options["shard_placement_fn"] = lambda p: fsdp.ShardPlacementResult(Shard(0), infos[p.dim() == 1])
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        sharded = of_module(model, model.config, 2, 16)
    finally:
        dist.destroy_process_group()
    assert sharded.assumptions.shards == 4 and replace(sharded.model, name=whole.model.name) == whole.model
    assert sharded.assumptions.trainable == 1 and sharded.layer == whole.layer


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_model_of_deepspeed_is_planned(stage):
    """Stage and devices are read from what DeepSpeed puts on parameters."""
    transformers = pytest.importorskip("transformers")
    model = tiny_model(transformers.LlamaForCausalLM).bfloat16()
    group = types.SimpleNamespace(size=lambda: 4)
    for p in model.parameters():
        if stage == 3:
            p.ds_shape, p.ds_numel, p.ds_process_group = p.shape, p.numel(), group
            p.data = p.data.new_empty(0)
        else:
            p._zero_optimizer, p._dp_group = types.SimpleNamespace(partition_gradients=stage == 2), group
    assumptions = of_module(model, model.config, 2, 16).assumptions
    assert (assumptions.engine, assumptions.shards) == (f"zero{stage}", 4)
    assert (assumptions.trainable, assumptions.dtype_bytes) == (1, 2)


def test_a_model_that_another_engine_shards_is_refused():
    transformers = pytest.importorskip("transformers")
    model = type("FullyShardedDataParallel", (torch.nn.Linear,), {})(4, 4)
    with pytest.raises(ValueError, match="sharded by FSDP1; name a level"):
        of_module(model, transformers.LlamaConfig(), 2, 16)


@pytest.mark.parametrize("name", ["mistral-7b", "llama-3-8b", "qwen3-8b", "gemma-2-2b"])
def test_the_best_mix_fits_and_more_memory_is_never_slower(name):
    planner = Planner(models.find(name), 2, 4096)
    least, most = planner.pure()[-1].peak, planner.pure()[0].peak
    speeds = []
    for tenth in range(11):
        budget = least + int(1.021 * most - least) * tenth // 10  # eager attention leaves 2% free
        found = planner.best(budget)
        assert found.peak <= budget and len(found.levels) == planner.model.layers
        speeds.append(found.speed)
    assert speeds == sorted(speeds) and speeds[-1] == 1.0
    with pytest.raises(ValueError, match="even with"):
        planner.best(least // 2)


def test_no_mix_of_any_kind_beats_the_best_by_much():
    """All mixes of four levels in one order, for a small model: the two-level search loses at most half a percent."""
    planner = Planner(replace(models.find("mistral-7b"), layers=8), 4, 4096)
    mixes = [
        ("full",) * a + ("mlp",) * b + ("cheap",) * c + ("keep",) * (8 - a - b - c)
        for a in range(9)
        for b in range(9 - a)
        for c in range(9 - a - b)
    ]
    everything = [planner.predict(mix) for mix in mixes]
    for gib in (20, 22, 25, 28, 31):
        fitting = [found.speed for found in everything if found.peak <= gib * GIB]
        assert planner.best(gib * GIB).speed >= max(fitting) - 0.005


def test_float8_and_what_a_planner_refuses():
    model = models.find("llama-3-8b")
    float8, plain = (Planner(model, 1, 4096, Assumptions(float8=on)) for on in (True, False))
    assert 1.2 < float8.float8_gain() == plain.float8_gain() < 1.5
    inputs = 4096 * (3 * 4096 + 14336)  # of the linears, q, k, v and gate, up share theirs; o's is attention's as well
    assert plain.layer.kept["keep"] - float8.layer.kept["keep"] == inputs - 2 * 4096 * 4096
    assert float8.layer.kept["cheap"] - plain.layer.kept["cheap"] == inputs
    with pytest.raises(ValueError, match="unknown optimizer 'adamq'; known: adamw"):
        Assumptions(optimizer="adamq")
    with pytest.raises(ValueError, match="does not say how many of 8 experts a token takes"):
        Planner(replace(model, experts=8), 1, 4096)
    with pytest.raises(ValueError, match="has 32 layers, got 3"):
        Planner(model, 1, 4096).predict(("keep",) * 3)


def test_tiles_and_host_memory_at_long_sequences():
    """The MLP's part of the peak does not grow with the sequence, a layer's input is on the host, and `best` uses both
    within the host's memory."""
    model = models.find("llama-3-8b")
    short, long = Planner(model, 1, 1 << 18), Planner(model, 1, 1 << 19)
    unit = (1 << 18) * 4096 * 2  # bytes of 256k tokens
    wide = replace(model, intermediate=2 * model.intermediate)
    wider = [Planner(wide, 1, seq).layer.transient["tiled"] for seq in (1 << 18, 1 << 19)]
    assert wider[1] - wider[0] == long.layer.transient["tiled"] - short.layer.transient["tiled"]
    tiled, offload = (long.predict(level_of_each(level, 32)) for level in ("tiled", "offload"))
    assert offload.host == 31 * 2 * unit and tiled.host == 0
    gradients = 2 * 32 * long.layer.parameters  # are all there when the first layer's input is back
    assert tiled.peak - offload.peak == pytest.approx(30 * 2 * unit - gradients, rel=0.05)
    assert offload.speed > 0.99 * tiled.speed
    assert short.best(137 * GIB, host=10 * GIB).host <= 10 * GIB
    with pytest.raises(ValueError, match="even with"):
        long.best(offload.peak, host=GIB)


def test_the_longest_sequence():
    def planner_at(seq):
        return Planner(models.find("llama-3-8b"), 1, seq)

    planner = longest(planner_at, 137 * GIB)
    assert planner.seq % 1024 == 0 and planner.best(137 * GIB).peak <= 137 * GIB
    with pytest.raises(ValueError, match="even with"):
        planner_at(planner.seq + 1024).best(137 * GIB)
    assert longest(planner_at, 137 * GIB, host=0).seq < planner.seq / 1.5
    with pytest.raises(ValueError, match="needs .* GiB even with"):
        longest(planner_at, 20 * GIB)


def test_plan_command_of_the_longest(capsys):
    arguments = ["plan", "--model", "llama-3-8b", "--seq", "max", "--memory", "137GiB", "--host-memory", "100GiB"]
    alone = printed(capsys, *arguments)
    assert re.search(r'activations=\["offload"\] \* \d+ \+ \["tiled"\] \* \d+\)', alone)
    assert "What grows at `tiled` and `offload` during a layer's backward, in KiB a token: norm output" in alone
    assert "expandable_segments:True python train.py" in alone and "accelerate" not in alone
    rows = json.loads(printed(capsys, *arguments, "--gpus", "4", "--json"))
    assert {row["seq"] for row in rows} == {rows[0]["seq"]} and rows[0]["seq"] > 1 << 20
    assert rows[-1]["peak_bytes"] <= 137 * GIB and 0 < rows[-1]["host_bytes"] <= 100 * GIB
    several = printed(capsys, *arguments, "--gpus", "4")
    assert "context_parallel" in several.replace("\n", " ") and "context_parallel" not in alone
    assert several.endswith("expandable_segments:True \\\n              torchrun --nproc-per-node 4 train.py\n")
    assert main([*arguments, "--gpus", "4", "--engine", "zero3"]) == 0
    launch = capsys.readouterr().out.partition("Launch:")[2].replace("\\\n", "").split()
    assert launch[1:5] == "accelerate launch --num_processes 4".split() and launch[-2:] == ["4", "train.py"]
    assert "--zero_stage" in launch and "--parallelism_config_sp_size" in launch
    tokens = [int(re.search(r"batch 1 x (\d+)", text)[1]) for text in (alone, several)]
    assert tokens[1] > 4 * tokens[0], "parameters are shared too"
    assert "3 devices cannot share its 32 heads" in printed(capsys, *arguments, "--gpus", "3", code=2)
    assert main([*arguments, "--engine", "zero3"]) == 2
    assert "--engine zero3 divides the state over several devices" in capsys.readouterr().err
    assert "--seq max takes one --memory" in printed(capsys, *arguments[:5], "--memory", "80GiB", "140GiB", code=2)
    assert "--host-memory 'much' is no size" in printed(capsys, *arguments[:-1], "much", code=2)


def test_plan_prints_how_to_launch_what_fits_one_memory(capsys):
    """Ranks that share the model's state alone do not share a sequence; several memories have several answers."""
    arguments = ["plan", "--model", "llama-3-8b", "--seq", "64k", "--memory", "77GiB"]
    *_, levels, _, launch = printed(capsys, *arguments, "--gpus", "8").splitlines()
    assert levels == 'In train.py:  liger_hw.patch(model, activations=["keep"] * 32)'
    assert launch.endswith("torchrun --nproc-per-node 8 train.py")
    launch = " ".join(printed(capsys, *arguments, "--shards", "8", "--engine", "zero3").replace("\\\n", "").split())
    assert launch.endswith("--num_processes 8 --mixed_precision bf16 --use_deepspeed --zero_stage 3 train.py")
    assert main([*arguments, "900GiB"]) == 0 and "Launch:" not in capsys.readouterr().out
    assert main([*arguments[:-1], "1GiB"]) == 1 and "Launch:" not in capsys.readouterr().out


def test_what_plan_refuses_and_by_which_names_it_knows_a_model(capsys, tmp_path):
    """Encoders, MLPs without a gate and layers that differ, by their parameters; names with and without hyphens."""
    transformers = pytest.importorskip("transformers")

    def answer(*words):
        code = main(["plan", "--seq", "4096", "--memory", "900GiB", *words])
        captured = capsys.readouterr()
        return code, " ".join((captured.out + captured.err).split())

    for family, reason in (
        ("bert", "norms of the hidden size.* this model has LayerNorm .768. x24; name a level"),
        ("modernbert", "transformers makes no causal language model of it"),
        ("gpt2", "this model has 124,439,808; name a level"),
        ("qwen3_next", "this model has .* q_norm .256. x12, .*; name a level"),
        ("mixtral", ""),
        ("cohere", ""),
        ("llava", ""),
        ("t5", "t5 has an encoder and a decoder; only decoders are known here"),
    ):
        if family in transformers.CONFIG_MAPPING:
            transformers.CONFIG_MAPPING[family]().save_pretrained(tmp_path / family)
            code, text = answer("--model", str(tmp_path / family))
            assert (code, bool(re.search(reason, text))) == (2 if reason else 0, True), (family, text)
    assert answer("--model", "llama3-8b") == answer("--model", "Llama-3-8B")
    assert answer("--model", "llama3-8b", "--lora") == answer("--model", "llama-3-8b", "--trainable", "0.005")
    kinds = {"fp32 without": "", "fp32 under": "--autocast bfloat16", "the activations'": "--adapters model"}
    for words, options in kinds.items():
        assert f"as adapters in {words}" in answer("--model", "llama3-8b", "--lora", *options.split())[1]
    assert (
        "unknown adapters 'bf16'; known: fp32, autocast, model"
        in answer("--model", "llama3-8b", "--lora", "--adapters", "bf16")[1]
    )
    assert answer("--model", "llama3-9b")[0] == 2
    assert answer("--model", str(tmp_path / "llava"))[1].startswith("llava's language model, 32 layers")
    for wrong, words in (
        ("--adapters fp32", "--adapters fp32 is for LoRA: add --lora"),
        ("--gpus 4 --shards 6", "--gpus 4 share each sequence; --shards has to be a multiple of it"),
        ("--autocast fp32", "--autocast computes in bf16 or fp16"),
    ):
        code, text = answer("--model", "llama3-8b", *wrong.split())
        assert code == 2 and words in text
    assert "does not model experts in bf16" in answer("--model", "mixtral-8x7b", "--float8")[1]


def test_plan_command(capsys):
    arguments = ["plan", "--model", "mistral-7b", "--batch", "4", "--seq", "4096"]
    table = printed(capsys, *arguments, "--memory", "75GiB")
    assert "cheap x32                  88.0      98.9%" in table
    assert "75GiB         mlp x15, cheap x17" in table
    assert "Assumed: parameters in bf16/fp16" in table and "flash attention" in table
    rows = {row["setting"]: row for row in json.loads(printed(capsys, *arguments, "--memory", "61GiB", "--json"))}
    assert set(LEVELS) < set(rows) and rows["61GiB"]["peak_bytes"] <= 61 * GIB
    assert rows["default"]["levels"] == ["keep"] * 31 + ["cheap"]
    assert rows["cheap"]["peak_bytes"] < rows["default"]["peak_bytes"] < rows["keep"]["peak_bytes"]
    assert main([*arguments, "--memory", "20GiB"]) == 1
    least = re.search(
        r"20GiB: mistral-7b at 4 x 4096 needs ([\d.]+) GiB even with (full|tiled|offload)", capsys.readouterr().out
    )
    assert least and 52 < float(least[1]) <= 56.2
    assert "--memory 'lots' is no size; write it as 80GiB" in printed(capsys, *arguments, "--memory", "lots", code=2)
    for wrong in ("--trainable=-1", "--trainable=0", "--trainable=2", "--trainable=nan"):
        assert main([*arguments, wrong]) == 2, "no plan of -7 GiB"
        assert "is not a share; write a number above 0, at most 1" in capsys.readouterr().err


def test_among_equal_mixes_the_one_with_least_host_memory():
    """Ranks that chose different ones would gather parameters for different layers."""
    planner = Planner(replace(models.find("llama-3-8b"), layers=8), 1, 1_182_720)
    chosen = planner.best(137 * GIB, host=100 * GIB)
    others = [planner.predict(("offload",) * n + ("tiled",) * (8 - n)) for n in range(9)]
    equal = [one for one in others if (one.peak, one.speed) == (chosen.peak, chosen.speed)]
    assert len(equal) > 1 and chosen.host == min(one.host for one in equal)
