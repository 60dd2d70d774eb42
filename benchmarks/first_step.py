"""First and second step of patched models with empty kernel caches.

python benchmarks/first_step.py [FILE.json] [--models mistral,mixtral] [--arms liger_hw,liger,hf] [--rounds 2] [--budget
90]
    [--device cuda] [--small] [--timeline MODEL]

Two layers of the published width, 1 x 2048 tokens, bf16. `import` and `patch` are the seconds before the model is
built, `steps` forward and backward with a synchronisation at the end. Each arm is a process of its own, forked from one
that has imported torch, transformers and the model's file and has touched no device. One runs at a time: the arms of a
model in turn, and in the opposite order for the next model and in the next round. Each arm runs once before what is
counted, so that no arm reads the compilers from a cold disk. FILE is written after every arm; what the budget ends is
there with the steps it made.

`--timeline` prints for liger_hw's run before what is counted when each kernel's compilation began and ended, on which
thread, and when the step waited for it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from typing import Any, Callable, Iterator

import torch
import transformers


def classes_of(model: str) -> tuple[type, type]:
    """The configuration and the causal LM of a family; reads the family's file."""
    config = transformers.AutoConfig.for_model(model).__class__
    return config, transformers.AutoModelForCausalLM._model_mapping[config]


# -- one process -----------------------------------------------------------------------------------------------------


def take_steps(
    arm: str, model: str, device: str, small: bool, places: dict[str, str], timed: bool, say: Callable[[dict], None]
) -> None:
    """What a forked process does. places: environment variables of the empty caches; timed: say the timeline too."""
    os.environ.update(places)
    try:
        if device != "cpu":
            torch.mm(*[torch.ones(64, 64, device=device)] * 2)
        before = time.perf_counter()
        if arm != "hf":
            patches = importlib.import_module(f"{'liger_kernel' if arm == 'liger' else arm}.transformers")
        say({"import": time.perf_counter() - before, "torch": torch.__version__})
        say({"transformers": transformers.__version__})
        before = time.perf_counter()
        if arm != "hf":
            getattr(patches, f"apply_liger_kernel_to_{model}")()
        say({"patch": time.perf_counter() - before})
        config_class, model_class = classes_of(model)
        shape = dict(num_hidden_layers=2, vocab_size=32000)
        if small:
            shape |= dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
            shape["vocab_size"] = 320
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            built = model_class(config_class(**shape)).train()
        ids = torch.randint(0, shape["vocab_size"], (1, 64 if small else 2048), device=device)
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        spans = watched() if timed else []
        for _ in range(3):
            wait()
            start = time.perf_counter()
            built(input_ids=ids, labels=ids).loss.backward()
            wait()
            say({"step": time.perf_counter() - start})
            if spans:
                rows = [(round(a - start, 3), round(b - start, 3), where, what) for a, b, where, what in sorted(spans)]
                say({"timeline": rows})
                spans.clear()
    except BaseException:
        say({"error": traceback.format_exc()[-600:]})
        raise


