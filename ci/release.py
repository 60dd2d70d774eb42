"""`make release-check`: whether what would be published works for somebody who has nothing but the wheel.

    python ci/release.py                 all of it, in minutes
    python ci/release.py wheel sdist     only these parts

metadata   version and changelog agree; names, links and classifiers of the wheel are complete; every link is absolute;
           the sdist holds every file of the repository
wheel      the wheel in a new environment with torch alone, then with Triton, then with transformers (ci/installed.py)
types      mypy reads the real types of a sample program (tests/typing_sample.py)
sdist      the tests of `make check` run from the unpacked sdist

Environments are made of links to what this one has installed, so nothing is downloaded. Ends with status 1 when
anything fails; what must still be decided before publishing is listed, and is no failure.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("metadata", "wheel", "types", "sdist")


class Failed(Exception):
    """What is wrong, in words."""


def build(folder: Path) -> tuple[Path, Path]:
    """(wheel, sdist) of the checkout. The wheel is made from the sdist, which must therefore be whole."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"the build fails:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


# -- environments ----------------------------------------------------------------------------------------------------


def needed_by(names: list[str], without: frozenset[str] = frozenset()) -> set[str]:
    """Distributions of this environment that these need, themselves included; extras are left out."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    todo = list(names)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found or name in without:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a requirement of another platform
        found.add(name)
        for text in requires:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                todo.append(one.name)
    return found


def environment(folder: Path, names: set[str], wheel: Path) -> Path:
    """A new environment with these distributions, by links, and the wheel; its python."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in names:
        for file in metadata.files(name) or ():
            top = Path(file).parts[0]
            source = Path(metadata.distribution(name).locate_file(top))
            if top not in ("..", "__pycache__") and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"the wheel cannot be installed: {done.stderr}")
    return python


# -- the parts -------------------------------------------------------------------------------------------------------


def check_metadata(wheel: Path, sdist: Path) -> list[str]:
    """What must still be decided before publishing. Raises `Failed`."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = email.message_from_bytes(archive.read(next(n for n in names if n.endswith("dist-info/METADATA"))))
    for marker in ("liger_hw/py.typed", "liger_hw/__init__.pyi", "liger_hw/transformers/__init__.pyi"):
        if marker not in names:
            raise Failed(f"the wheel has no {marker}")
    missing = [field for field in ("Summary", "Author", "Project-URL", "Classifier", "Keywords") if field not in about]
    if missing:
        raise Failed(f"the metadata lack {', '.join(missing)}")
    relative = re.findall(r'(?:\]\(|(?:src|href)=")(?![a-z]+:|#)([^)\s"]+)', about.get_payload())
    if relative:
        raise Failed(f"the long description has relative links: {', '.join(relative[:5])}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    if lost := sorted(_tracked() - packed):
        raise Failed(f"the sdist lacks {', '.join(lost[:5])}: name them in MANIFEST.in")
    version = about["Version"]
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    heading = next((h for h in headings if h.split()[0].rstrip(":,") == version), None)
    if heading is None:
        raise Failed(f"CHANGELOG.md has no section for version {version}; it has: {', '.join(headings)}")
    undecided = [f"CHANGELOG.md: {h!r} has no date" for h in headings if "nreleased" in h]
    hosts = {url.split(", ")[1].split("/")[2] for url in about.get_all("Project-URL")}
    undecided += [f"pyproject.toml: {host} is no public host" for host in sorted(hosts) if host.endswith(".example")]
    return undecided


def _tracked() -> set[str]:
    """The files that git keeps, but those that only git itself reads; none where this is no checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return {name for name in listed.stdout.splitlines() if Path(name).name not in (".gitignore", ".gitattributes")}


def check_wheel(wheel: Path, sdist: Path) -> None:
    triton = frozenset(needed_by(["triton"]))
    stages = {
        "torch": needed_by(["torch"], triton),
        "triton": needed_by(["torch", "triton"]),
        "transformers": needed_by(["torch", "triton", "transformers"]),
    }
    for stage, names in stages.items():
        with tempfile.TemporaryDirectory() as folder:
            python = environment(Path(folder) / "venv", names, wheel)
            _run(stage, [str(python), str(ROOT / "ci" / "installed.py"), stage], folder)


def check_types(wheel: Path, sdist: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder) / "venv", needed_by(["torch"]), wheel)
        sample = str(ROOT / "tests" / "typing_sample.py")
        _run("types", [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), sample], folder)


def check_sdist(wheel: Path, sdist: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = next(Path(folder).iterdir())
        _run("sdist", ["bash", "ci/test.sh", "check"], unpacked, PYTHON=sys.executable, PYTHONPATH=str(unpacked))


def _run(what: str, command: list[str], folder: str | Path, **more: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LIGER_HW_", "PYTHON"))}
    done = subprocess.run(command, cwd=folder, env=kept | more, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{what}: {' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    chosen = parser.parse_args().parts or PARTS
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    failed, undecided = [], []
    with tempfile.TemporaryDirectory() as folder:
        files = build(Path(folder))
        for part in chosen:
            try:
                undecided += globals()[f"check_{part}"](*files) or []
                print(f"{part}: ok", flush=True)
            except Failed as error:
                failed.append(part)
                print(f"{part}: FAILED: {error}", flush=True)
    for line in undecided:
        print(f"before publishing: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"release-check: {error}")
