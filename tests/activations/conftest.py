"""A ledger of what the hooks keep and what recipes compute."""

from __future__ import annotations

import pytest

from liger_hw.recompute import recipes


class Ledger:
    """kept: storage -> elements of the intermediate tensors saved; computed: names of the operators run again."""

    def __init__(self):
        self.kept, self.computed = {}, []

    def note(self, t):
        if t.grad_fn is not None and not t.is_leaf and not (t._is_view() and t._base.is_leaf):
            storage = t.untyped_storage()
            self.kept[storage._cdata] = storage.nbytes() // t.itemsize
        return t

    @property
    def elements(self):
        return sum(self.kept.values())


@pytest.fixture
def ledger(monkeypatch):
    found = Ledger()
    pack, compute = recipes.pack, recipes.Recipe._compute

    def noting_pack(t):
        packed = pack(t)
        if type(packed) is tuple:
            found.note(t)
        return packed

    def noting_compute(self):
        found.computed.append(self.name)
        return compute(self)

    monkeypatch.setattr(recipes, "pack", noting_pack)
    monkeypatch.setattr(recipes.Recipe, "_compute", noting_compute)
    return found


@pytest.fixture(autouse=True)
def nothing_left_open():
    yield
    assert recipes._scopes_open == 0 and recipes._local.scope is None
