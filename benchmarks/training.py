"""Training one Hugging Face model under one arm (as shipped, compiled, with Liger, liger_hw or FP8), and what was seen.

Every arm starts from the same weights (checked, see `Run.start`), sees the same windows of the same text in the same
order and takes the same optimizer steps, so that two arms may differ only by what was patched in before the model was
built, and by what its linears are. `end_to_end.py`, `demo.py` and others train with this.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from liger_hw.autotune.clock import Clock
from liger_hw.autotune.models import KNOWN, Model
from liger_hw.bench.peers import Absent
from liger_hw.transformers.float8_linears import float8
from liger_hw.transformers.rebind import PREFIX

WARMUP_STEPS = 10
"""Steps of linear warm-up of the learning rate: a large model's loss spikes without it, which multiplies rounding."""


# -- what is trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape(Model):
    """A published model. `family` is the word in `apply_liger_kernel_to_<family>`.

    trained: layers that `end_to_end.py` trains by default: what fits one device with AdamW at 2 x 4096 tokens
    """

    family: str = ""
    attention: str = "sdpa"
    trained: int = 8

    def scaled(self, hidden: int) -> "Shape":
        """The same proportions at another width, with four heads and bytes for a vocabulary: for a quick try."""
        inner, width = (round(n * hidden / self.hidden / 8) * 8 for n in (self.intermediate, self.expert_width))
        kv_heads = max(1, 4 * self.kv_heads // self.heads)
        return replace(
            self,
            vocab=256,
            hidden=hidden,
            intermediate=max(8, inner),
            heads=4,
            kv_heads=kv_heads,
            head_dim=hidden // 4,
            expert_width=max(8, width) if self.expert_width else 0,
        )


def _known(public: str, family: str, **more: Any) -> Shape:
    return Shape(**vars(KNOWN[public]), family=family, **more)


def _other(family: str, *sizes: int, **more: Any) -> Shape:
    """sizes: hidden, intermediate, heads, key and value heads, head width, vocabulary"""
    return Shape(family, *sizes, family=family, **more)


MODELS = {
    "mistral": _known("mistralai/Mistral-7B-v0.3", "mistral"),
    "llama3": _known("meta-llama/Meta-Llama-3-8B", "llama"),
    "qwen3": _known("Qwen/Qwen3-8B", "qwen3"),
    "qwen2": _other("qwen2", 3584, 18944, 28, 4, 128, 152064, layers=28, trained=6),  # 7B
    "olmo2": _other("olmo2", 4096, 11008, 32, 32, 128, 100352, trained=6),  # 7B
    "granite": _other("granite", 4096, 12800, 32, 8, 128, 49155, layers=40, trained=6),  # 3.x 8B, logits not scaled
    "gemma2": _known("google/gemma-2-2b", "gemma2", attention="eager", trained=13),  # sdpa has no logit softcap
    "phi3": _other("phi3", 3072, 8192, 32, 32, 96, 32064, trained=16),  # mini
    "mixtral": _known("mistralai/Mixtral-8x7B-v0.1", "mixtral", trained=4),  # 11.6 GB a layer with AdamW in bf16
    "qwen3_moe": _known("Qwen/Qwen3-30B-A3B", "qwen3_moe", trained=4),
    "qwen3_next": _other(  # 80B-A3B; three layers of four have linear attention
        *("qwen3_next", 2048, 5120, 16, 2, 256, 151936),
        **{"layers": 48, "trained": 4, "experts": 512, "top_k": 10, "expert_width": 512},
    ),
    "qwen3_5": _other("qwen3_5_text", 2560, 9216, 16, 4, 256, 248320),  # 4B; linear attention as in qwen3_next
    "gpt_oss": _other(  # 20B; sdpa has no attention sinks, eager keeps every score
        *("gpt_oss", 2880, 2880, 64, 8, 64, 201088),
        **{"attention": "flex_attention", "layers": 24, "trained": 4, "experts": 32, "top_k": 4},
    ),
}


@dataclass(frozen=True)
class Schedule:
    """What to train: a model, its batches and its optimizer, under which arms and how often.

    hidden: a smaller width, with bytes for a vocabulary; text: a file (default: Python's own documentation)
    lora: adapters of rank 16 on all linears train (peft), and nothing else
    Raises `ValueError` for an unknown model or arm.
    """

    model: str = "mistral"
    layers: int = 8
    batch: int = 4
    seq: int = 4096
    steps: int = 20
    arms: tuple[str, ...] = ("hf", "liger", "liger_hw")
    rounds: int = 1
    checkpointing: bool = False
    dtype: str = "bfloat16"
    hidden: int | None = None
    text: str | None = None
    lora: bool = False
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}; known: {', '.join(MODELS)}")
        if wrong := [arm for arm in self.arms if arm not in ARMS]:
            raise ValueError(f"unknown arm {wrong[0]!r}; known: {', '.join(ARMS)}")
        if self.hidden is not None and self.hidden % 32:
            raise ValueError(f"--hidden must be a multiple of 32, got {self.hidden}")

    @property
    def shape(self) -> Shape:
        return MODELS[self.model].scaled(self.hidden) if self.hidden else MODELS[self.model]


