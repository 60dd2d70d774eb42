"""The package as other tools see it: names, types, help texts, metadata, links."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import python

import liger_hw
from ci import stubs

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("package", stubs.PACKAGES)
def test_stubs_are_current(package):
    """A public name that was added is in the stub too: run python ci/stubs.py."""
    path, text = stubs.stub(package)
    assert path.read_text() == text


@pytest.mark.parametrize("package", stubs.PACKAGES)
def test_dir_shows_the_public_names_only(package):
    module = importlib.import_module(package)
    shown = [name for name in dir(module) if not name.startswith("__")]
    assert shown == sorted(module.__all__) and not [name for name in shown if name.startswith("_")]


def test_patch_comes_first():
    assert liger_hw.__all__[0] == liger_hw.transformers.__all__[0] == "patch"
    assert "liger_hw.patch(model)" in liger_hw.__doc__.split("\n\n")[2]


def test_a_misspelt_name_is_answered_with_a_hint():
    with pytest.raises(AttributeError, match="did you mean 'patch'"):
        liger_hw.pathc  # noqa: B018


@pytest.mark.full
def test_mypy_understands_a_program():
    pytest.importorskip("mypy")
    python("-m", "mypy", "--strict", "--no-incremental", ROOT / "tests" / "typing_sample.py", cwd=ROOT)


@pytest.mark.parametrize(
    "part", ["metadata", *(pytest.param(name, marks=pytest.mark.full) for name in ("wheel", "sdist"))]
)
def test_what_would_be_published_works(part):
    """`make release-check`: what a wheel and an sdist hold, the wheel in new environments, the sdist's own tests."""
    pytest.importorskip("build")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "ci" / "release.py"), part]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def _public():
    for package in stubs.PACKAGES[:4]:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                yield f"{package}.{name}", value


def test_docstrings_stand_alone():
    """Public docstrings do not refer to a file's top, and a layer's forward has its own."""
    import torch

    for name, value in _public():
        text = inspect.getdoc(value) or ""
        assert text.strip(), name
        assert not re.search(r"top of (this|the) file|see the module", text), name
        if inspect.isclass(value) and issubclass(value, torch.nn.Module):
            assert value.forward.__doc__, f"{name}.forward has no docstring of its own"


def test_the_long_description_has_absolute_links():
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    base = re.search('Source = "(.*)"', (ROOT / "pyproject.toml").read_text()).group(1)
    text = '[a](docs/a.md#b) ![c](docs/c.svg) <img src="d.png"> [e](https://e.org) [f](#f) [g](mailto:g@h.i)'
    assert setup.absolute(text) == (
        f"[a]({base}/blob/main/docs/a.md#b) ![c]({base}/raw/main/docs/c.svg) "
        f'<img src="{base}/raw/main/d.png"> [e](https://e.org) [f](#f) [g](mailto:g@h.i)'
    )
