"""`info` and `doctor`: facts about this machine, and whether liger_hw works on it."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import sys
import time
from collections import Counter
from importlib import metadata
from typing import Any

from .. import __version__, compat, env, registry
from ..autotune import store
from ..backends import VENDORS, Target, backend, backends
from ..text import StatusLine, first_line, json_text, labelled
from .arguments import usable_device

OTHER_DISTRIBUTIONS = ("transformers", "liger-kernel", "intel-extension-for-pytorch", "accelerate", "peft", "trl")


def info_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    missing = "print only what is missing to run kernels on a GPU of this vendor; exit status 1 if anything is"
    add("--require", choices=[vendor for vendor in VENDORS if vendor != "cpu"], help=missing)


def run_info(arguments: argparse.Namespace) -> int:
    """`liger-hw info`: devices, versions, cache folder and tuned entries of this machine.

    Needs no Triton, transformers or GPU. `--require` says what is missing to run kernels on a vendor's GPU.
    `liger-hw explain OP` says where an op's configuration comes from.
    """
    if arguments.require:
        missing = lacking(arguments.require)
        if arguments.json:
            print(json_text({"require": arguments.require, "missing": missing}, indent=2))
        for line in () if arguments.json else missing:
            print(f"liger-hw info: {line}", file=sys.stderr)
        return 1 if missing else 0
    facts = collect()
    print(json_text(facts, indent=2) if arguments.json else as_text(facts))
    return 0


def lacking(vendor: str) -> list[str]:
    """Why this machine cannot run kernels on a GPU of `vendor`, one line for each reason."""
    triton = triton_facts()
    devices = [device for device in _devices() if device["backend"] == vendor]
    lines = [f"{device['device']} cannot be described: {device['error']}" for device in devices if device["error"]]
    if not devices:
        import torch

        lines.append(f"torch {torch.__version__} sees no {vendor} device")
    if triton["error"]:
        lines.append(f"`import triton` fails: {triton['error']}")
    else:
        compilers, compiler = importlib.import_module("triton.backends").backends, backend(vendor).compiler
        if compiler not in compilers:
            others = ", ".join(sorted(compilers)) or "none"
            lines.append(
                f"triton {triton['version']} has no {compiler} compiler (it has: {others}); "
                f"install the Triton that torch's wheel for {vendor} brings"
            )
    return lines + ([triton["warning"]] if triton["warning"] else [])


def collect() -> dict[str, Any]:
    """The facts that `liger-hw info --json` prints."""
    import torch

    devices = _devices()
    return {
        "liger_hw": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {
            "version": torch.__version__,
            **{name: getattr(torch.version, name, None) for name in _torch_versions()},
        },
        "triton": triton_facts(),
        "packages": {name: _version(name) for name in OTHER_DISTRIBUTIONS},
        "devices": devices,
        "tuned": {device["device"]: _tuned(device) for device in devices if device["target"]},
        "cache": str(store.root()),
        "lock_file": env.LIGER_HW_LOCK_FILE,
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(env.PREFIX)},
        "unknown_environment": {name: env.suggestion(name) for name in env.unknown()},
    }


def triton_facts() -> dict[str, Any]:
    """Distributions that provide `import triton`, its version or error, and a warning if something is wrong.

    torch's wheels require one of several distributions, which overwrite each other's files.
    """
    names = {re.sub("[_.]", "-", name.lower()) for name in metadata.packages_distributions().get("triton", ())}
    providers = [{"name": name, "version": _version(name)} for name in sorted(names)]
    try:
        imported, error = importlib.import_module("triton").__version__, None
    except Exception as problem:  # a broken install can raise more than ImportError
        imported, error = None, f"{type(problem).__name__}: {problem}"
    warning = None
    if len(providers) > 1:
        both = " and ".join(f"{p['name']} {p['version']}" for p in providers)
        warning = (
            f"{both} are installed and overwrite each other's files. Uninstall all of them, "
            "then install only the one your torch wheel asks for (`pip show torch`)."
        )
    elif imported and not providers:
        warning = "triton imports, but no installed distribution provides it (a source tree on PYTHONPATH?)"
    elif imported:
        from ..runtime import triton_import

        try:
            triton_import.require()
        except ImportError as problem:  # an older release than the kernels need
            warning = str(problem)
    elif providers:
        warning = f"{providers[0]['name']} is installed, but `import triton` fails. Reinstall it."
    return {"version": imported, "error": error, "distributions": providers, "warning": warning}


def _torch_versions() -> list[str]:
    """Attributes of `torch.version` that say which vendors torch was built for."""
    return [backend(vendor).torch_version for vendor in VENDORS if vendor != "cpu"]


def _devices() -> list[dict[str, Any]]:
    import torch

    rows = []
    for one in backends():
        on_cpu = one.device_type == "cpu"
        for index in range(1 if on_cpu else torch.get_device_module(one.device_type).device_count()):
            name = one.device_type if on_cpu else f"{one.device_type}:{index}"
            row: dict[str, Any] = {"device": name, "backend": one.vendor, "target": None, "error": None}
            try:
                row["target"] = one.describe(index).to_json()
            except Exception as problem:  # a broken device must not hide the others
                row["error"] = f"{type(problem).__name__}: {problem}"
            rows.append(row)
    return rows


def _tuned(device: dict[str, Any]) -> dict[str, int]:
    """Layer and kind -> number of stored configurations for a device."""
    table = store.read(Target.from_json(device["target"]))
    return Counter(f"{one.kind} ({one.layer})" for entries in table.values() for one in store.answers(entries))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def as_text(facts: dict[str, Any]) -> str:
    """The text of `collect()`."""
    torch, triton = facts["torch"], facts["triton"]
    built = ", ".join(f"{name} {torch[name]}" for name in _torch_versions() if torch[name]) or "cpu only"
    provided = ", ".join(f"{d['name']} {d['version']}" for d in triton["distributions"]) or "not installed"
    lines = [
        ("liger_hw", f"{facts['liger_hw']}, python {facts['python']} on {facts['platform']}"),
        ("torch", f"{torch['version']} ({built})"),
        ("triton", f"{triton['version'] or 'does not import'} (provided by: {provided})"),
    ]
    for device in facts["devices"]:
        lines += _device_lines(device, facts["tuned"].get(device["device"], {}))
    if all(device["backend"] == "cpu" for device in facts["devices"]):
        lines.append(("no GPU", "torch sees no GPU: no kernel is launched, patched models run their original code"))
    lines.append(("cache", facts["cache"]))
    if facts["lock_file"]:
        lines.append(("lock file", facts["lock_file"]))
    packages = [f"{name} {version}" for name, version in facts["packages"].items() if version]
    packages += [] if facts["packages"]["transformers"] else ["no transformers"]
    lines.append(("packages", ", ".join(packages)))
    lines += [("environment", f"{name}={value}") for name, value in facts["environment"].items()]
    warnings = [triton["warning"]] if triton["warning"] else []
    for name, hint in facts["unknown_environment"].items():
        warnings.append(f"{name} is set, but liger_hw knows no such variable{hint}")
    lines += [("WARNING", warning) for warning in warnings]
    return "\n".join(labelled(*line) for line in lines)


def _device_lines(device: dict[str, Any], tuned: dict[str, int]) -> list[tuple[str, str]]:
    target = device["target"]
    if target is None:
        return [(device["device"], f"cannot be described: {device['error']}")]
    if device["backend"] == "cpu":
        return [("cpu", "torch's reference path; kernels only in Triton's interpreter")]
    stored = ", ".join(f"{count} {name}" for name, count in tuned.items()) or "nothing"
    return [
        (
            device["device"],
            f"{target['name']} ({target['arch']}), backend {device['backend']}, {target['multiprocessors']} "
            f"multiprocessors, warp {target['warp_size']}, {target['max_threads']} threads and "
            f"{target['shared_memory'] // 1024} KiB shared memory a block",
        ),
        ("  tuned", f"{stored}; any other key takes its op's heuristic"),
    ]


# -- doctor ------------------------------------------------------------------------------------------------------------


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="torch device (default: the accelerator, else cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    """`liger-hw doctor`: whether liger_hw works on this machine, and the text for a bug report, in a minute.

    Runs every op once, forward and backward, and compares it with its reference in plain torch. Times a copy in device
    memory and the host's part of a small launch. Checks that the cache is intact and writable. Without a GPU the ops
    run their references, and nothing is timed. Exit code 1 if anything is wrong.
    """
    device = usable_device(arguments.device)
    from ..bench.report import git_commit
    from .cache import health

    began = time.monotonic()
    facts = collect()
    ops = _check_ops(device)
    timings = _timings(device) if device.type != "cpu" else {}
    problems = [f"{name}: {reason}" for name, reason in ops.items() if reason]
    agreeing = len(ops) - len(problems)
    unusable = [unwritable] if (unwritable := store.unwritable()) else []
    try:
        stored_files = store.device_files()
    except OSError as error:
        stored_files = []
        unusable.append(f"the cache cannot be read: {first_line(error)}")
    stored, shipped, broken, outdated = health(stored_files)
    problems += [*broken, *filter(None, [facts["triton"]["warning"]]), *unusable]
    seconds, commit, shim = round(time.monotonic() - began, 1), git_commit(), compat.use()
    if arguments.json:
        more = {"commit": commit, "shim": shim, "device": str(device), "ops": ops, **timings}
        more |= {"cache": {"entries": stored, "shipped": shipped}, "problems": problems, "seconds": seconds}
        print(json_text({**facts, **more}, indent=1))
        return 1 if problems else 0
    runs = "kernels" if device.type != "cpu" or registry.interpreting() else "references: no GPU, no kernel is launched"
    unused = f"; {len(outdated)} of them are out of date and not used" if outdated else ""
    print("Paste this into a bug report, between two lines of three backticks:\n")
    print(as_text(facts))
    print(labelled("commit", commit or "not a checkout"))
    print(labelled("shim", shim))
    print(labelled("ops", f"{agreeing} of {len(ops)} agree with their reference on {device}, as {runs}"))
    for name, value in timings.items():
        print(labelled(name, value))
    print(labelled("cache", f"{stored} entries of your own and {shipped} shipped ones checked{unused}"))
    print(labelled("took", f"{seconds} s"))
    for problem in problems:
        print(labelled("PROBLEM", problem))
    print("\n" + ("all is well" if not problems else f"{len(problems)} problems"))
    return 1 if problems else 0


def _check_ops(device: Any) -> dict[str, str]:
    """op -> why it disagrees with its reference, or ""; in bf16 on a GPU, in fp32 on a CPU."""
    import torch

    from ..autotune.check import against_reference

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    reasons, screen = {}, StatusLine()
    for number, op in enumerate(registry.ops().values()):
        screen.progress(number, len(registry.ops()), op.name)
        try:
            reasons[op.name] = against_reference(op, op.small_sizes, dtype, device)
        except Exception as error:
            reasons[op.name] = first_line(error)
    screen.end()
    return reasons


def _timings(device: Any) -> dict[str, str]:
    import torch

    from ..bench import timing
    from ..transformers.functional import liger_rms_norm

    x, w = torch.ones(16, 128, device=device), torch.ones(128, device=device)
    with timing.Meter(device) as meter, torch.no_grad():
        each = meter.host_us(lambda: liger_rms_norm(x, w, 1e-6), calls=1000, blocks=3)
        copied = meter.copy_rate()
    return {"bandwidth": f"{copied:.0f} GB/s in a copy", "launch": f"{each:.1f} us of host time for a small rms_norm"}