def read_text(path: str | None) -> bytes:
    """The training text: a file, or Python's own documentation as every interpreter carries it (about 470 kB).

    Raises `ValueError` when it cannot be read.
    """
    if path is not None:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read --text {path}: {error.strerror}") from None
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python carries no pydoc_data.topics; give a text with --text FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def to_tokens(text: bytes, vocab: int) -> torch.Tensor:
    """Bytes as token ids below `vocab`, [n_tokens] int64. Raises `ValueError` for an empty text.

    A vocabulary of 256 has a token for each byte. A larger one has a token for a pair of bytes, 7 bits of the first
    and 8 of the second: English text is ASCII, so the ids spread over the vocabulary as words do.
    """
    if not text:
        raise ValueError("the text is empty; name a file with some kilobytes of text with --text")
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    if vocab <= 256:
        return values % vocab
    pairs = values[: values.numel() // 2 * 2].view(-1, 2)
    return ((pairs[:, 0] & 0x7F) << 8 | pairs[:, 1]) % vocab


def config(schedule: Schedule) -> Any:
    """The transformers config of the model."""
    from transformers import AutoConfig

    shape = schedule.shape
    experts = {}
    if shape.experts:  # families name these differently
        experts = dict.fromkeys(("num_local_experts", "num_experts"), shape.experts)
        experts |= {"num_experts_per_tok": shape.top_k, "norm_topk_prob": True}
        experts |= {"moe_intermediate_size": shape.expert_width or shape.intermediate}
    window = {"sliding_window": None} if shape.family == "mistral" else {}
    return AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=schedule.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(4096, schedule.seq),
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **experts,
        **window,
    )


def build(schedule: Schedule, device: torch.device, attention: str = "") -> Any:
    """The model with random weights from the seed, made on the device in its dtype.

    attention: another implementation of it than the model's shape names
    """
    from transformers import AutoModelForCausalLM

    attention = attention or schedule.shape.attention
    if attention == "flex_attention" and device.type == "cpu":  # it has no backward there
        attention = "eager"
    torch.manual_seed(schedule.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, schedule.dtype))
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config(schedule), attn_implementation=attention)
    finally:
        torch.set_default_dtype(before)
    model.train()
    if schedule.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    if schedule.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


# -- arms ------------------------------------------------------------------------------------------------------------

ARMS = {
    "hf": "Hugging Face as shipped",
    "hf-eager": "Hugging Face with its eager attention: what rounding alone does",
    "liger": "liger-kernel, if installed",
    "liger_hw": "liger_hw",
    "compile": "Hugging Face as shipped, under torch.compile",
    "float8": "liger_hw, and liger_hw.float8",
    "float8-tensorwise": "the same with one scale a tensor",
    "float8-kept": "the same with frozen weights kept in FP8 (for LoRA)",
    "torchao": "liger_hw, and torchao's float8 rowwise linears",
    "torchao-compile": "the same with each layer under torch.compile",
    "te": "liger_hw, and TransformerEngine's linears",
}
FLOAT8_ARMS = ("float8", "float8-tensorwise", "float8-kept", "torchao", "torchao-compile", "te")
_MISSING = object()


