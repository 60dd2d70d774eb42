"""Every option of every command, with any value: status 0, 1, 2 or 130 in time, and with --json one valid document."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Sequence

import torch  # noqa: F401  an interrupted import cannot be repeated
import transformers  # noqa: F401

from liger_hw import cli, registry
from tests.fuzz import hostile

registry.ops()
SECONDS = 60
PATIENCE = 6
"""Seconds after which a command is interrupted as by Ctrl-C."""
SETTINGS = ["LIGER_HW_CACHE_DIR", "LIGER_HW_LOCK_FILE", "LIGER_HW_CONFIG_RMS_NORM", "LIGER_HW_LOSS_MEMORY_MIB"]
SETTINGS += ["LIGER_HW_DETERMINISTIC", "LIGER_HW_DISABLE_SHIPPED", "LIGER_HW_TYPO", "COLUMNS", "NO_COLOR"]


def attempt(chance: random.Random, folder: Path) -> str:
    command = chance.choice(list(cli.COMMANDS))
    words = [command, *_words(chance, folder, cli.parser_of(command))]
    settings = {}
    if chance.random() < 0.2:
        settings[chance.choice(SETTINGS)] = hostile.word(chance, folder).replace("\0", "").replace("\udc80", "")
    os.environ["LIGER_HW_CACHE_DIR"] = str(folder / "cache")
    before = dict(os.environ)
    os.environ.update(settings)
    os.chdir(folder)
    registry.reset()
    try:
        code, out, err = call(words, PATIENCE)
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(before)
        os.chdir("/")
    said = f"{words} {settings} ended with {code}: {err[-600:]}"
    assert code in (0, 1, 2, 130), said
    assert "Traceback" not in err, said
    if code == 2 and "--interpret" not in words:  # which runs in another process, with the real stderr
        assert err.strip(), said
    assert "\x1b[31m" not in out + err and "\u202e" not in out + err, f"raw text: {said}"
    if "--json" in words and command not in ("bench", "models") and "-h" not in words and "--help" not in words:
        json.loads(out or "null", parse_constant=_refuse)
    return f"{command} {code}"


def call(words: Sequence[str], patience: float = 0) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command in this process, interrupted after `patience` s."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    stdin, sys.stdin = sys.stdin, io.StringIO("")
    signal.setitimer(signal.ITIMER_REAL, patience, 1.0 if patience else 0.0)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(list(words))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:  # a second one, while the first was handled
        code = 130
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.stdin = stdin
    return code, out.getvalue(), err.getvalue()


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _words(chance: random.Random, folder: Path, parser: argparse.ArgumentParser) -> list[str]:
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            name = chance.choice(list(action.choices))
            words += [name, *_words(chance, folder, action.choices[name])]
        elif not action.option_strings:
            words += [_value(chance, folder, action) for _ in range(chance.randrange(3) if action.nargs else 1)]
        elif chance.random() < 0.35 and not isinstance(action, argparse._HelpAction):
            words.append(chance.choice(action.option_strings))
            if action.nargs != 0:
                words += [_value(chance, folder, action) for _ in range(chance.randrange(1, 3) if action.nargs else 1)]
    if chance.random() < 0.1:
        words.insert(chance.randrange(len(words) + 1), hostile.word(chance, folder))
    return words


def _value(chance: random.Random, folder: Path, action: argparse.Action) -> str:
    if action.choices and chance.random() < 0.8:
        return str(chance.choice(list(action.choices)))
    if chance.random() < 0.4:
        name = "".join(action.option_strings) + action.dest
        if "device" in name or "target" in name:
            return chance.choice(["sm90", "h200", "gfx942", "cpu"])
        if "op" in name:
            return chance.choice(["rms_norm", "swiglu"])
        if "model" in name:
            return "mistral-7b"
        if "shape" in name or "size" in name:
            return "8x64"
        return chance.choice(["1", "2", "bf16", str(folder / "out")])
    return hostile.word(chance, folder)
