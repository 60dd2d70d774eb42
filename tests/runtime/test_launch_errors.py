"""What a launch raises when something other than its configuration is at fault."""

from __future__ import annotations

import pytest
import torch

from liger_hw import registry
from liger_hw.kernels.norms import rms_norm
from liger_hw.runtime import launch as _launch


class _NoRoom:
    """A kernel whose code finds no room on the device, in Triton's words."""

    arg_names = ("x",)

    def __getitem__(self, grid):
        def run(*args, **options):
            raise RuntimeError("Triton Error [CUDA]: out of memory")

        return run


def test_no_room_for_a_kernels_code_is_torchs_out_of_memory(monkeypatch):
    """Programs that make their batch smaller look for it, and no configuration is to blame."""
    x = torch.ones(2, 16)
    plan = rms_norm.FWD.plan(x.device, registry.row_key(2, 16, 4))
    monkeypatch.setattr(_launch, "require", lambda: None)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CPU out of memory\. .*rms_norm\.fwd"):
        _launch.launch_ordinary(plan, _NoRoom(), (1,), (x,), ())