class Original:
    """A family's modelling file as Hugging Face ships it: its names, the attributes of its classes, torch's own losses.

    Raises `ValueError` where the family is patched already.
    """

    def __init__(self, family: str) -> None:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
        self.places = [module, torch.nn.functional, *classes]
        self.saved = [dict(vars(place)) for place in self.places]
        for place, saved in zip(self.places, self.saved):
            for name, value in saved.items():
                # PREFIX: what patches of single models leave in the module; nothing of Hugging Face's own uses it
                if not name.startswith(PREFIX) and (origin := _kernel_package(value)):
                    raise ValueError(
                        f"{family} is already patched in this process ({place.__name__}.{name} comes from {origin}); "
                        "the unpatched arm needs it as Hugging Face ships it. Revert the patch, or use a process of "
                        "its own."
                    )

    def differences(self) -> list[tuple[Any, str, Any]]:
        """(place, name, value before) of every name that changed, and of functions and classes that are new."""
        changes = []
        for place, saved in zip(self.places, self.saved):
            now = vars(place)
            changes += [(place, name, value) for name, value in saved.items() if now.get(name, _MISSING) is not value]
            changes += [(place, name, _MISSING) for name in now if name not in saved and callable(now[name])]
        return changes

    def restore(self) -> None:
        """Put everything back that changed."""
        for place, name, value in self.differences():
            if value is _MISSING:
                delattr(place, name)
            else:
                setattr(place, name, value)


def _kernel_package(value: Any) -> str:
    """The liger module a function or class was written in, whatever it calls itself; else an empty string."""
    written = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None) or ""
    return written if written.split(".")[0] in ("liger_hw", "liger_kernel") else ""


@contextlib.contextmanager
def patched(arm: str, family: str, device: torch.device) -> Iterator[Any]:
    """Patches the family as `arm` does, and undoes it at the end; yields the patch report of liger_hw, else None.

    Raises `Absent` where the arm cannot run here.
    """
    if arm not in ("liger", "liger_hw", *FLOAT8_ARMS):
        yield None
        if arm == "compile":
            torch.compiler.reset()
        return
    if arm == "liger" and device.type == "cpu":
        raise Absent("liger-kernel needs a GPU")
    try:
        library = importlib.import_module(f"{'liger_kernel' if arm == 'liger' else 'liger_hw'}.transformers")
        apply = getattr(library, f"apply_liger_kernel_to_{family}")
    except ImportError as error:
        raise Absent(f"{arm} is not installed ({error}); pip install liger-kernel") from None
    original = Original(family)
    report = apply()
    try:
        yield report
    finally:
        if arm != "liger":  # which has no way back
            report.revert()
        original.restore()
        if arm == "torchao-compile":
            torch.compiler.reset()


def float8_linears(arm: str, model: Any, smallest: int = 512) -> None:
    """Change a model's linears as an arm of `FLOAT8_ARMS` does. smallest: as for `liger_hw.float8`.

    Raises `ImportError` where the arm's package is not installed.
    """
    if arm.startswith("float8"):
        recipe = "tensorwise" if arm == "float8-tensorwise" else "rowwise"
        float8(model, recipe, smallest=smallest, keep_frozen=arm == "float8-kept")
    elif arm == "te":
        import transformer_engine.pytorch as te

        def forward(*args: Any, plain: Any = model.forward, **kwargs: Any) -> Any:
            with te.autocast(enabled=True):
                return plain(*args, **kwargs)

        model.forward = forward
        for path, linear in list(_layers(model).named_modules()):
            if type(linear) is torch.nn.Linear and "lora" not in path:
                sizes = linear.in_features, linear.out_features, linear.bias is not None
                twin = te.Linear(*sizes, params_dtype=linear.weight.dtype, device=linear.weight.device)
                twin.load_state_dict(linear.state_dict(), strict=False)
                twin.weight.requires_grad_(linear.weight.requires_grad)
                _layers(model).set_submodule(path, twin)
    else:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise")
        convert_to_float8_training(_layers(model), config=config, module_filter_fn=lambda _, path: "lora" not in path)
        if arm == "torchao-compile":
            for layer in _layers(model):
                layer.compile()


