"""`lock` and `prebuild`: what a model launches, pinned in one file, and compiled beside it for a container image."""

from __future__ import annotations

import argparse
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from ..text import StatusLine, first_line, fold, json_text
from . import UsageError, needs, user_errors
from .arguments import A_MODEL, SEQS, add_model_sizes, dtype_name, listed, positive, tokens

IMAGE = "/opt/liger-hw"
"""Where the lines that `prebuild` prints put its folder in an image."""


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
    """`liger-hw lock --model mistral-7b`: write liger-hw.lock, which pins every configuration the model launches.

    Use it with `LIGER_HW_LOCK_FILE=liger-hw.lock` on every rank. `--check FILE` says whether a lock file is intact, and
    where it differs from this machine's choices.
    """
    from .. import registry

    with user_errors("lock", (ValueError, RuntimeError)):
        target = registry.target_named(arguments.device)
    if arguments.check is not None:
        takes = ("command", "device", "check", "json")
        if others := [f"--{name}" for name, value in vars(arguments).items() if value and name not in takes]:
            raise UsageError(f"lock: --check looks at a whole lock file, and takes no {', '.join(others)}")
        return _check(arguments, target)
    if arguments.output is None:
        arguments.output = "liger-hw.lock"
    if not arguments.output:
        raise UsageError("lock: --output is empty; leave it out to write liger-hw.lock")
    if not arguments.model:
        raise UsageError("lock: say what to pin: --model with one or more models")
    if target.vendor == "cpu" and not registry.interpreting():
        raise UsageError("lock: nothing is launched on a CPU; --device names what to pin for, as h200, mi300x or sm90")
    if Path(arguments.output).is_dir():
        raise UsageError(f"lock: {arguments.output} is a folder; -o names the file to write")
    if Path(arguments.output).exists() and not arguments.force:
        raise UsageError(f"lock: {arguments.output} exists; --force overwrites it, -o writes another")
    table, mark = pin("lock", arguments, target, arguments.output)
    kinds = Counter(str(entry.provenance["layer"]) for entry in table.values())
    if arguments.json:
        print(json_text({"file": arguments.output, "digest": mark, "entries": len(table), "layers": kinds}))
        return 0
    came = ", ".join(f"{count} {layer}" for layer, count in sorted(kinds.items()))
    print(fold(f"{arguments.output}: {len(table)} configurations pinned for {target.name} ({came}), digest {mark}"))
    print(fold(f"use it: LIGER_HW_LOCK_FILE={arguments.output}"))
    return 0


def pairs_of(command: str, arguments: argparse.Namespace) -> list[tuple[str, tuple[int, ...]]]:
    """(op, sizes) of all launches of --model at --batch and --seq, for --ops or every op."""
    from .. import registry
    from ..autotune import jobs, models

    with user_errors(command):
        ops = [registry.get_op(name).name for name in arguments.ops or registry.ops()]
        chosen = [models.find(name) for name in arguments.model]
    return jobs.shapes(ops, chosen, arguments.batch or [1], arguments.seq or SEQS, [])


def pin(command: str, arguments: argparse.Namespace, target: Any, output: str | Path) -> tuple[dict, str]:
    """Write a lock file for the launches of a command's models; returns its table and digest."""
    from .. import env, registry
    from ..autotune import jobs, lock

    env.ignore("LIGER_HW_LOCK_FILE")  # a new lock file has what is tuned now, not an older file's entries
    names: dict[tuple[str, tuple], None] = {}
    pairs, screen = pairs_of(command, arguments), StatusLine()
    for number, (op, sizes) in enumerate(pairs):
        screen.progress(number, len(pairs), f"{op}: what it launches")
        try:
            names.update(dict.fromkeys(jobs.launched(op, sizes, arguments.dtype or "bfloat16", target)))
        except Exception as error:
            raise UsageError(f"{command}: {op} at {sizes}: {first_line(error)}") from None
    screen.end()
    if not names:
        raise UsageError(f"{command}: nothing to pin for {target.name}")
    keys = [(registry.get_tunable(name), key) for name, key in names]
    table = {(t.op, t.variant, key): lock.pinned(registry.choose(t, target, key)) for t, key in keys}
    return table, lock.write(output, table, {"device": target.name, "arch": target.arch})


def _made_for(header: dict[str, Any]) -> Any:
    """The Target of the device that a lock file was made for; None if it is not known."""
    from ..backends import VENDORS, backend, known_target

    devices = [known_target(name) for vendor in VENDORS for name in backend(vendor).known_devices()]
    matches = [one for one in devices if one.name == header.get("device")]
    return next(iter(matches + [one for one in devices if one.arch == header.get("arch")]), None)


def _check(arguments: argparse.Namespace, target: Any) -> int:
    from .. import env, registry
    from ..autotune import lock

    env.ignore("LIGER_HW_LOCK_FILE")  # it is compared with this machine's own choices
    try:
        header, table = lock.read(Path(arguments.check))
    except ValueError as error:
        facts = {"file": arguments.check, "error": str(error)}
        print(json_text(facts) if arguments.json else fold(f"{arguments.check}: {error}"))
        return 1
    if target.vendor == "cpu" and arguments.device is None:  # launches nothing: check for the device it was made for
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
    lines += [f"{other} differ from what {target.name} would choose by itself"]
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
        DIR/triton/          its kernels, compiled for the device: Triton's cache, in which the first step looks
        DIR/cache/           entries tuned on this machine for that kind of device, if any

    Needs no GPU, but the image's version of Triton: another one would compile again. Prints the lines for a Dockerfile.
    It has no kernels of Inductor or of other libraries, and none for options that a model sets besides its sizes.
    """
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
    pin("prebuild", arguments, target, folder / "liger-hw.lock")
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

    screen, launches, pairs = StatusLine(), [], pairs_of("prebuild", arguments)
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
