"""`liger-hw prebuild llama-3-8b --device h100 --batch 2 --seq 4096 -o DIR`: the files for an image.

    DIR/liger-hw.lock    every configuration that the model launches at these sizes, pinned
    DIR/triton/          its kernels, compiled for the device: Triton's cache, in which the first step looks
    DIR/cache/           entries tuned on this machine for that kind of device, if any

Needs no GPU, but the image's version of Triton: another one would compile again. Prints the lines for a Dockerfile. It
has no kernels of Inductor or of other libraries, and none for options that a model sets besides its sizes.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from ..text import StatusLine, fold, json_text
from . import UsageError, lock, needs, user_errors
from .arguments import A_MODEL, dtype_name, listed, positive, tokens

IMAGE = "/opt/liger-hw"
"""Where the printed lines put the folder in an image."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="+", metavar="MODEL", help=A_MODEL)
    add("--device", required=True, help="h200, mi300x, or an architecture such as sm90")
    add("--batch", type=listed(positive, "numbers"), required=True, metavar="B,..", help="batch sizes")
    add("--seq", type=listed(tokens, "numbers"), required=True, metavar="S,..", help="as 4096 or 4k")
    add("--dtype", type=dtype_name, default="bfloat16", help="fp32, bf16 or fp16 (default bf16)")
    add("--ops", type=listed(str, "names"), metavar="A,B", help="only these ops (default: all)")
    add("-o", "--output", required=True, metavar="DIR", help="folder to write; a new or an empty one")
    add("--workers", type=positive, default=os.cpu_count() or 1, help="compiler processes (default: one a core)")
    add("--json", action="store_true", help="print JSON")


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
        raise UsageError(f"prebuild: {folder} exists and is not an empty folder; name another with -o")
    folder.mkdir(parents=True, exist_ok=True)
    lock.pin("prebuild", arguments, target, folder / "liger-hw.lock")
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
    print(json_text(answer, indent=2)) if arguments.json else _print(answer)
    return 1 if problems else 0


def _compile(arguments: argparse.Namespace, target: Any, folder: Path) -> tuple[int, list[str]]:
    """(number of kernels in Triton's cache under `folder`, kernels that do not compile)."""
    import torch

    from ..autotune import compile as aot
    from ..autotune.workers import CompilePool

    screen, launches, pairs = StatusLine(), [], lock.pairs_of("prebuild", arguments)
    for number, (op, sizes) in enumerate(pairs):
        screen.progress(number, len(pairs), f"{op}: what it launches")
        launches += aot.trace(op, sizes, getattr(torch, arguments.dtype), target, user=True)
    seen, problems = set(), []
    with CompilePool(arguments.workers, settings={"TRITON_CACHE_DIR": str(folder.resolve())}) as pool:
        for certificate in aot.certify(launches, pool):
            if certificate.launch.same() not in seen:
                seen.add(certificate.launch.same())
                problems += [] if certificate.ok else [str(certificate)]
                screen.update(f"{len(seen)} kernels compiled")
    screen.end()
    return len(seen) - len(problems), problems


def dockerfile(folder: Path) -> list[str]:
    """The lines that copy the folder into an image and set the environment variables for it."""
    lines = [f"COPY {folder.name} {IMAGE}", f"ENV LIGER_HW_LOCK_FILE={IMAGE}/liger-hw.lock"]
    if (folder / "cache").exists():
        lines.append(f"ENV LIGER_HW_CACHE_DIR={IMAGE}/cache")
    return [*lines, f"ENV TRITON_CACHE_DIR={IMAGE}/triton"]


def _print(answer: dict[str, Any]) -> None:
    tuned = "what was tuned here is in cache/" if answer["tuned"] else "nothing was tuned here for such a device"
    kernels = f"{answer['kernels']} kernels for {answer['device']}, compiled by Triton {answer['triton']}"
    lines = [f"{answer['folder']}: {kernels}; {tuned}", *answer["failed"], "", "Lines for a Dockerfile:", ""]
    lines += [f"    {line}" for line in answer["dockerfile"]]
    more = "The image needs the same Triton. What it launches beside these sizes is compiled when it is first called, "
    print(fold("\n".join([*lines, "", more + "into the same folder, which its user has to be able to write to."])))
