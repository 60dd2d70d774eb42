"""Levels of recomputation, and the settings of `activations=` from which each layer's level follows.

keep    nothing is recomputed, as in torch
cheap   outputs of norms, gated activations and QK norms with rotary embedding are recomputed (recipes.py)
mlp     outputs of the gate and up projections are recomputed too
full    the whole layer is recomputed from its input, as by transformers' gradient checkpointing
tiled   as full, and the MLP of a long sequence runs in tiles, without wide intermediates for all tokens
offload as tiled, and the layer's input is kept in host memory

If a user names `mlp` or `full` for a model, the last layer is at `cheap`. Its backward comes first, before other layers
free memory, so recomputing more would not lower the peak. Under `offload` it is at `tiled`: its input is needed first.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any, Mapping, Sequence, Union

Levels = Union[str, Sequence[str], Mapping[int, str]]
"""A level, `fit`, a size such as `80GiB`, one level for each layer, or a mapping from layer index to level."""
LEVELS = ("keep", "cheap", "mlp", "full", "tiled", "offload")
"""From most memory to least, and from fastest to slowest."""
CHECKPOINTED = ("full", "tiled", "offload")
"""Levels that compute a layer again from its input."""
LAST = {"mlp": "cheap", "full": "cheap", "offload": "tiled"}
"""Level of a model -> level of its last layer, where they differ."""
DEFAULT: Levels = {-1: "cheap"}
"""The default of `activations=` in a patch with the fused loss."""
FIT = "fit"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)", re.IGNORECASE)
_UNITS = {"gib": 1 << 30, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}


def parse_size(text: str) -> int | None:
    """Bytes of "80GiB" or "80000MB"; None for other text and for more bytes than fit in 63 bits."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].lower()] if match else math.inf
    return int(size) if size < 2**63 else None


def is_budget(setting: Any) -> bool:
    """Whether a setting is `fit` or a size, for which the planner chooses the levels."""
    return isinstance(setting, str) and (setting == FIT or parse_size(setting) is not None)


def check_level(level: Any) -> str:
    """`level` itself. Raises `ValueError` for an unknown one."""
    if level not in LEVELS:
        raise ValueError(
            f"activations: unknown level {level!r}; there are {', '.join(LEVELS)}, and for a model 'fit' or a size "
            "such as '80GiB'"
        )
    return level


def level_of_each(setting: Any, layers: int) -> tuple[str, ...]:
    """The level of every layer, from a setting other than `fit` or a size. Raises `ValueError` for an invalid one.

    In a mapping negative indices count from the end, and layers without an entry are at `keep`.
    """
    if isinstance(setting, str):
        return (setting,) * (layers - 1) + (LAST.get(check_level(setting), setting),)
    if isinstance(setting, Mapping):
        levels = ["keep"] * layers
        for index, level in setting.items():
            if type(index) is not int or not -layers <= index < layers:
                raise ValueError(f"activations: {index!r} is not one of {layers} layers; use 0 to {layers - 1}")
            levels[index] = check_level(level)
        return tuple(levels)
    if isinstance(setting, Sequence):
        if len(setting) != layers:
            raise ValueError(f"activations: {len(setting)} levels for {layers} layers; give one for each, or a mapping")
        return tuple(check_level(level) for level in setting)
    raise ValueError(
        f"activations takes {', '.join(LEVELS)}, 'fit', a size such as '80GiB', one level a layer, or a mapping from "
        f"layer to level; got {setting!r}"
    )


def in_words(levels: Sequence[str]) -> str:
    """`mlp x12, cheap x20`, first layer first."""
    return ", ".join(f"{level} x{len(list(run))}" for level, run in itertools.groupby(levels))
