"""Model families: one small spec each, in the table of its kind. A new family is one line in one of the tables.

A family without a spec needs none: `liger_hw.patch(model)` finds the same kernels. A spec gives it a function with
Liger's name and keywords. `liger-hw models` lists what every family of transformers gets.
"""

from __future__ import annotations

import importlib
from typing import Any

TABLES = ("dense", "moe", "vision")
"""Modules in this folder; each defines `SPECS`."""


def specs() -> dict[str, Any]:
    """Family name -> its FamilySpec, all of them, in the tables' order. Imports neither torch nor transformers."""
    tables = (importlib.import_module(f"{__name__}.{table}") for table in TABLES)
    return {spec.name: spec for table in tables for spec in table.SPECS}
