"""Every script of benchmarks/ starts: it is run between measurements on machines that are lent by the minute."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FILES = sorted(path.name for path in BENCHMARKS.glob("*.py"))

ALL_OF_THEM = """
import contextlib, io, runpy, sys
folder, *names = sys.argv[1:]
for name in names:
    sys.path[0], sys.argv = folder, [name, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(f"{folder}/{name}", run_name="__main__")
        end = "ran"
    except SystemExit as stop:
        end = f"status {stop.code or 0}"
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    text = said.getvalue()
    print(name, end, "usage" if text.startswith("usage: " + name) else text[:80].encode(), sep="\t", flush=True)
"""


def test_every_script_says_how_it_is_used():
    """In one process, since most of the time of each is the import of torch. A file without arguments is a module of
    the others, and does nothing."""
    for needed in ("triton", "transformers", "matplotlib"):
        pytest.importorskip(needed)
    out = python("-W", "ignore", "-c", ALL_OF_THEM, BENCHMARKS, *FILES, cwd=BENCHMARKS.parent)
    ends = {name: tuple(end) for name, *end in (line.split("\t") for line in out.splitlines())}
    scripts = {name for name in FILES if "argparse" in (BENCHMARKS / name).read_text()}
    assert len(scripts) > 20
    assert ends == {name: ("status 0", "usage") if name in scripts else ("ran", "b''") for name in FILES}


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_are_well_formed(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_host_times_are_compared_by_the_undisturbed_samples():
    """Two arms that take the same time, of which one is disturbed in two samples of three and in one process always."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from compare_commits import compared_on_the_host
    finally:
        sys.path.remove(str(BENCHMARKS))
    quiet = [0.100 + 0.0001 * (i % 7) for i in range(90)]
    disturbed = [time if i % 3 == 0 else 3 * time for i, time in enumerate(quiet)]
    found = compared_on_the_host([quiet] * 3, [disturbed, disturbed, [2 * time for time in quiet]])
    assert abs(found["ratio"] - 1) < 0.01 and found["noise"] > 0.9
    found = compared_on_the_host([quiet] * 3, [[1.05 * time for time in disturbed]] * 3)
    assert abs(found["ratio"] - 1.05) < 0.01 and found["noise"] < 0.01


def test_where_a_step_in_float8_goes_is_what_its_page_says():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from float8 import parts
    finally:
        sys.path.remove(str(BENCHMARKS))
    step = json.loads((BENCHMARKS / "results/float8-ops-h200.json").read_text())["step"]
    page = (BENCHMARKS.parent / "docs/guides/float8.md").read_text().partition("### Where a step goes")[2]
    rows = re.findall(r"^\| (.+?) \| (\d+) \|", page.partition("\n\n| recipe")[0], re.M)
    ms = parts(step)
    assert sum(ms.values()) == pytest.approx(step["ms"]) and len(rows) == len(ms)
    for (name, text), (part, exact) in zip(rows, ms.items()):
        assert (name == part or part == "the rest") and int(text) == round(exact)
