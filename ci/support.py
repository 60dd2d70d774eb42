"""The support matrix, docs/support.md, from evidence; nothing in it is typed by hand.

`bash ci/evidence.sh` does all of it:

    python ci/certificates.py FOLDER; python ci/support.py compiled FOLDER/compiled-3.7.1.json
    TRITON_INTERPRET=1 pytest -m interpret tests/kernels/test_conformance.py --junitxml run.xml
    python ci/support.py interpreted run.xml
    python ci/support.py measured ci-out/bench.json    keep what `liger-hw bench --json` printed; write the page
    python ci/support.py            write the page
    python ci/support.py --check    say whether it is current
    python ci/support.py --stale    ops whose source is not what was interpreted, as an expression for pytest's -k
    python ci/support.py --stale 3.7.1 quick sm90,pvc
                                    ops that this release did not compile as they are, to this depth, for these

`compiled` (which also takes what `liger-hw compile --json` printed) and `interpreted` keep what the page needs of a run
in ci/evidence/; a run of some ops replaces what is kept of those. What was measured is read from benchmarks/results/,
where `liger-hw bench` leaves it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]
EVIDENCE = ROOT / "ci" / "evidence"
PAGE = ROOT / "docs" / "support.md"
DEPTHS = ("quick", "deep", "full")
"""Of liger_hw/autotune/compile.py, which needs torch."""
STATES = {
    "measured": ("**M**", "timed on such a device, results checked there"),
    "compile-proven": (
        "C",
        "what is launched, to the depth given below, compiles with the stock Triton and keeps the device's limits",
    ),
    "modelled": (
        "m",
        "no compiler for it here: checked to Triton's own IR, configurations from facts and legality rules",
    ),
    "interpreted": ("i", "the real kernels in Triton's interpreter, with that device's configurations, against fp64"),
    "failed": ("**!**", "compiled or interpreted with failures; see below"),
}
"""State -> its sign in the table and what it means, best first."""


def condense_compiled(document: dict[str, Any]) -> dict[str, Any]:
    """What `ci/certificates.py` or `liger-hw compile --json` left -> counts of distinct kernels by op and architecture.

    An op of which kernels were left on an architecture has no count there, and one of which a run compiled only what
    other ops launch of it has none at all.
    """
    if document.get("kind") != "certificates":
        raise ValueError("no certificates: neither of ci/certificates.py nor of `liger-hw compile --json`")
    left = {(op, target) for op, target, _ in document.get("left", ())}
    asked = set(document.get("ops") or (one["op"] for one in document["certificates"]))
    counts: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    failures: dict[str, list[str]] = defaultdict(list)
    seen = set()
    for one in document["certificates"]:
        what = [one[k] for k in ("op", "target", "tunable", "kernel", "config", "resources", "error")]
        same = one.get("id") or json.dumps(what)
        if same in seen or (one["op"], one["target"]) in left or one["op"] not in asked:
            continue
        seen.add(same)
        fresh = {"kernels": 0, "failed": 0, "spilling": 0, "worst": 0, "level": one.get("level", "binary")}
        found = counts[one["op"]].setdefault(one["target"], fresh)
        found["kernels"] += 1
        if wrong := one["error"] or one["illegal"]:
            found["failed"] += 1
            case = " ".join(str(one.get(k, "")) for k in ("target", "tunable", "key", "dtype", "options", "layer"))
            failures[one["op"]].append(f"{case}: {wrong.splitlines()[0][:160]}")
        spills = (one["resources"] or {}).get("spills", 0)
        found["spilling"] += spills > 0
        found["worst"] = max(found["worst"], spills)
    sources = document.get("sources", {})
    about = {
        op: {"date": document["date"][:10], "depth": document["depth"], "source": sources.get(op) or source_of(op)}
        | ({"failures": sorted(failures[op])} if op in failures else {})
        for op in sorted(counts)
    }
    ops = {op: dict(sorted(archs.items())) for op, archs in sorted(counts.items())}
    return {"triton": document["triton"], "about": about, "ops": ops}


def merged_compiled(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one release's runs, with what a new one compiled replaced.

    An op's architectures stand beside those of an earlier run only when both compiled the same source to the same
    depth; a shallower run of the same source without a failure adds nothing to a deeper one.
    """
    about, ops = dict(before["about"]), dict(before["ops"])
    for op, facts in now["about"].items():
        was, archs = about.get(op, {}), now["ops"][op]
        deeper = was.get("source") == facts["source"] and DEPTHS.index(was["depth"]) > DEPTHS.index(facts["depth"])
        if deeper and "failures" not in facts and set(archs) <= set(ops[op]):
            continue
        if was.get("source") == facts["source"] and was["depth"] != facts["depth"] and not set(ops[op]) <= set(archs):
            continue  # of fewer architectures than are kept: they wait until the deeper run has them all
        if all(was.get(name) == facts[name] for name in ("depth", "source")):
            archs = dict(sorted({**ops[op], **archs}.items()))
            kept = [one for one in was.get("failures", ()) if one.split()[0] not in now["ops"][op]]
            if failures := sorted([*kept, *facts.get("failures", ())]):
                facts = {**facts, "failures": failures}
        about[op], ops[op] = facts, archs
    return {"triton": now["triton"], "about": dict(sorted(about.items())), "ops": dict(sorted(ops.items()))}