def watched() -> list[tuple[float, float, str, str]]:
    """(begin, end, thread, what) of what a first step waits for, filled while the process goes on.

    Wraps functions of Triton and of liger_hw by their private names, so it knows the releases of today only.
    """
    import triton
    from triton.backends.nvidia import driver as nvidia
    from triton.compiler import compiler
    from triton.runtime import build, cache

    from liger_hw.autotune import compile_ahead
    from liger_hw.runtime import launch

    spans: list[tuple[float, float, str, str]] = []

    @contextlib.contextmanager
    def span(what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            spans.append((begin, time.perf_counter(), threading.current_thread().name, what))

    def watch(owner: Any, name: str, label: Callable[..., str]) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            return

        def outer(*args: Any, **kwargs: Any) -> Any:
            with span(label(*args, **kwargs)):
                return inner(*args, **kwargs)

        setattr(owner, name, outer)

    watch(nvidia.CudaUtils, "__init__", lambda *_: "driver")
    watch(build, "_build", lambda name, *_: f"C compiler: {name}")
    watch(cache, "triton_key", lambda: "hash of Triton")
    watch(compiler, "compile", lambda source, *_, **__: f"compile {source.name}")
    triton.compiler.compile = compiler.compile
    watch(compiler.ASTSource, "make_ir", lambda source, *_: f"front end {source.name}")
    watch(compile_ahead, "run_on_fakes", lambda function, _: f"{function.__name__} on fake tensors")
    watch(launch, "_find_or_compile", lambda plan, kernel, *_: f"STEP finds or compiles {kernel.fn.__name__}")
    watch(launch, "launch_ordinary", lambda plan, kernel, *_: f"STEP launches {kernel.fn.__name__}")
    return spans


# -- all of them -----------------------------------------------------------------------------------------------------


def run(arm: str, model: str, device: str, small: bool, seconds: float, timed: bool = False) -> dict:
    """What one process said: {import, patch, steps, error, timeline}."""
    found: dict = {"model": model, "arm": arm, "steps": []}
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        places = {"TRITON_CACHE_DIR": f"{folder}/triton", "LIGER_HW_CACHE_DIR": f"{folder}/liger_hw"}
        places["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        process = forked.Process(target=take_steps, args=(arm, model, device, small, places, timed, theirs.send))
        process.start()
        theirs.close()
        end = time.monotonic() + seconds
        with contextlib.suppress(EOFError):
            while ours.poll(max(0.0, end - time.monotonic())):
                said = ours.recv()
                if "step" in said:
                    found["steps"].append(said.pop("step"))
                found |= said
            found["error"] = f"ended after {seconds:.0f} s"
            process.kill()
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--models", default="mistral,mixtral")
    parser.add_argument("--arms", default="liger_hw,liger,hf")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a toy's widths, to try the script")
    parser.add_argument("--timeline", metavar="MODEL", help="also print what liger_hw's first step of it waits for")
    arguments = parser.parse_args()
    models, arms = arguments.models.split(","), arguments.arms.split(",")
    began, took = time.monotonic(), {}
    for model in models:
        classes_of(model)
    common = arguments.device, arguments.small
    for arm in arms:
        timed = arm == "liger_hw" and arguments.timeline is not None
        first = run(arm, (timed and arguments.timeline) or models[0], *common, arguments.budget / 4, timed)
        print(json.dumps({n: v for n, v in first.items() if n != "timeline"} | {"counted": False}), flush=True)
        for begin, end, where, what in first.get("timeline", ()):
            print(f"{begin:7.3f} {end:7.3f} {end - begin:6.3f}  {where:24} {what}", flush=True)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    found = {
        "what": " ".join(__doc__.split("\n\n")[2].split()),
        "date": date,
        "commit": os.environ.get("LIGER_COMMIT"),
    }
    found["runs"] = []
    for number in range(arguments.rounds):
        for place, model in enumerate(models):
            for arm in arms[:: 1 if (number + place) % 2 == 0 else -1]:
                left = arguments.budget - (time.monotonic() - began)
                if left < max(5, 1.2 * took.get((model, arm), 0)):
                    continue
                start = time.monotonic()
                found["runs"].append(run(arm, model, *common, left))
                took[model, arm] = time.monotonic() - start
                print(json.dumps(found["runs"][-1]), flush=True)
                if arguments.file:
                    with open(arguments.file, "w") as file:
                        json.dump(found, file, indent=1)

    for model in models:
        for arm in arms:
            first = [
                one["steps"][0] for one in found["runs"] if (one["model"], one["arm"]) == (model, arm) and one["steps"]
            ]
            print(f"{model:8} {arm:9} first step {', '.join(f'{s:.2f}' for s in first) or 'not reached'} s")


if __name__ == "__main__":
    main()
