"""A vendor's folder is imported at first use, also while another thread forks."""

from __future__ import annotations

import importlib
import threading

import pytest

from liger_hw import backends, locks

pytestmark = pytest.mark.cpu


def test_a_fork_waits_for_the_import_of_a_vendor(monkeypatch):
    seen, imports = [], importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: seen.append(set(locks._importers)) or imports(name))
    assert backends.backend.__wrapped__("xpu").vendor == "xpu"
    assert seen == [{threading.get_ident()}]