def condense_interpreted(root: xml.Element) -> dict[str, Any]:
    """A junit file of the conformance tests, which record their op and architecture -> tests and failures of each."""
    counts: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    dates = []
    for suite in root.iter("testsuite"):
        dates.append(suite.get("timestamp", ""))
        for case in suite.iter("testcase"):
            facts = {p.get("name"): p.get("value") for p in case.iter("property")}
            if "op" not in facts or "arch" not in facts:
                continue
            found = counts[facts["op"]].setdefault(facts["arch"], {"tests": 0, "failed": 0})
            found["tests"] += 1
            found["failed"] += any(case.find(kind) is not None for kind in ("failure", "error"))
    if not counts:
        raise ValueError("no test in this file recorded an op and an architecture")
    facts = {"date": max(dates)[:10]}
    about = {op: {**facts, "source": source_of(op)} for op in sorted(counts)}
    return {"about": about, "ops": {op: dict(sorted(archs.items())) for op, archs in sorted(counts.items())}}


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What is kept of interpreter runs, with the ops of a new one replaced."""
    return {part: dict(sorted({**before.get(part, {}), **now[part]}.items())) for part in ("about", "ops")}


def source_of(op: str) -> str:
    """Hash of the code of an op's kernels (`ci/kernel_digests.py`); empty for an op that is gone."""
    from liger_hw import registry

    entry = registry.ops().get(op)
    if entry is None:
        return ""
    from kernel_digests import digest

    hashes = {tunable.name: digest(tunable.kernels) for tunable in entry.tunables}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


def stale() -> list[str]:
    """Ops in evidence whose source has changed since they were interpreted, and those that never were."""
    about = json.loads((EVIDENCE / "interpreted.json").read_text()).get("about", {})
    compiled = json.loads(_compiled()[-1].read_text())["ops"]
    return [op for op in compiled if (now := source_of(op)) and about.get(op, {}).get("source") != now]


def stale_compiled(ops: list[str], version: str, depth: str, targets: list[str]) -> list[str]:
    """Ops of which a release has not compiled the source as it is to this depth for all of these architectures.

    What the shipped tables choose may have changed all the same: lane aot compiles their entries.
    """
    path = EVIDENCE / f"compiled-{version}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"about": {}, "ops": {}}
    found = []
    for op in ops:
        facts = kept["about"].get(op, {})
        deep = facts and DEPTHS.index(facts["depth"]) >= DEPTHS.index(depth)
        if not (deep and facts["source"] == source_of(op) and set(targets) <= set(kept["ops"][op])):
            found.append(op)
    return found


def _compiled() -> list[Path]:
    """Kept runs of compilers, oldest release first."""
    return sorted(
        EVIDENCE.glob("compiled-*.json"), key=lambda path: [int(n) for n in path.stem.split("-")[1].split(".")]
    )


def measured() -> dict[str, dict[str, dict[str, str]]]:
    """op -> architecture -> device, date and versions of the newest result in benchmarks/results/ that has it."""
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        document = json.loads(path.read_text())
        if not isinstance(document, dict):
            continue
        runs = document.get("runs")  # a file holds one run, or a list of several with what each was for
        for run in (document, *(runs if isinstance(runs, list) else ())):
            if isinstance(run, dict):
                _add_measured(found, run, path.name)
    return found


