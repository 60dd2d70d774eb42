"""Model families: what `apply_liger_kernel_to_<family>` needs to know about each. families.py has the table.

A spec states where a family's code is and which keywords its function has. Which kernels fit which of its modules is
found by running them (see ../probing/). A family without a spec needs none: `liger_hw.patch(model)` finds the same
kernels. `liger-hw check MODEL` says what a model gets.
"""

from __future__ import annotations

from .families import SPECS, FamilySpec


def specs() -> dict[str, FamilySpec]:
    """Every spec by its family's name. Imports neither torch nor transformers."""
    return {spec.name: spec for spec in SPECS}
