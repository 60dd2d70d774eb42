"""`liger-hw prebuild llama-3-8b --device h100 --batch 2 --seq 4096 -o DIR`: what an image needs, in one folder.

    DIR/liger-hw.lock    every configuration that the model launches at these sizes, pinned
    DIR/triton/          its kernels, compiled for the device: Triton's cache, in which the first step looks
    DIR/cache/           what was tuned on this machine for that kind of device, if anything was

Needs no GPU, and Triton in the version that the image has: another compiles again. Prints the lines for a Dockerfile.
Kernels that Inductor or a peer compiles are not in it, nor are options that a model sets beside its sizes.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from ..text import StatusLine, fold, json_text, printable
from . import UsageError, needs, parser_of, user_errors
from .arguments import A_MODEL, dtype_name, listed, positive, tokens

IMAGE = "/opt/liger-hw"
"""Where the printed lines put the folder in an image."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="+", metavar="MODEL", help=A_MODEL)
    parser.add_argument("--device", required=True, help="h200, mi300x, or an architecture such as sm90")
    parser.add_argument("--batch", type=listed(positive, "numbers"), required=True, metavar="B,..", help="batch sizes")
    parser.add_argument("--seq", type=listed(tokens, "numbers"), required=True, metavar="S,..", help="as 4096 or 4k")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="fp32, bf16 or fp16 (default bf16)")
    parser.add_argument("--ops", type=listed(str, "names"), metavar="A,B", help="only these ops (default: all)")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to write; a new or an empty one")
    parser.add_argument(
        "--workers", type=positive, default=os.cpu_count() or 1, help="compiler processes (default: one a core)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..autotune import store
    from ..backends import backend, known_target

    needs("prebuild", "triton")
    with user_errors("prebuild"):
        target = known_target(arguments.device)
    if target.vendor == "cpu" or backend(target.vendor).triton_target(target) is None:
        raise UsageError(
            f"prebuild: the Triton here has no compiler for {target.name}; `liger-hw lock` pins its configurations"
        )
    folder = Path(arguments.output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"prebuild: {printable(str(folder))} exists and is not an empty folder; name another with -o")
    folder.mkdir(parents=True, exist_ok=True)
    _lock(arguments, folder / "liger-hw.lock")
    compiled, problems = _compile(arguments, target, folder / "triton")
    tuned = store.file_of(target)
    if tuned is not None and tuned.exists():
        (folder / "cache").mkdir()
        shutil.copy2(tuned, folder / "cache" / tuned.name)
    answer = {
        "folder": str(folder),
        "device": target.name,
        "triton": store.triton_version(),
        "kernels": compiled,
        "failed": problems,
        "tuned": (folder / "cache").exists(),
        "dockerfile": dockerfile(folder),
    }
    if arguments.json:
        print(json_text(answer, indent=2))
    else:
        _print(answer)
    return 1 if problems else 0


def _lock(arguments: argparse.Namespace, file: Path) -> None:
    """Write the lock file, by `liger-hw lock`, whose own lines go nowhere."""
    import contextlib
    import io

    from . import lock

    command = ["--model", *arguments.model, "--device", arguments.device, "--dtype", arguments.dtype, "-o", str(file)]
    command += ["--batch", ",".join(map(str, arguments.batch)), "--seq", ",".join(map(str, arguments.seq))]
    if arguments.ops:
        command += ["--ops", ",".join(arguments.ops)]
    with contextlib.redirect_stdout(io.StringIO()):
        lock.run(parser_of("lock").parse_args(command))


def _compile(arguments: argparse.Namespace, target: Any, folder: Path) -> tuple[int, list[str]]:
    """How many kernels are in Triton's cache under `folder` now, and those that the compiler refused."""
    import torch

    from .. import registry
    from ..autotune import compile as aot
    from ..autotune import jobs, models
    from ..autotune.workers import CompilePool

    screen, launches = StatusLine(), []
    with user_errors("prebuild"):
        ops = [registry.get_op(name).name for name in arguments.ops or registry.ops()]
        chosen = [models.find(name) for name in arguments.model]
        pairs = jobs.shapes(ops, chosen, arguments.batch, arguments.seq, [])
    for number, (op, sizes) in enumerate(pairs):
        screen.progress(number, len(pairs), f"{op}: what it launches")
        launches += aot.trace(op, sizes, getattr(torch, arguments.dtype), target, user=True)
    screen.end()
    before, screen, seen, problems = os.environ.get("TRITON_CACHE_DIR"), StatusLine(), set(), []
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())  # which the workers take over
    try:
        with CompilePool(arguments.workers) as pool:
            for certificate in aot.certify(launches, pool):
                if certificate.launch.same() not in seen:
                    seen.add(certificate.launch.same())
                    problems += [] if certificate.ok else [str(certificate)]
                    screen.update(f"{len(seen)} kernels compiled")
    finally:
        screen.end()
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before
    return len(seen) - len(problems), problems


def dockerfile(folder: Path) -> list[str]:
    """The lines that put the folder into an image and point everything at it."""
    lines = [f"COPY {folder.name} {IMAGE}", f"ENV LIGER_HW_LOCK_FILE={IMAGE}/liger-hw.lock"]
    if (folder / "cache").exists():
        lines.append(f"ENV LIGER_HW_CACHE_DIR={IMAGE}/cache")
    return [*lines, f"ENV TRITON_CACHE_DIR={IMAGE}/triton"]


def _print(answer: dict[str, Any]) -> None:
    tuned = "what was tuned here is in cache/" if answer["tuned"] else "nothing was tuned here for such a device"
    folder, device, kernels = printable(answer["folder"]), answer["device"], answer["kernels"]
    print(fold(f"{folder}: {kernels} kernels for {device}, compiled by Triton {answer['triton']}; {tuned}"))
    for problem in answer["failed"]:
        print(printable(problem))
    print("\nLines for a Dockerfile:\n")
    print("\n".join(f"    {line}" for line in answer["dockerfile"]))
    print(
        "\n"
        + fold(
            "The image needs the same Triton. What it launches beside these sizes is compiled when it is first called, "
            "into the same folder, which its user has to be able to write to."
        )
    )
