"""The command `liger-hw`. `main(argv)` runs it and returns the exit code.

A sub-command is two functions in the module of the same name in this package, or in the module that `HOME` gives. The
module is imported when the command is called.

    NAME_arguments(parser)        fills an argparse parser
    run_NAME(arguments) -> int    runs the command: 0 is success, 1 a check that failed

The docstring of `run_NAME`, or else of the module, is the command's help. `liger-hw --help` prints the texts of
`COMMANDS`. A mistake of the user raises `UsageError`; its message says what to do, and the command is put before it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
import traceback
from typing import Any, Iterator, Sequence

from .. import __version__, env
from ..backends import VENDORS
from ..env import SettingError
from ..text import fold, json_text, printable

COMMANDS = {
    "info": "devices, versions, which package provides Triton, and what is tuned",
    "explain": "why an op launches as it does at a shape, on this or another device",
    "bench": "time the ops against their peers",
    "autotune": "measure launch configurations on this device and keep the winners",
    "cache": "list, verify, export, import or clear the stored configurations",
    "compile": "what every op would launch on an architecture, compiled here without the device",
    "shim": "print the folder for PYTHONPATH that answers `import liger_kernel` with liger_hw",
    "hub": "print the folder from which the `kernels` package loads the layers of liger_hw",
    "check": "what a patch would change in a model, from its name or configuration, without weights",
    "doctor": "run every op once against its reference here, and print the text for a bug report",
    "estimate": "tokens/s and GiB of a model on a GPU that you may not have: Hugging Face, Liger, liger_hw",
    "plan": "activation levels of a model, the memory they take and the best mix that fits",
    "prebuild": "lock file and compiled kernels of a model in one folder, for a container image",
    "lock": "write liger-hw.lock, which pins every configuration of a model",
}
HOME = {
    **dict.fromkeys(("info", "doctor"), "machine"),
    **dict.fromkeys(("explain", "compile"), "launches"),
    **dict.fromkeys(("shim", "hub"), "folders"),
    "prebuild": "lock",
    "estimate": "plan",
}
"""Command -> its module, if that has another name."""


class UsageError(Exception):
    """An error that the user can correct; the message says how. The exit code is 2."""


@contextlib.contextmanager
def user_errors(kinds: type | tuple[type, ...] = ValueError, about: str = "") -> Iterator[None]:
    """Turn errors of these kinds in a `with` block into `UsageError`. about: prefix of the message"""
    try:
        yield
    except kinds as error:
        raise UsageError(f"{about}{error}") from None


def missing(package: str) -> UsageError:
    """The error of a command that needs `package`, which is not installed."""
    extras = VENDORS[:-1] if package == "triton" else (package,)  # Triton is in the extra of each GPU vendor
    words = " or ".join(f"'liger_hw[{extra}]'" for extra in extras)
    return UsageError(f"needs {package}: pip install {words}")


def needs(package: str) -> None:
    """Raise `UsageError` with what to install if the package is missing."""
    if importlib.util.find_spec(package) is None:
        raise missing(package)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `liger-hw` with `argv`, by default the process's arguments.

    Returns 0 for success, 1 if a check failed, 2 for wrong usage or a system error, 3 for a bug, 130 if interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # None if closed
    code = 0
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # escape what the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _exit_code(argv)
        sys.stdout.flush()
    except OSError as error:  # `liger-hw info | head`, a full disk, ...: Python's flush at exit must not fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code and not isinstance(error, BrokenPipeError):
            print(f"liger-hw: {_one_line(error)}", file=sys.stderr)
            code = 2
    return code


def _exit_code(argv: list[str]) -> int:
    """Run a command. Each error becomes one line, and with --json also a JSON document."""
    try:
        return _dispatch(argv)
    except SystemExit as stop:  # argparse: --help and --version
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except KeyboardInterrupt:
        return _report(argv, "interrupted", 130)
    except BrokenPipeError:
        raise
    except (UsageError, SettingError) as error:
        return _report(argv, "\n".join(map(printable, str(error).splitlines())), 2)
    except Exception as error:
        message = printable(_one_line(error))
        no_memory = type(error).__name__ == "OutOfMemoryError" or "allocate memory" in message  # torch's, GPU or CPU
        if no_memory or isinstance(error, (ImportError, OSError, MemoryError, UnicodeError, RecursionError)):
            return _report(argv, message, 2)
        if env.LIGER_HW_DEBUG:
            traceback.print_exc()
        return _report(
            argv,
            f"this is a bug in liger_hw: {message}. Please report it as an issue of liger_hw's repository, with the "
            "command and the traceback that LIGER_HW_DEBUG=1 shows",
            3,
        )


def _report(argv: list[str], message: str, code: int) -> int:
    """Print an error to standard error, and a JSON document to standard output if the command prints JSON there."""
    with contextlib.suppress(OSError):  # a closed pipe or a full disk: only the exit code remains
        print(fold(f"liger-hw: {message}", " " * 2), file=sys.stderr)
        following = dict(zip(argv, [*argv[1:], "-"]))  # `bench --json FILE` writes a file
        if "--json=-" in argv or "--json" in argv and (argv[0] != "bench" or following["--json"].startswith("-")):
            print(json_text({"error": message}))
    return code


def _one_line(error: BaseException) -> str:
    """`No space left on device: FILE` for an error of the system, `Type: first line` for others."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename is not None else "")
    lines = str(error).splitlines()
    return type(error).__name__ + (f": {lines[0]}" if lines else "")