def _layers(model: Any) -> torch.nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


# -- training --------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One arm trained once. Times are seconds; memory is bytes, None where unknown.

    start: fingerprint of the initial weights; grad_norms: gradient norm of each parameter at the first step
    step_seconds: without the first steps, which compile and warm up, unless there is only one
    """

    losses: list[float]
    grad_norms: dict[str, float]
    start: float
    step_seconds: list[float]
    tokens_per_step: int
    peak_memory: int | None
    first_step_seconds: float = math.nan

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / statistics.median(self.step_seconds)


def train(
    arm: str,
    schedule: Schedule,
    tokens: torch.Tensor,
    device: torch.device,
    on_step: Callable[[int, Callable[[], float]], Any] = lambda step, loss: None,
) -> Run:
    """Train and return what was seen. `tokens` holds token ids on `device`; call it inside `patched(arm, ...)`.

    `on_step(step, loss)` is called after each step; calling `loss()` reads the step's loss, which waits for the
    device. It returns True to end the run after this step.
    """
    generator = torch.Generator().manual_seed(schedule.seed)
    rows = torch.randint(tokens.numel() - schedule.seq, (schedule.steps, schedule.batch), generator=generator).to(
        device
    )
    columns = torch.arange(schedule.seq, device=device)
    release(device)
    module, before = None if device.type == "cpu" else torch.get_device_module(device), 0
    if module is not None:
        module.reset_peak_memory_stats()
        before = module.memory_allocated()  # what an earlier arm's libraries keep is not this arm's
    model = build(schedule, device, "eager" if arm == "hf-eager" else "")
    start = float(sum(p.detach().sum(dtype=torch.float64).abs() for p in model.parameters()))
    if arm == "compile":
        model.compile()
    elif arm in FLOAT8_ARMS:
        float8_linears(arm, model, 16 if schedule.hidden else 512)
    parameters = dict(model.named_parameters())  # now, or weights that float8 replaced would stay
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=schedule.learning_rate, fused=True)
    losses = torch.zeros(schedule.steps, dtype=torch.float32, device=device)
    clock = Clock(device)
    grad_norms: dict[str, float] = {}
    done = 0
    try:
        marks = [clock.mark()]
        for step in range(schedule.steps):
            batch = tokens[rows[step, :, None] + columns]
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            losses[step] = loss.detach()
            if step == 0:
                grad_norms = _norms(parameters)
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            marks.append(clock.mark())
            done = step + 1
            if on_step(step, losses[step].item):
                break
        seconds = [ms / 1e3 for ms in clock.ms(zip(marks, marks[1:]))]
        return Run(
            losses=losses[:done].tolist(),
            grad_norms=grad_norms,
            start=start,
            step_seconds=seconds[min(5, max(1, done // 4), done - 1) :],
            tokens_per_step=schedule.batch * schedule.seq,
            peak_memory=None if module is None else module.max_memory_allocated() - before,
            first_step_seconds=seconds[0],
        )
    finally:
        optimizer.zero_grad(set_to_none=True)
        del model, optimizer, parameters


def release(device: torch.device) -> None:
    """Give freed memory back, so that the next run starts as this one did."""
    gc.collect()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()


def _norms(parameters: dict[str, Any]) -> dict[str, float]:
    named = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not named:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in named.values()])
    return dict(zip(named, norms.tolist()))