def _add_measured(found: dict[str, dict[str, dict[str, str]]], run: dict[str, Any], name: str) -> None:
    machine = run.get("machine")
    if not isinstance(machine, dict) or "arch" not in machine or machine.get("device_type") == "cpu":
        return
    facts = {key: str(machine[key]) for key in ("device", "torch", "triton")}
    facts |= {"date": machine["date"][:10], "file": name}
    for row in run.get("rows", ()):
        if row.get("arm") == "liger_hw" and row.get("status") == "ok" and "error_out" in row:
            before = found[row["op"]].get(machine["arch"])
            if before is None or before["date"] <= facts["date"]:
                found[row["op"]][machine["arch"]] = facts


def page() -> str:
    compiled = [json.loads(path.read_text()) for path in _compiled()]
    interpreted = json.loads((EVIDENCE / "interpreted.json").read_text())
    timed = measured()
    pinned = _pinned()
    newest = next(one for one in compiled if one["triton"] == pinned)
    archs = sorted(
        {arch for found in newest["ops"].values() for arch in found}
        | {a for f in interpreted["ops"].values() for a in f}
    )
    lines = [
        "# Support, from evidence",
        "",
        "For users who want to know what is proven for their GPU.",
        "",
        "Written by `python ci/support.py`, which reads `benchmarks/results/` and `ci/evidence/`; do not edit.",
        "",
        *(f"- {sign} *{name}*: {meaning}" for name, (sign, meaning) in STATES.items()),
        "",
        "A sign is the best that was shown of an op on an architecture; each includes nothing above it. We own no "
        "AMD or Intel",
        "GPU: nothing there was ever run. The last section names the command that closes each gap.",
        "",
        "| op | " + " | ".join(archs) + " |",
        "|---|" + "---|" * len(archs),
    ]
    for op in sorted(newest["ops"]):
        cells = [STATES[state][0] if (state := _state(op, arch, timed, newest, interpreted)) else "" for arch in archs]
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    lines += ["", f"## By architecture, Triton {pinned}", "", *_by_arch(archs, newest, interpreted)]
    for one in [newest, *(one for one in compiled if _goes_deeper(one, newest))]:
        lines += ["", f"## Kernels compiled of each op, Triton {one['triton']}", "", *_by_op(archs, one)]
    lines += ["", "## What the signs rest on", ""]
    lines += [line for one in compiled for line in _compiler_runs(one)]
    days = sorted({one["date"] for one in interpreted["about"].values()})
    days = [days[0], days[-1]][: len(days)]
    tests = [c for found in interpreted["ops"].values() for c in found.values()]
    lines.append(
        f"- interpreted, {' to '.join(days)}: {sum(c['tests'] for c in tests)} tests, "
        f"{sum(c['failed'] for c in tests)} failed"
    )
    devices = sorted(
        {(f["device"], f["torch"], f["triton"], f["date"], f["file"]) for by in timed.values() for f in by.values()}
    )
    lines += [f"- measured on {d}, torch {t}, Triton {v}, {date}: `{file}`" for d, t, v, date, file in devices]
    lines += ["", f"Spills, with Triton {pinned} (kernels that spill, most registers):", ""]
    spilling = [
        f"- {op} on {arch}: {c['spilling']} of {c['kernels']}, at most {c['worst']}"
        for op, found in newest["ops"].items()
        for arch, c in found.items()
        if c["spilling"] and c["level"] == "binary"
    ]
    failing = [f"- **{op}: {what}**" for op, facts in newest["about"].items() for what in facts.get("failures", ())]
    others = [
        f"- Triton {one['triton']}, {op}: {what}"
        for one in compiled
        if one is not newest
        for op, facts in one["about"].items()
        for what in facts.get("failures", ())
    ]
    if others:
        others = ["", "What other releases of Triton do not compile, or not within the device's limits:", "", *others]
    if failing:
        failing = ["", f"What Triton {pinned} does not compile, or not within the device's limits:", "", *failing]
    found = [*lines, *(spilling or ["- none"]), *failing, *others]
    return (
        "\n".join(
            [
                *found,
                "",
                "## What remains unproven, and the command that shows it",
                "",
                *_unproven(archs, timed, newest),
            ]
        )
        + "\n"
    )


