"""`lock` and `prebuild`: pin a model's configurations in a file, and compile its kernels for a container image."""

from __future__ import annotations

import argparse
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from .. import env, registry
from ..autotune import compile as aot
from ..autotune import jobs, lock, models, store
from ..autotune.workers import CompilePool
from ..backends import VENDORS, backend, known_target
from ..text import StatusLine, first_line, fold, json_text
from . import UsageError, needs, user_errors
from .arguments import A_MODEL, SEQS, add_model_sizes, dtype_name, listed, positive, tokens, torch_dtype

IMAGE = "/opt/liger-hw"
"""Path of `prebuild`'s folder in an image."""


def lock_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_sizes(parser, "only these ops (default: all)")
    add = parser.add_argument
    add("--dtype", type=dtype_name, help="fp32, bf16 or fp16 (default bf16)")
    add("--device", help="cuda:0, xpu, h200, or an architecture such as sm90 (default: the device here)")
    add("-o", "--output", help="file to write (default liger-hw.lock)")
    add("--force", action="store_true", help="overwrite the file where it exists")
    add("--check", metavar="FILE", help="check a lock file instead of writing one")
    add("--json", action="store_true", help="print JSON")


def run_lock(arguments: argparse.Namespace) -> int:
    """`liger-hw lock --model mistral-7b`: write liger-hw.lock, which pins every configuration that the model launches.

    Use it with `LIGER_HW_LOCK_FILE=liger-hw.lock` on every rank. `--check FILE` says whether a lock file is intact, and
    where it differs from this machine's choices.
    """
    with user_errors((ValueError, RuntimeError)):
        target = registry.target_named(arguments.device)
    if arguments.check is not None:
        takes = ("device", "check", "json")
        if others := [f"--{name}" for name, value in vars(arguments).items() if value and name not in takes]:
            raise UsageError(f"--check reads a whole lock file, and takes no {', '.join(others)}")
        return _check(arguments, target)
    output = "liger-hw.lock" if arguments.output is None else arguments.output
    if not output:
        raise UsageError("--output is empty; leave it out to write liger-hw.lock")
    if not arguments.model:
        raise UsageError("say what to pin: --model with one or more models")
    if target.vendor == "cpu" and not registry.interpreting():
        raise UsageError("nothing is launched on a CPU; --device names what to pin for, as h200, mi300x or sm90")
    if Path(output).is_dir():
        raise UsageError(f"{output} is a folder; -o names the file to write")
    if Path(output).exists() and not arguments.force:
        raise UsageError(f"{output} exists; --force overwrites it, -o writes another")
    table, digest = pin(arguments, target, output)
    kinds = Counter(str(entry.provenance["layer"]) for entry in table.values())
    if arguments.json:
        print(json_text({"file": output, "digest": digest, "entries": len(table), "layers": kinds}))
        return 0
    layers = ", ".join(f"{count} {layer}" for layer, count in sorted(kinds.items()))
    print(fold(f"{output}: {len(table)} configurations pinned for {target.name} ({layers}), digest {digest}"))
    print(fold(f"use it: LIGER_HW_LOCK_FILE={output}"))
    return 0


def pairs_of(arguments: argparse.Namespace) -> list[tuple[str, tuple[int, ...]]]:
    """(op, sizes) of the launches of --model at --batch and --seq, for --ops or every op."""
    with user_errors():
        ops = [registry.get_op(name).name for name in arguments.ops or registry.ops()]
        chosen = [models.find(name) for name in arguments.model]
    return jobs.shapes(ops, chosen, arguments.batch or [1], arguments.seq or SEQS, [])


def pin(arguments: argparse.Namespace, target: Any, output: str | Path) -> tuple[dict, str]:
    """Write a lock file for the launches of --model; returns its table and digest."""
    env.ignore("LIGER_HW_LOCK_FILE")  # pin this machine's choices, not an older lock file's
    names: dict[tuple[str, tuple], None] = {}
    pairs, screen = pairs_of(arguments), StatusLine()
    for number, (op, sizes) in enumerate(pairs):
        screen.progress(number, len(pairs), f"{op}: tracing its launches")
        try:
            names.update(dict.fromkeys(jobs.launched(op, sizes, arguments.dtype or "bfloat16", target)))
        except Exception as error:
            raise UsageError(f"{op} at {sizes}: {first_line(error)}") from None
    screen.end()
    if not names:
        raise UsageError(f"nothing to pin for {target.name}")
    keys = [(registry.get_tunable(name), key) for name, key in names]
    table = {(t.op, t.variant, key): lock.pinned(registry.choose(t, target, key)) for t, key in keys}
    return table, lock.write(output, table, {"device": target.name, "arch": target.arch})


