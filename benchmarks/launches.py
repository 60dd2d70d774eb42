"""Whether a change of the code changed what is launched: every benchmarked case, traced on two commits and compared.

    python benchmarks/launches.py write before.json            in the older checkout
    python benchmarks/launches.py write after.json             in the newer one
    python benchmarks/launches.py compare before.json after.json

`write` traces the forward and backward of each case of `benchmarks/sweep.py table` and `many` on a described
device (nothing runs, no GPU is needed) and keeps, for each launch, the grid, the compiler's options and a hash of the
kernel's Triton IR without names and locations. `compare` lists the cases in which any of these differ: those must be
timed again (`compare_commits.py`), all others launch the same code. The options of an op that its shared tests run are
traced too, at its first small size.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import re
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import sweep

from liger_hw import registry
from liger_hw.autotune import compile as ahead
from liger_hw.backends import known_target

_LOCATION = re.compile(r"\s*loc\(.*\)$|^#loc.*$|^\s*loc\(.*$")
_NAMED = re.compile(r'@"?[\w.$]+"?')


_PURE = re.compile(
    r"(%\w+) = ((arith|math)\.|tt\.(splat|expand_dims|broadcast|addptr|make_range|get_program_id|"
    r"get_num_programs|bitcast)\b)"
)


def canonical(text: str) -> str:
    """Triton IR without locations, names and the order of operations that have no effect.

    A pure operation of one line is replaced by a hash of itself and its operands wherever its result is used; what
    reads or writes memory, loops and reductions stay in their order.
    """
    known: dict[str, str] = {}
    kept: list[str] = []
    numbers = itertools.count()  # of values alone: how many pure operations lie between them says nothing

    def named(match: re.Match) -> str:
        name, part = match[1], match[2] or ""
        if name not in known:
            known[name] = f"value{next(numbers)}"
        return known[name] + part

    for line in text.splitlines():
        line = re.sub(r"loc\([^()]*(\([^()]*\))*[^()]*\)", "", _NAMED.sub("@f", _LOCATION.sub("", line))).strip()
        pure = None if line.endswith("{") else _PURE.match(line)
        if pure:
            _, _, operation = line.partition(" = ")
            operation = re.sub(r"(%\w+)(#\d+)?", named, operation)
            known[pure[1]] = hashlib.sha256(operation.encode()).hexdigest()[:16]
        elif line:
            kept.append(re.sub(r"(%\w+)(#\d+)?", named, line))
    return "\n".join(kept)


def ir_hash(launch: ahead.Launch, known: dict) -> str:
    """A hash of the launched kernel's `canonical` Triton IR."""
    key = launch.kernel, launch.args, launch.options
    if key not in known:
        text = ahead.lower(launch.kernel, launch.args, dict(launch.options), capability=90).asm["ttir"]
        known[key] = hashlib.sha256(canonical(text).encode()).hexdigest()[:16]
    return known[key]


def write(path: str, device: str, only: list[str]) -> None:
    target = known_target(device)
    known: dict = {}
    found: dict[str, list] = {}
    names = only or list(registry.ops())
    wanted = [(case.op.name, case.sizes, case.dtype, {}) for case in sweep.cases_of("table", names)]
    for name in names:
        wanted += [(case.op.name, case.sizes, case.dtype, {}) for case in sweep.cases_of("many", [name])]
        op = registry.get_op(name)
        small = (op.small or tuple(op.workloads.values()))[0]
        wanted += [(name, small, dtype, options) for options in op.options for dtype in (torch.float32, torch.bfloat16)]
    for number, (name, sizes, dtype, options) in enumerate(wanted):
        label = f"{name} {'x'.join(map(str, sizes))} {str(dtype)[6:]}" + (f" {options}" if options else "")
        try:
            launches = ahead.trace(name, sizes, dtype, target, options)
        except Exception as error:  # an option that needs a real device is listed, not skipped
            found[label] = [f"{type(error).__name__}: {error}".splitlines()[0][:120]]
            continue
        found[label] = [
            [one.tunable, list(one.grid), [*map(list, one.options)], ir_hash(one, known)] for one in launches
        ]
        if number % 100 == 0:
            print(f"{number} of {len(wanted)}", file=sys.stderr, flush=True)
    with open(path, "w") as file:
        json.dump(found, file, indent=0, default=str)
    print(f"{len(found)} cases, {len(known)} kernels -> {path}")


def compare(before: str, after: str, cases: str | None = None) -> int:
    with open(before) as one, open(after) as other:
        old, new = json.load(one), json.load(other)
    changed = [label for label in new if label in old and new[label] != old[label]]
    for label in changed:
        what = []
        if len(old[label]) != len(new[label]):
            what.append(f"{len(old[label])} launches, now {len(new[label])}")
        for a, b in zip(old[label], new[label]):
            if a != b and isinstance(a, list) and isinstance(b, list):
                parts = ("tunable", "grid", "options", "code")
                what += [
                    f"{b[0]} {part}" + (f" {x} -> {y}" if part != "code" else "")
                    for part, x, y in zip(parts, a, b)
                    if x != y
                ]
            elif a != b:
                what.append(f"{a} -> {b}")
        print(f"{label}: {'; '.join(what)[:300]}")
    if cases:
        with open(cases, "w") as file:
            json.dump([_case(label) for label in changed], file)
    gone, fresh = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    print(
        f"{len(changed)} of {len(new)} cases launch something else; "
        f"{len(gone)} are gone {gone[:5]}, {len(fresh)} are new {fresh[:5]}"
    )
    return bool(changed or gone)


def _case(label: str) -> list:
    """[op, sizes, dtype, options] of a label, as `benchmarks/compare_commits.py` takes them."""
    op, sizes, dtype, *options = label.split(" ", 3)
    text = re.sub(r"torch\.\w+", r"'\g<0>'", options[0]) if options else "{}"  # a dtype, by its name
    return [op, [int(size) for size in sizes.split("x")], dtype, ast.literal_eval(text)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("path")
    writing.add_argument("ops", nargs="*")
    writing.add_argument("--device", default="h200")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before")
    comparing.add_argument("after")
    comparing.add_argument("--json", metavar="FILE", help="write the cases that changed")
    told = parser.parse_args()
    if told.command == "compare":
        return compare(told.before, told.after, told.json)
    write(told.path, told.device, told.ops)
    return 0


if __name__ == "__main__":
    sys.exit(main())
