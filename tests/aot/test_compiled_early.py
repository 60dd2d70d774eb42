"""What is launched early waits before it lets others come and touches memory; in what is not there is not a word of
that."""

from __future__ import annotations

import pytest
import torch

from liger_hw.autotune import compile as aot
from liger_hw.backends import known_target

ACCESSES = ("ld.global", "st.global", "cp.async.cg", "cp.async.ca", "atom.")


def _ptx(launch) -> str:
    return aot.build(launch.target, launch.kernel, launch.args, dict(launch.options)).asm["ptx"]


@pytest.mark.aot
@pytest.mark.parametrize("few, sizes", [(True, (1, 512)), (False, (1024, 2048))], ids=["few", "many"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "dyt"])
def test_waits_where_it_is_early(op, few, sizes):
    for one in aot.trace(op, sizes, torch.bfloat16, known_target("sm90"), shipped=False):
        ptx, early = _ptx(one), dict(one.options).get("launch_pdl", False)
        assert early == (few), one.tunable
        if early:
            wait, come = (ptx.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
            assert wait < come < min(place for place in map(ptx.find, ACCESSES) if place >= 0), one.tunable
        else:
            assert "griddepcontrol" not in ptx, one.tunable
