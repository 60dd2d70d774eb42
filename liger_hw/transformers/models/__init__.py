"""Model families that have a function `apply_liger_kernel_to_<family>`. families.py has the table.

A spec has the family's modeling module and the keywords of its function. The kernels for its modules are found by
running these (../probing/), so `liger_hw.patch(model)` needs no spec. `liger-hw check MODEL` shows a model's kernels.
"""

from __future__ import annotations

from .families import SPECS, FamilySpec


def specs() -> dict[str, FamilySpec]:
    """Every spec by its family's name. Imports neither torch nor transformers."""
    return {spec.name: spec for spec in SPECS}