def _unproven(archs: list[str], timed: dict, compiled: dict) -> list[str]:
    """A table: for each architecture what nobody has shown, and the command that does on a machine with that device."""
    from liger_hw.backends import known_target

    lines = [
        "Run on such a machine, from a clone; it installs, tests, tunes, benchmarks, and leaves `ci-out/`. `python "
        "ci/support.py",
        "measured ci-out/bench-tuned.json` then puts the timings here, and `ci-out/table.json` is the tuned table "
        "(ci/README.md).",
        "",
        "| architecture | such as | not shown | command |",
        "|---|---|---|---|",
    ]
    index = {Path(lane["script"]).stem: lane.get("index") for lane in _vendor_lanes()}
    everything = "that the driver runs it, results on the device, speed; its table holds a model's choices"
    for arch in archs:
        target = known_target(arch)
        short = any(one[arch]["level"] == "ttir" for one in compiled["ops"].values() if arch in one)
        some = [op for op in compiled["ops"] if arch in timed.get(op, {})]
        left = [op for op in compiled["ops"] if op not in some]
        missing = everything if not some else f"speed of {', '.join(left)}" if left else ""
        if missing:
            missing = f"that Intel's compiler takes it, registers, spills; {missing}" if short else missing
            place = f"INDEX={index[target.vendor]} " if index.get(target.vendor) else ""
            command = f"{place}bash ci/{target.vendor}.sh" if not some else f"liger-hw bench {' '.join(left)} --json"
            lines.append(f"| {arch} | {target.name} | {missing} | `{command}` |")
    if shallow := [op for op, facts in compiled["about"].items() if facts["depth"] != "full"]:
        what = "all ops" if len(shallow) == len(compiled["about"]) else ", ".join(shallow)
        lines += [
            "",
            f"`DEPTH=full bash ci/evidence.sh` compiles, anywhere, with the pinned Triton further workloads and "
            f"options of {what}.",
        ]
    return lines


def _vendor_lanes() -> list[dict[str, Any]]:
    import yaml

    return yaml.safe_load((ROOT / "ci" / "matrix.yaml").read_text())["vendors"]


def keep_measured(path: Path) -> Path:
    """What `liger-hw bench --json` left on a device -> benchmarks/results/ops-DEVICE.json."""
    document = json.loads(path.read_text())
    machine = document.get("machine", {}) if isinstance(document, dict) else {}
    if "arch" not in machine or not document.get("rows"):
        raise ValueError(f"{path}: not what `liger-hw bench --json` prints")
    if machine.get("device_type") == "cpu":
        raise ValueError(f"{path}: timed on a CPU")
    kept = ROOT / "benchmarks" / "results" / f"ops-{machine['arch']}.json"
    kept.write_text(json.dumps(document, indent=1) + "\n")
    return kept


def _compiler_runs(one: dict[str, Any]) -> list[str]:
    """One line for each depth that a release's kernels were compiled to."""
    lines = []
    for depth in sorted({facts["depth"] for facts in one["about"].values()}):
        ops = [op for op, facts in one["about"].items() if facts["depth"] == depth]
        days = sorted({one["about"][op]["date"] for op in ops})
        built = [c for op in ops for c in one["ops"][op].values()]
        kernels, failed = (sum(c[key] for c in built) for key in ("kernels", "failed"))
        spilling = sum(c["spilling"] for c in built if c["level"] == "binary")
        short = sum(c["kernels"] for c in built if c["level"] == "ttir")
        on = {arch for op in ops for arch in one["ops"][op]}
        lines.append(
            f"- compiled with Triton {one['triton']}, {' to '.join(sorted({days[0], days[-1]}))}, depth {depth} "
            f"(docs/vendors.md): "
            f"{kernels} distinct kernels of {len(ops)} ops for {len(on)} architectures, {short} of them to TTIR only; "
            f"{failed} failed or illegal, {spilling} with spills"
        )
    return lines


