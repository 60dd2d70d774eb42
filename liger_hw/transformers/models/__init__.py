"""Model families: what `apply_liger_kernel_to_<family>` needs to know about each. families.py has the table.

A spec states where a family's code is and which keywords its function has. Which kernels fit its modules is found by
running them (../probing/), so `liger_hw.patch(model)` needs no spec. `liger-hw check MODEL` shows what a model gets.
"""

from __future__ import annotations

from .families import SPECS, FamilySpec


def specs() -> dict[str, FamilySpec]:
    """Every spec by its family's name. Imports neither torch nor transformers."""
    return {spec.name: spec for spec in SPECS}
