"""Bad values of all kinds."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

NUMBERS = ["0", "-1", "1", "2", "3.5", "1e309", "nan", "-inf", "9" * 30, "1_000", "0x10", "１２", "1e-400"]
WORDS = ["rms_norm", "swiglu", "rms_norm.fwd", "sm90", "gfx942", "pvc", "h200", "cuda", "cuda:0", "cpu", "cpu:3", "mps"]
WORDS += ["meta", "xpu:7", "fp32", "bf16", "int8", "mistral-7b", "all", "torch", "liger", "fit", "cheap", "tiny"]
SHAPES = ["8x8", "0x0", "8x", "x", "8192x4096", "1x" * 40 + "1", "9999999999999x2", "8,8", "-1x8"]
TEXTS = ["", " ", "-", "--", "\x1b[31mred\x1b[0m", "\u202etxt.exe", "\udc80", "a\nb", "\r", "%s%n", "a\0b", "{}", "[1]"]
TEXTS += ['{"a": 1}', "[" * 3000, "../../x", "~nobody/x", "*", "NUL", "é", "x" * 5000, "=", "a=b", "--json", "-h"]


def path(chance: random.Random, folder: Path) -> str:
    """A path of a file, folder, link or device, readable or not, or of nothing."""
    kind = chance.randrange(11)
    own = folder / f"f{chance.randrange(1000)}"
    if kind == 0:
        own.write_bytes(chance.randbytes(200))
    elif kind == 1:
        own.mkdir(exist_ok=True)
    elif kind == 2:
        own.symlink_to(chance.choice(["/dev/zero", "/dev/full", str(folder), str(own), "/nonexistent"]))
    elif kind == 3:
        own.write_text(chance.choice(["{}", "[]", '{"schema": 1}', '{"schema":1,"entries":[1]}', "[" * 100000, "nan"]))
    elif kind == 4:
        own.write_text("{}")
        own.chmod(0)
    elif kind == 5:
        return chance.choice(["/dev/full", "/dev/null", "/nonexistent/a/b", "/", ".", "/proc/self/mem", "/dev/stdout"])
    elif kind == 6:
        return str(own / "a" / "b")
    return str(own)


def word(chance: random.Random, folder: Path) -> str:
    """A value for an option."""
    kind = chance.randrange(6)
    if kind == 0:
        return path(chance, folder)
    return chance.choice((NUMBERS, WORDS, SHAPES, TEXTS, NUMBERS)[kind - 1])


def json_data(chance: random.Random, depth: int = 0) -> Any:
    """A JSON value of any kind, some of extreme size."""
    kind = chance.randrange(9 if depth < 3 else 7)
    if kind < 7:
        return (
            None,
            chance.choice([True, False]),
            chance.choice([0, -1, 1, 2**31, 2**63, 10**400, 4096]),
            chance.choice([0.5, float("nan"), float("inf"), -1e308]),
            chance.choice(TEXTS + WORDS),
            chance.choice(["", "cuda", "measured"]),
            [],
        )[kind]
    if kind == 7:
        return [json_data(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(TEXTS + WORDS): json_data(chance, depth + 1) for _ in range(chance.randrange(4))}


def damaged(chance: random.Random, text: str) -> bytes:
    """A text with a part removed, doubled, changed or torn."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + chance.randrange(20)]
        elif kind == 2 and at < len(data):
            data[at] = chance.randrange(256)
        elif kind == 3:
            data[at:at] = data[:at][-50:]
        else:
            data[at:at] = os.fsencode(chance.choice(TEXTS)[:100])
    return bytes(data)


def damaged_tree(chance: random.Random, tree: Any) -> Any:
    """JSON data with one of its parts replaced or removed."""
    if isinstance(tree, dict) and tree and chance.random() < 0.8:
        name = chance.choice(sorted(tree, key=str))
        changed = dict(tree)
        if chance.random() < 0.2:
            del changed[name]
        else:
            changed[name] = damaged_tree(chance, tree[name])
        return changed
    if isinstance(tree, list) and tree and chance.random() < 0.7:
        place = chance.randrange(len(tree))
        return [*tree[:place], damaged_tree(chance, tree[place]), *tree[place + 1 :]]
    return json_data(chance)