def _by_arch(archs: list[str], compiled: dict, interpreted: dict) -> list[str]:
    """A table: what was compiled and interpreted for each architecture, over all ops."""
    lines = [
        "| architecture | kernels compiled | to | failed or illegal | with spills | interpreter tests |",
        "|---|---|---|---|---|---|",
    ]
    for arch in archs:
        built = [found[arch] for found in compiled["ops"].values() if arch in found]
        run = sum(found[arch]["tests"] for found in interpreted["ops"].values() if arch in found)
        level = ", ".join(sorted({one["level"] for one in built})).replace("ttir", "TTIR")
        binary = [one for one in built if one["level"] == "binary"]  # spills counted from TTIR are an estimate
        spilling = str(sum(one["spilling"] for one in binary)) if binary else "-"
        counts = (sum(one[key] for one in built) for key in ("kernels", "failed"))
        kernels, failed = map(str, counts)
        lines.append(f"| {arch} | {kernels} | {level} | {failed} | {spilling} | {run or ''} |")
    return lines


def _goes_deeper(one: dict, than: dict) -> bool:
    """Whether a release compiled some op deeper than another did."""
    before = {op: DEPTHS.index(facts["depth"]) for op, facts in than["about"].items()}
    return any(DEPTHS.index(facts["depth"]) > before.get(op, -1) for op, facts in one["about"].items())


def _by_op(archs: list[str], compiled: dict) -> list[str]:
    """A table of distinct kernels, with how many spill and how many failed."""
    lines = [
        "Distinct kernels, all compiled and within the device's limits unless said; `s`: how many of them spill "
        "registers (not",
        "told of Intel's, which end at TTIR); **f**: how many failed or are illegal.",
        "",
        "| op | depth | " + " | ".join(archs) + " |",
        "|---|---|" + "---|" * len(archs),
    ]
    for op, facts in compiled["about"].items():
        cells = []
        for arch in archs:
            one = compiled["ops"][op].get(arch)
            spilling = f" {one['spilling']}s" if one and one["spilling"] and one["level"] == "binary" else ""
            failed = f" **{one['failed']}f**" if one and one["failed"] else ""
            cells.append(f"{one['kernels']}{spilling}{failed}" if one else "")
        lines.append(f"| {op} | {facts['depth']} | " + " | ".join(cells) + " |")
    return lines


def _pinned() -> str:
    """The Triton that ci/constraints.txt pins: the signs are of its run."""
    lines = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    return next(line.removeprefix("triton==") for line in lines if line.startswith("triton=="))


def _state(op: str, arch: str, timed: dict, compiled: dict, interpreted: dict) -> str | None:
    built, run = compiled["ops"].get(op, {}).get(arch), interpreted["ops"].get(op, {}).get(arch)
    if (built and built["failed"]) or (run and run["failed"]):
        return "failed"
    if arch in timed.get(op, {}):
        return "measured"
    if built:
        return "modelled" if built["level"] == "ttir" else "compile-proven"
    return "interpreted" if run else None


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] in ("compiled", "interpreted"):
        path = Path(arguments[1])
        if arguments[0] == "compiled":
            kept = condense_compiled(json.loads(path.read_text()))
            name = f"compiled-{kept['triton']}.json"
            if (EVIDENCE / name).exists():
                kept = merged_compiled(json.loads((EVIDENCE / name).read_text()), kept)
        else:
            kept, name = condense_interpreted(xml.parse(path).getroot()), "interpreted.json"
            if (EVIDENCE / name).exists():
                kept = merged(json.loads((EVIDENCE / name).read_text()), kept)
        EVIDENCE.mkdir(exist_ok=True)
        (EVIDENCE / name).write_text(json.dumps(kept, indent=1) + "\n")
        return 0
    if len(arguments) == 2 and arguments[0] == "measured":
        print(keep_measured(Path(arguments[1])))
        arguments = []
    if arguments == ["--check"]:
        current = PAGE.is_file() and PAGE.read_text() == page()
        if not current:
            print("docs/support.md is not what the evidence says; run: python ci/support.py")
        return 0 if current else 1
    if arguments == ["--stale"]:
        print(" or ".join(stale()))
        return 0
    if len(arguments) == 4 and arguments[0] == "--stale":
        from liger_hw import registry
        from liger_hw.cli.launches import _targets

        targets = [target.arch for target in _targets(arguments[3])]
        print(",".join(stale_compiled(list(registry.ops()), arguments[1], arguments[2], targets)))
        return 0
    if arguments:
        print(__doc__)
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
