"""`liger-hw info`: what this machine is and how liger_hw runs on it. Needs no Triton, no transformers, no GPU.

liger-hw info            device, Triton, backend, cache folder, what is tuned
liger-hw info --all      where every op's configuration comes from too
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections import Counter
from importlib import metadata
from typing import Any

from .. import __version__
from ..text import StatusLine, fold, json_text, table
from .arguments import dtype_name, torch_dtype

# Distributions that install the import name `triton`. torch's vendor wheels ask for one of these, and each was renamed
# at least once; two of them in one environment overwrite each other's files.
TRITON_DISTRIBUTIONS = (
    "triton",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "triton-rocm",
    "pytorch-triton-xpu",
    "triton-xpu",
    "triton-windows",
)
VENDORS = {"cuda": "nvidia", "rocm": "amd", "xpu": "intel"}
"""Vendor -> what Triton calls its compiler."""
OTHER_DISTRIBUTIONS = ("transformers", "liger-kernel", "intel-extension-for-pytorch", "accelerate", "peft", "trl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--all", action="store_true", help="where every op's configuration comes from, too")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="of the ops of --all (default bf16)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every workload of every op")
    parser.add_argument(
        "--require",
        choices=VENDORS,
        help="print nothing but what is missing to run kernels on such a GPU; exit status 1 if anything",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.require:
        missing = lacking(arguments.require)
        if arguments.json:
            print(json_text({"require": arguments.require, "missing": missing}, indent=2))
        for line in () if arguments.json else missing:
            print(f"liger-hw info: {line}", file=sys.stderr)
        return 1 if missing else 0
    facts = collect(arguments.dtype, ops=arguments.all or arguments.json)
    print(json_text(facts, indent=2) if arguments.json else as_text(facts))
    return 0


def lacking(vendor: str) -> list[str]:
    """What keeps this machine from running kernels on a GPU of `vendor`, a line each; empty when nothing does."""
    triton = triton_facts()
    devices = [device for device in _devices() if device["backend"] == vendor]
    lines = [f"{device['device']} cannot be described: {device['error']}" for device in devices if device["error"]]
    if not devices:
        import torch

        lines.append(f"torch {torch.__version__} sees no {vendor} device")
    if triton["error"]:
        lines.append(f"`import triton` fails: {triton['error']}")
    else:
        compilers = importlib.import_module("triton.backends").backends
        if VENDORS[vendor] not in compilers:
            has = ", ".join(sorted(compilers)) or "none"
            lines.append(
                f"triton {triton['version']} has no {VENDORS[vendor]} compiler (it has: {has}); "
                f"install the Triton that torch's wheel for {vendor} brings"
            )
    return lines + ([triton["warning"]] if triton["warning"] else [])


def collect(dtype: str = "bfloat16", ops: bool = True) -> dict[str, Any]:
    """Everything `liger-hw info --json` prints; without `ops`, what takes no time to find."""
    import torch

    from .. import env
    from ..autotune import store

    devices = _devices()
    return {
        "liger_hw": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "xpu": getattr(torch.version, "xpu", None),
        },
        "triton": triton_facts(),
        "packages": {name: _version(name) for name in OTHER_DISTRIBUTIONS},
        "devices": devices,
        "dtype": dtype,
        "tuned": {device["device"]: _tuned(device) for device in devices if device["target"]},
        "cache": str(store.root()),
        "lock_file": env.get("LIGER_HW_LOCK_FILE"),
        "ops": _ops(devices, dtype) if ops else None,
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(env.PREFIX)},
        "unknown_environment": {name: env.suggestion(name) for name in env.unknown()},
    }


def triton_facts() -> dict[str, Any]:
    """Which distributions provide `import triton`, whether it imports, and what is wrong with that, if anything."""
    names = {
        name.lower().replace("_", "-").replace(".", "-") for name in metadata.packages_distributions().get("triton", ())
    }
    names.update(name for name in TRITON_DISTRIBUTIONS if _version(name) is not None)
    providers = [{"name": name, "version": _version(name)} for name in sorted(names)]
    try:
        imported, error = importlib.import_module("triton").__version__, None
    except Exception as problem:  # a clobbered install fails in more ways than ImportError
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
    elif not imported and providers:
        warning = f"{providers[0]['name']} is installed, but `import triton` fails. Reinstall it."
    return {"version": imported, "error": error, "distributions": providers, "warning": warning}


def _devices() -> list[dict[str, Any]]:
    import torch

    from ..backends import backends

    found = []
    for backend in backends():
        count = 1 if backend.device_type == "cpu" else getattr(torch, backend.device_type).device_count()
        for index in range(count):
            name = backend.device_type if backend.device_type == "cpu" else f"{backend.device_type}:{index}"
            row: dict[str, Any] = {"device": name, "backend": backend.vendor, "target": None, "error": None}
            try:
                row["target"] = backend.describe(index).to_json()
            except Exception as problem:  # one broken device must not hide the others
                row["error"] = f"{type(problem).__name__}: {problem}"
            found.append(row)
    return found


def _tuned(device: dict[str, Any]) -> dict[str, int]:
    """Layer and kind -> stored configurations that a device answers from."""
    from ..autotune import store
    from ..backends import Target

    layers = store.layers(Target.from_json(device["target"]))
    return Counter(f"{one.provenance['kind']} ({layer})" for layer, entries in layers for one in entries.values())


def _ops(devices: list[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    from .. import registry

    rows, screen = [], StatusLine()
    for number, op in enumerate(registry.ops().values()):
        screen.progress(number, len(registry.ops()), op.name)
        for device in devices:
            if device["target"] is None:
                continue
            for workload, sizes in op.workloads.items():
                for one in registry.explain(op.name, sizes, torch_dtype(dtype), device["device"]):
                    rows.append(
                        {
                            "op": op.name,
                            "tunable": one.tunable,
                            "device": device["device"],
                            "runs": "reference"
                            if device["backend"] == "cpu" and not registry.interpreting()
                            else "kernel",
                            "workload": workload,
                            "shape": list(sizes),
                            "key": list(one.key),
                            "layer": one.chosen.layer,
                            "provenance": dict(one.chosen.provenance),
                            "config": one.chosen.config.to_json(),
                        }
                    )
    screen.end()
    return rows


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def as_text(facts: dict[str, Any]) -> str:
    """The human form of `collect()`; of `ops` one row an op and device, at the op's first workload."""
    torch, triton = facts["torch"], facts["triton"]
    built = ", ".join(f"{k} {torch[k]}" for k in ("cuda", "hip", "xpu") if torch[k]) or "cpu only"
    provided = ", ".join(f"{d['name']} {d['version']}" for d in triton["distributions"]) or "not installed"
    lines = [
        f"liger_hw      {facts['liger_hw']}, python {facts['python']} on {facts['platform']}",
        f"torch         {torch['version']} ({built})",
        f"triton        {triton['version'] or 'does not import'} (provided by: {provided})",
    ]
    for device in facts["devices"]:
        lines += _device_lines(device, facts["tuned"].get(device["device"], {}))
    if all(device["backend"] == "cpu" for device in facts["devices"]):
        lines.append("no GPU        torch sees none: no kernel is launched, patched models run their own code")
    lines.append(f"cache         {facts['cache']}")
    if facts["lock_file"]:
        lines.append(f"lock file     {facts['lock_file']}")
    packages = [f"{name} {found}" for name, found in facts["packages"].items() if found]
    packages += [] if facts["packages"]["transformers"] else ["no transformers"]
    lines.append(f"packages      {', '.join(packages)}")
    lines += [f"environment   {name}={value}" for name, value in facts["environment"].items()]
    lines += [f"WARNING       {triton['warning']}"] if triton["warning"] else []
    for name, hint in facts["unknown_environment"].items():
        lines.append(f"WARNING       {name} is set, but liger_hw knows no such variable{hint}")
    text = fold("\n".join(lines), " " * 14)
    return text if facts["ops"] is None else "\n".join([text, "", *_op_lines(facts)])


