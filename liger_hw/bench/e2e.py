"""Real Hugging Face models trained from random weights: tokens/s, peak memory, loss curves, one arm after another.

Every arm gets a fresh model from the same seed, the same windows of the same text and the same optimizer steps; with
`rounds` the arms take turns. What an arm patched is put back before the next one starts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import math
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from ..cli._values import table
from .timing import Budget, OutOfBudget, first_line, with_index


@dataclass(frozen=True)
class Shape:
    """One model family at one published size. `family` is the word in `apply_liger_kernel_to_<family>`.

    layers: as published, for saying how many of them a plan has; experts: of each layer, two of them for a token
    """

    family: str
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    attention: str = "sdpa"
    layers: int = 32
    experts: int = 0

    def scaled(self, hidden: int) -> "Shape":
        """The same proportions at another width, with four heads and bytes for a vocabulary: for a quick try."""
        inner = max(8, round(self.intermediate * hidden / self.hidden / 8) * 8)
        kv_heads = max(1, 4 * self.kv_heads // self.heads)
        return replace(
            self, vocab=256, hidden=hidden, intermediate=inner, heads=4, kv_heads=kv_heads, head_dim=hidden // 4
        )


MODELS = {
    "mistral": Shape("mistral", 32768, 4096, 14336, 32, 8),
    "llama3": Shape("llama", 128256, 4096, 14336, 32, 8),
    "qwen3": Shape("qwen3", 151936, 4096, 12288, 32, 8, layers=36),
    "gemma2": Shape("gemma2", 256000, 2304, 9216, 8, 4, 256, "eager", layers=26),  # 2B; sdpa has no logit softcap
    "phi3": Shape("phi3", 32064, 3072, 8192, 32, 32, 96),  # mini
    "mixtral": Shape("mixtral", 32000, 4096, 14336, 32, 8, experts=8),  # 8x7B; 11.6 GB a layer with AdamW in bf16
}
ARMS = ("hf", "liger", "liger_hw", "compile")
SEED = 0


@dataclass(frozen=True)
class Plan:
    """What to train. Raises `ValueError` for an unknown model or arm."""

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
    learning_rate: float = 1e-4

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


def measure(
    plan: Plan,
    device: torch.device,
    budget: Budget | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train every arm `rounds` times. `keep` gets all that is known after each arm; an arm that fails says why."""
    device, budget = with_index(device), budget or Budget()
    tokens = _tokens(plan, device)
    runs: list[dict[str, Any]] = []
    found: dict[str, Any] = {"plan": asdict(plan), "shape": asdict(plan.shape), "runs": runs, "ended": ""}
    for turn in range(plan.rounds):
        for arm in plan.arms:
            run: dict[str, Any] = {"arm": arm, "round": turn, "status": "ok", "note": ""}
            try:
                budget.check()
                with _patched(arm, plan.shape.family):
                    run |= _train(arm, plan, tokens, device, budget)
            except OutOfBudget as stop:
                found["ended"] = str(stop)
                run |= {"status": "skipped", "note": str(stop)}
            except ImportError as error:
                run |= {"status": "absent", "note": str(error)}
            except Exception as error:
                run |= {"status": "error", "note": first_line(error)}
            runs.append(run)
            _release(device)
            say(f"round {turn + 1} {arm}: {_line(run)}")
            keep(found)
    found["summary"] = summary(found)
    keep(found)
    return found


def _line(run: dict[str, Any]) -> str:
    if not run.get("step_seconds"):
        return f"{run['status']} {run['note']}"
    losses = f"loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}"
    return f"{run['tokens_per_second']:.0f} tokens/s, {_gib(run['peak_gib'])}, {losses}"


# -- arms ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _patched(arm: str, family: str) -> Iterator[None]:
    """The model family as `arm` has it, and as it was afterwards."""
    name = f"apply_liger_kernel_to_{family}"
    if arm == "liger_hw":
        report = getattr(importlib.import_module("liger_hw.transformers"), name)()
        try:
            yield
        finally:
            report.revert()
    elif arm == "liger":
        with _put_back(importlib.import_module(f"transformers.models.{family}.modeling_{family}")):
            getattr(importlib.import_module("liger_kernel.transformers"), name)()
            yield
    else:
        yield
        if arm == "compile":
            torch._dynamo.reset()


@contextlib.contextmanager
def _put_back(module: Any) -> Iterator[None]:
    """Undo what a patch without a way back does to a modelling file, its classes and torch.nn.functional."""
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    places = [(place, dict(vars(place))) for place in (module, torch.nn.functional, *classes)]
    try:
        yield
    finally:
        for place, before in places:
            for name in [n for n, value in dict(vars(place)).items() if n not in before or before[n] is not value]:
                if name in before:
                    setattr(place, name, before[name])
                else:
                    delattr(place, name)


# -- training --------------------------------------------------------------------------------------------------------


def _tokens(plan: Plan, device: torch.device) -> torch.Tensor:
    from ..cli.demo.train import read_text, to_tokens

    tokens = to_tokens(read_text(plan.text), 256 if plan.shape.vocab <= 256 else 32768)
    return (tokens % plan.shape.vocab).to(device)  # a few vocabularies are a little smaller than 32768


def config(plan: Plan) -> Any:
    """The transformers config of a plan's model."""
    from transformers import AutoConfig

    shape = plan.shape
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": 2} if shape.experts else {}
    return AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(4096, plan.seq),
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **experts,
    )