_wrap = functools.partial(textwrap.wrap, break_on_hyphens=False)  # options and file names stay whole


class _Help(argparse.RawDescriptionHelpFormatter):
    """Fills prose to the terminal's width and leaves paragraphs with indented lines unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for paragraph in text.strip().split("\n\n"):
            is_list = any(line.startswith(" ") for line in paragraph.splitlines())
            lines += [*(paragraph.splitlines() if is_list else [" ".join(paragraph.split())]), ""]
        hang = " " * 8
        return "\n".join("\n".join(_wrap(line, width, subsequent_indent=hang * (line[:1] == " "))) for line in lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(" ".join(text.split()), width)


class _Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`."""

    def error(self, message: str) -> None:
        self.print_usage(sys.stderr)
        raise UsageError(f"{self.prog.partition(' ')[2]}: {message}".removeprefix(": "))


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else ""
    if not name or name.startswith("-"):
        parser = _top_parser()
        parser.parse_args(argv)  # --help and --version leave here
        parser.print_help(sys.stderr)
        return 2
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(COMMANDS)}"
        raise UsageError(f"unknown sub-command {name!r}; {hint}")
    if env.LIGER_HW_INTERPRET:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
    parser = parser_of(name)
    # `parse_intermixed_args` allows options between the values of one argument, but no sub-parsers
    parse = parser.parse_args if parser._subparsers else parser.parse_intermixed_args
    arguments = parse(argv[1:])
    try:
        return getattr(_module_of(name), f"run_{name}")(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("transformers", "triton"):
            raise
        problem = missing(package)
    except UsageError as error:
        problem = error
    command = f"{name} {arguments.action}" if name == "cache" else name
    raise UsageError(f"{command}: {problem}") from None


def parser_of(name: str) -> argparse.ArgumentParser:
    module = _module_of(name)
    help = inspect.getdoc(getattr(module, f"run_{name}")) or module.__doc__
    parser = _Parser(prog=f"liger-hw {name}", description=help, formatter_class=_Help)
    getattr(module, f"{name}_arguments")(parser)
    return parser


def _module_of(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{HOME.get(name, name)}")


def _top_parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<9} {text}" for name, text in COMMANDS.items()]
    parser = _Parser(
        prog="liger-hw",
        usage="liger-hw [--version] COMMAND [options]",
        description="Triton kernels for training language models: measured on NVIDIA, compiled for AMD and Intel.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`liger-hw COMMAND --help` shows a command's options.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"liger-hw {__version__}")
    return parser
