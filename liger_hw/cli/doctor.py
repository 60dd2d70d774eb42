"""`liger-hw doctor`: whether liger_hw works on this machine, in a minute, and what to paste into a bug report.

Every op runs once, forward and backward, and is compared with its reference in plain torch. Then the speed of a copy in
device memory, the host time of a small launch, the health of the cache and whether it can be written. Without a GPU the
ops run their references, and nothing is timed. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..text import StatusLine, first_line, json_text, labelled
from .arguments import usable_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="torch device (default: the accelerator, else cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    device = usable_device("doctor", arguments.device)
    from .. import compat, registry
    from ..autotune import store
    from ..bench.report import git_commit
    from . import info
    from .cache import health

    began = time.monotonic()
    facts = info.collect()
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
    print(info.as_text(facts))
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
    """op -> why it and its reference disagree, or ""; in bf16 where kernels are launched, else in fp32."""
    import torch

    from .. import registry
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
