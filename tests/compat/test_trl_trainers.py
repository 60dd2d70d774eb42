"""TRL's own trainers with `use_liger_kernel=True` through the shim, against the same trainers without it.

Up to 1.12 it means losses of `liger_kernel.chunked_loss` in DPO, KTO and GRPO, and the fused linear cross entropy in
SFT. From 1.14 on it means only the layers, with TRL's own fused head. Skipped if trl and datasets are not installed
(TRL=1.16.0 bash ci/cpu.sh).
"""

from __future__ import annotations

import importlib.metadata

import pytest
from trl_programs import STEPS, found_by

from liger_hw import compat

TRAINERS = ("sft", "dpo", "kto", "grpo")

CODE = "found = {kind: compared(trained(kind), trained(kind, use_liger_kernel=True)) for kind in TRAINERS}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each trainer's log without and with the switch, how far its parameters moved, and how far they differ."""
    return found_by(CODE, TRAINERS, tmp_path_factory.mktemp("trl"), str(compat.PATH))


def _layers_only() -> bool:
    return tuple(int(part) for part in importlib.metadata.version("trl").split(".")[:2]) >= (1, 14)


@pytest.mark.parametrize("kind", TRAINERS)
def test_it_runs_on_liger_hw(trained, kind):
    plain, patched = trained[kind]["plain"], trained[kind]["ours"]
    assert {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"} <= set(patched["ours"])
    fused = not _layers_only()
    if kind == "sft":
        assert ("LlamaForCausalLM" in patched["ours"]) == fused
    else:
        assert patched["loss"].startswith("liger_hw.chunked_loss") == fused
    assert not plain["ours"] and plain["loss"] == "builtins"


@pytest.mark.parametrize("kind", TRAINERS)
def test_it_trains_as_without(trained, kind):
    """Every number that both log, and the parameters after the last step.

    Not the mean logits: those of Liger's losses include prompt and padding (KTO: their sum), TRL's do not.
    """
    found = trained[kind]
    plain, patched = found["plain"]["logged"], found["ours"]["logged"]
    assert len(plain) == len(patched) == STEPS
    for a, b in zip(plain, patched):
        assert a["grad_norm"] > 0
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5, abs=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        same = [name for name in a if name in b and not name.startswith(("logits/", "step_time", "profiling"))]
        assert {name: b[name] for name in same} == pytest.approx({name: a[name] for name in same}, rel=1e-3, abs=1e-4)
    assert found["moved"] > 1e-3 and found["apart"] < 1e-2 * found["moved"]
