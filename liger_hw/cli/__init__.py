"""The command `liger-hw`. `main(argv)` is the same thing as a function: it returns the exit code and never exits.

A sub-command is one module (or folder) of its name in here with two functions, imported only when it is asked for:

    add_arguments(parser)      fill an argparse parser
    run(arguments) -> int      do it; 0 is success, 1 a check that failed

Its line in `COMMANDS` is what `liger-hw --help` prints. A mistake of the user's is raised as `UsageError` with a
message that says what to do, and becomes exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from typing import Sequence

from .. import __version__
from ..env import SettingError

COMMANDS = {
    "info": "devices, versions, which package provides Triton, and the state of every op",
    "explain": "why an op launches as it does at a shape, on this or another device",
    "bench": "time the ops against their peers; also the registry, the host cost and a whole model",
    "demo": "train a small Mistral as Hugging Face ships it, then patched, and compare",
    "autotune": "measure launch configurations on this device and keep the winners",
    "cache": "list, verify, export, import or clear the stored configurations",
    "models": "what every model family of transformers gets, verified on tiny models",
    "compile": "what every op would launch on an architecture, compiled here without the device",
    "shim": "print the folder for PYTHONPATH that answers `import liger_kernel` with liger_hw",
    "plan": "activation levels of a model, the memory they take and the best mix that fits",
    "lock": "write liger-hw.lock, which pins every configuration of a model",
}


class UsageError(Exception):
    """Something the user can put right; the message says how. Ends the command with exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `liger-hw` with `argv` (default: the process's arguments) and return its exit code.

    0 success, 1 a check failed, 2 wrong usage, 130 interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except SystemExit as stop:  # argparse: --help, --version, a wrong argument
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except (UsageError, SettingError) as error:
        print(f"liger-hw: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("liger-hw: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `liger-hw info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
    module = importlib.import_module(f"{__name__}.{name}")
    parser = argparse.ArgumentParser(
        prog=f"liger-hw {name}", description=COMMANDS[name], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    try:
        # options may stand between the names an argument takes many of (argparse: not where there are sub-parsers)
        parse = parser.parse_args if parser._subparsers else parser.parse_intermixed_args
        return module.run(parse(argv[1:]))
    except ModuleNotFoundError as error:
        extra = {"transformers": "transformers", "triton": "cuda", "matplotlib": "bench"}.get(
            (error.name or "").split(".")[0]
        )
        if extra is None:
            raise
        raise UsageError(
            f"{name}: needs {error.name}, which is not installed: pip install 'liger_hw[{extra}]'"
        ) from None


def _top_parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<9} {text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="liger-hw",
        usage="liger-hw [--version] COMMAND [options]",
        description="Triton kernels for training language models on NVIDIA, AMD and Intel GPUs.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`liger-hw COMMAND --help` shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"liger-hw {__version__}")
    return parser