def _made_for(header: dict[str, Any]) -> Any:
    """The Target of the device that a lock file was made for, or None."""
    devices = [known_target(name) for vendor in VENDORS for name in backend(vendor).known_devices()]
    matches = [one for one in devices if one.name == header.get("device")]
    return next(iter(matches + [one for one in devices if one.arch == header.get("arch")]), None)


def _check(arguments: argparse.Namespace, target: Any) -> int:
    env.ignore("LIGER_HW_LOCK_FILE")  # compare with this machine's choices, not a lock file's
    try:
        header, table = lock.read(Path(arguments.check))
    except ValueError as error:
        facts = {"file": arguments.check, "error": str(error)}
        print(json_text(facts) if arguments.json else fold(f"{arguments.check}: {error}"))
        return 1
    if target.vendor == "cpu" and arguments.device is None:  # a CPU launches nothing
        target = _made_for(header) or target
    illegal, other, tunables = lock.unusable(target, table), 0, registry.tunables()
    for (op, variant, key), entry in table.items():
        tunable = tunables.get(f"{op}.{variant}")
        if tunable and not tunable.illegal(target, key, entry.config) and tunable.serves(target, key):
            other += registry.choose(tunable, target, key).config != entry.config
    facts = {"file": arguments.check, "digest": header["digest"], "entries": len(table)}
    if arguments.json:
        print(json_text({**facts, "illegal": illegal, "other": other}))
        return 1 if illegal else 0
    origin = f"digest {header['digest']}, made on {header.get('device', '?')}"
    lines = [f"{arguments.check}: {len(table)} configurations, {origin}"]
    lines += [f"{other} differ from the configurations that {target.name} uses without the file"]
    lines += [f"not usable on {target.name}: {line}" for line in illegal]
    print(fold("\n".join(lines)))
    return 1 if illegal else 0


# -- prebuild ----------------------------------------------------------------------------------------------------------


def prebuild_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_prebuild(arguments: argparse.Namespace) -> int:
    """`liger-hw prebuild llama-3-8b --device h100 --batch 2 --seq 4096 -o DIR`: the files for an image.

        DIR/liger-hw.lock    every configuration that the model launches at these sizes, pinned
        DIR/triton/          its kernels, compiled for the device, as Triton's cache
        DIR/cache/           entries tuned on this machine for that kind of device, if any

    Needs no GPU, but the image's version of Triton: another version compiles again. Prints the lines for a Dockerfile.
    Not included: kernels of Inductor and other libraries, and kernels for options that a model sets besides its sizes.
    """
    needs("triton")
    with user_errors():
        target = known_target(arguments.device)
    if target.vendor == "cpu" or backend(target.vendor).triton_target(target) is None:
        raise UsageError(f"the Triton here has no compiler for {target.name}; `liger-hw lock` pins its configurations")
    folder = Path(arguments.output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder; name another with -o")
    folder.mkdir(parents=True, exist_ok=True)
    pin(arguments, target, folder / "liger-hw.lock")
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
    """(number of kernels compiled into Triton's cache in `folder`, the kernels that do not compile)"""
    screen, launches, pairs = StatusLine(), {}, pairs_of(arguments)
    for number, (op, sizes) in enumerate(pairs):
        screen.progress(number, len(pairs), f"{op}: tracing its launches")
        traced = aot.trace(op, sizes, torch_dtype(arguments.dtype), target, user=True)
        launches.update({launch.compile_key(): launch for launch in traced})
    problems = []
    with CompilePool(arguments.workers, settings={"TRITON_CACHE_DIR": str(folder.resolve())}) as pool:
        for number, certificate in enumerate(aot.certify(launches.values(), pool)):
            problems += [] if certificate.ok else [str(certificate)]
            screen.update(f"{number + 1} of {len(launches)} kernels compiled")
    screen.end()
    return len(launches) - len(problems), problems


def dockerfile(folder: Path) -> list[str]:
    """The lines that copy the folder into an image and set its environment variables."""
    lines = [f"COPY {folder.name} {IMAGE}", f"ENV LIGER_HW_LOCK_FILE={IMAGE}/liger-hw.lock"]
    if (folder / "cache").exists():
        lines.append(f"ENV LIGER_HW_CACHE_DIR={IMAGE}/cache")
    return [*lines, f"ENV TRITON_CACHE_DIR={IMAGE}/triton"]


def _print(answer: dict[str, Any]) -> None:
    tuned = "entries tuned here are in cache/" if answer["tuned"] else "no entries were tuned here for such a device"
    kernels = f"{answer['kernels']} kernels for {answer['device']}, compiled by Triton {answer['triton']}"
    lines = [f"{answer['folder']}: {kernels}; {tuned}", *answer["failed"], "", "Lines for a Dockerfile:", ""]
    lines += [f"    {line}" for line in answer["dockerfile"]]
    more = "The image needs the same Triton. Kernels for other sizes are compiled at their first launch, into the same "
    print(fold("\n".join([*lines, "", more + "folder, to which the image's user needs write access."])))
