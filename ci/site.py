"""The pages of the site that are made from the code, as a hook of mkdocs: nothing of them is kept in the repository.

reference/cli.md            every command and option, from the parsers
reference/environment.md    every LIGER_HW_ variable, from liger_hw/env.py
reference/api.md            which names mkdocstrings documents
changelog.md                CHANGELOG.md
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from liger_hw import HOME, __version__, cli, env  # noqa: E402
from liger_hw.kernels import EXPORTS  # noqa: E402


def commands_page() -> str:
    lines = ["# Commands", "", "For users of the command line. Written from the parsers of `liger-hw`.", ""]
    for name, summary in cli.COMMANDS.items():
        lines += [f"## liger-hw {name}", "", f"{summary[0].upper()}{summary[1:]}.", "", *_options(cli.parser_of(name))]
    return "\n".join(lines)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    rows, nested = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                nested += [f"### {child.prog.removesuffix(name).strip()} {name}", "", *_options(child)]
            continue
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        words = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""  # a table takes no |
        value = (
            ""
            if action.nargs == 0 or not action.option_strings
            else f" {choices or action.metavar or action.dest.upper()}"
        )
        text = re.sub(r"\s+", " ", (action.help or "") % {**vars(action), "prog": parser.prog})
        rows.append(f"| `{words}{value}` | {_cell(text)} |")
    return (["| | |", "|---|---|", *rows, ""] if rows else []) + nested


def environment_page() -> str:
    lines = [
        "# Environment",
        "",
        "For users who set variables. Each is read once, at first use; `liger_hw.registry.reload()` reads them again.",
        "",
        "| variable | |",
        "|---|---|",
        *(f"| `{variable.name}` | {_cell(variable.help)} |" for variable in env.VARIABLES.values()),
        f"| `{env.CONFIG_PREFIX}<OP>` | force an op's launch configuration (JSON); `<OP>__<VARIANT>` for a variant |",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def api_page() -> str:
    def section(title: str, names: list[str]) -> list[str]:
        return [f"## {title}", "", *(line for name in names for line in (f"::: {name}", ""))]

    top = [
        "patch",
        "revert",
        "activations",
        "explain",
        "override",
        "set_deterministic",
        "CountedRows",
        "LaunchConfig",
        "Target",
    ]
    kernels = [f"liger_hw.kernels.{module}.{name}" for module, names in EXPORTS.items() for name in names]
    losses = importlib.import_module("liger_hw.chunked_loss")
    return "\n".join(
        [
            "# Python",
            "",
            "For users who call the kernels from their own code. Written from the docstrings.",
            "",
            "`apply_liger_kernel_to_<family>` take Liger's keywords and, as `patch` does, `activations=`; "
            "[Models](../models.md) lists the families.",
            "",
            *section("liger_hw", [f"{HOME[name]}.{name}" for name in top]),
            *section("liger_hw.transformers", kernels),
            *section("liger_hw.chunked_loss", [_home(losses, name) for name in losses.__all__]),
        ]
    )


def _home(module: object, name: str) -> str:
    found = getattr(module, name)
    return f"{found.__module__}.{found.__name__}"


def changelog_page() -> str:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


PAGES = {
    "reference/cli.md": commands_page,
    "reference/environment.md": environment_page,
    "reference/api.md": api_page,
    "changelog.md": changelog_page,
}


def on_config(config):
    """mkdocs calls this first. The header has the version, and the repository once pyproject.toml has its address."""
    config.site_name += f" {__version__}"
    source = re.search(r'^Source = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE).group(
        1
    )
    if ".example/" not in source:
        config.repo_url, config.repo_name = source, "Repository"
    return config


def on_page_markdown(markdown, **_):
    """mkdocs calls this with each page. A link to a file outside docs/ becomes its path; to no file, an error."""

    def path_of(found: re.Match) -> str:
        text, path = found.groups()
        return f"{text} (`{path}`)" if (ROOT / path).exists() else found.group()

    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|ci|examples|liger_hw|tests)/[^)\s]+)\)", path_of, markdown)


def on_files(files, config):
    """mkdocs calls this when it has found the files of docs/."""
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files
