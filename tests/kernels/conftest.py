"""Kernel tests see NaN wherever a kernel forgot to write, and a configuration that fails is a failed test."""

from __future__ import annotations

import pytest
import torch
from torch.utils._device import _device_constructors

_INTEGER_POISON = 0x5A
# What `with torch.device(...)` redirects is listed once, at first use. Listed while torch.empty is replaced, it would
# lack the real one, and a later test's model for the meta device would be made in memory.
_device_constructors()


def _poisoned(make):
    def empty(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.device.type == "meta" or not made.numel():
            return made
        with torch.no_grad():
            if made.is_floating_point():
                made.fill_(float("nan"))
            elif made.dtype is not torch.bool:
                made.fill_(_INTEGER_POISON)
        return made

    return empty


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Uninitialised memory holds NaN (integers 0x5a), so a result that was never stored cannot pass by luck."""
    if request.node.get_closest_marker("unpoisoned"):
        return
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def exact_convolutions():
    """torch's own convolution, which an op uses, may take TF32 for fp32 and add up in any order: not while it is
    tested."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before


@pytest.fixture(autouse=True)
def _no_failed_configuration(no_failed_configuration):
    pass