def build(plan: Plan, device: torch.device) -> Any:
    """The model of a plan with random weights from a fixed seed, made on the device in the plan's dtype."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, plan.dtype))
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config(plan), attn_implementation=plan.shape.attention)
    finally:
        torch.set_default_dtype(before)
    model.train()
    if plan.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _train(arm: str, plan: Plan, tokens: torch.Tensor, device: torch.device, budget: Budget) -> dict[str, Any]:
    _release(device)
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None:
        module.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(tokens.numel() - plan.seq, (plan.steps, plan.batch), generator=generator).to(device)
    columns = torch.arange(plan.seq, device=device)

    model = build(plan, device)
    if arm == "compile":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, fused=True)
    losses = torch.full((plan.steps,), math.nan, dtype=torch.float32, device=device)
    marks: list[Any] = []
    first_step = 0.0
    done = 0
    if module is not None:
        module.synchronize()
    began = time.perf_counter()
    for step in range(plan.steps):
        batch = tokens[starts[step, :, None] + columns]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        losses[step] = loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if step == 0:
            if module is not None:
                module.synchronize()
            first_step = time.perf_counter() - began
        marks.append(_mark(module))
        if done >= 3:
            with contextlib.suppress(OutOfBudget):
                budget.check()
                continue
            break
    if module is not None:
        module.synchronize()
    seconds = [_between(a, b) for a, b in zip(marks, marks[1:])]
    seconds = seconds[min(4, max(0, len(seconds) // 4)) :]  # the first step compiles, a few more warm up
    return {
        "steps": done,
        "losses": losses[:done].tolist(),
        "step_seconds": seconds,
        "tokens_per_second": plan.batch * plan.seq / statistics.median(seconds) if seconds else math.nan,
        "first_step_seconds": first_step,
        "peak_gib": None if module is None else module.max_memory_allocated() / 2**30,
        "note": "" if done == plan.steps else f"stopped after {done} steps: the budget is spent",
    }


def _mark(module: Any) -> Any:
    if module is None:
        return time.perf_counter()
    event = module.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()


# -- results ---------------------------------------------------------------------------------------------------------


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row an arm over its rounds; loss differences are against `hf` (or the first arm that trained)."""
    good = [run for run in found["runs"] if run["status"] == "ok" and run.get("step_seconds")]
    names = list(dict.fromkeys(run["arm"] for run in good))
    base = "hf" if "hf" in names else names[0] if names else None
    rows = []
    for name in names:
        runs = [run for run in good if run["arm"] == name]
        seconds = sorted(s for run in runs for s in run["step_seconds"])
        tokens = found["plan"]["batch"] * found["plan"]["seq"]
        against = next(run for run in good if run["arm"] == base)
        differences = [abs(a - b) for a, b in zip(runs[0]["losses"], against["losses"])]
        rows.append(
            {
                "arm": name,
                "tokens_per_second": tokens / statistics.median(seconds),
                "p20": tokens / seconds[int(0.8 * (len(seconds) - 1) + 0.5)],
                "p80": tokens / seconds[int(0.2 * (len(seconds) - 1) + 0.5)],
                "rounds": [run["tokens_per_second"] for run in runs],
                "peak_gib": max((run["peak_gib"] for run in runs if run["peak_gib"] is not None), default=None),
                "first_step_seconds": runs[0]["first_step_seconds"],
                "last_loss": runs[0]["losses"][-1],
                "largest_loss_difference": max(differences),
                "against": base,
            }
        )
    return rows


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} GiB"


def as_text(found: dict[str, Any]) -> str:
    rows, plan = found["summary"], found["plan"]
    lines = [("arm", "tokens/s", "p20..p80", "gain", "peak", "first step s", "last loss", "loss diff")]
    base = next((row for row in rows if row["arm"] == row["against"]), None)
    for row in rows:
        gain = row["tokens_per_second"] / base["tokens_per_second"] - 1
        lines.append(
            (
                row["arm"],
                f"{row['tokens_per_second']:.0f}",
                f"{row['p20']:.0f}..{row['p80']:.0f}",
                f"{100 * gain:+.1f}%" if row is not base else "",
                _gib(row["peak_gib"]),
                f"{row['first_step_seconds']:.1f}",
                f"{row['last_loss']:.4f}",
                f"{row['largest_loss_difference']:.1e}" if row is not base else "",
            )
        )
    published = found["shape"]["layers"]
    shape = f"{plan['model']}, {plan['layers']} of {published} layers, batch {plan['batch']} x {plan['seq']}, {plan['dtype']}"
    shape += ", checkpointing" if plan["checkpointing"] else ""
    failed = [f"{run['status']}  {run['arm']}: {run['note']}" for run in found["runs"] if run["status"] != "ok"]
    return "\n".join([shape, table(lines) if rows else "nothing was trained", *dict.fromkeys(failed)])


def plots(found: dict[str, Any], folder: str) -> list[Path]:
    """Loss curves and tokens/s as one PNG; nothing where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for run in found["runs"]:
        if run["round"] == 0 and run.get("losses"):
            left.plot(run["losses"], label=run["arm"], alpha=0.8)
    left.set_xlabel("step")
    left.set_ylabel("loss")
    left.legend()
    for number, row in enumerate(found["summary"]):
        memory = "" if row["peak_gib"] is None else f"\n{row['peak_gib']:.1f} GiB"
        right.bar(number, row["tokens_per_second"], label=row["arm"])
        right.text(
            number, row["tokens_per_second"], f"{row['tokens_per_second']:.0f}{memory}", ha="center", va="bottom"
        )
    right.set_xticks(range(len(found["summary"])), [row["arm"] for row in found["summary"]])
    right.set_ylabel("tokens/s")
    right.margins(y=0.2)
    plan = found["plan"]
    figure.suptitle(f"{plan['model']}, {plan['layers']} layers, batch {plan['batch']} x {plan['seq']}, {plan['dtype']}")
    path = Path(folder) / f"e2e-{plan['model']}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