def _device_lines(device: dict[str, Any], tuned: dict[str, int]) -> list[str]:
    target = device["target"]
    if target is None:
        return [f"{device['device']:<13} cannot be described: {device['error']}"]
    if device["backend"] == "cpu":
        return ["cpu           torch's reference path; kernels only in Triton's interpreter"]
    stored = ", ".join(f"{count} {name}" for name, count in tuned.items()) or "nothing"
    return [
        f"{device['device']:<13} {target['name']} ({target['arch']}), backend {device['backend']}, "
        f"{target['multiprocessors']} multiprocessors, warp {target['warp_size']}, "
        f"{target['max_threads']} threads and {target['shared_memory'] // 1024} KiB shared memory a block",
        f"  tuned       {stored}; any other key takes its op's heuristic",
    ]


def _op_lines(facts: dict[str, Any]) -> list[str]:
    rows = [("op", "device", "runs", "at", "config from", "provenance")]
    seen = set()
    for row in facts["ops"]:
        place = row["tunable"], row["device"]
        if place in seen:
            continue
        seen.add(place)
        provenance = row["provenance"]
        kind = " ".join(str(provenance[k]) for k in ("kind", "date") if k in provenance)
        at = f"{row['workload']} {'x'.join(map(str, row['shape']))}"
        rows.append((row["tunable"], row["device"], row["runs"], at, row["layer"], kind))
    return [f"ops at {facts['dtype']}", table(rows, indent="  ") if len(rows) > 1 else "  none"]
