"""Two gloo processes with different caches launch the same kernels after `sync`, or raise."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import liger_hw
from liger_hw import distributed, registry
from liger_hw.autotune import store
from liger_hw.distributed import agreement
from tests.autotune.fakes import H200, entry, tunable

ROOT = Path(__file__).resolve().parents[2]
NAME = ("rms_norm", "fwd", (4096, 13, 2))

RANK = """
import os, sys, torch, torch.distributed as dist
import liger_hw.distributed
from liger_hw import registry
from dataclasses import replace
from liger_hw.autotune import store
from tests.autotune.fakes import H200, entry, tunable
rank, world, what = int(sys.argv[1]), 2, sys.argv[2]
backend = None if what == "failed" else "gloo"  # unnamed, torch takes one for each kind of device
dist.init_process_group(backend, init_method=sys.argv[3], rank=rank, world_size=world)
target = replace(H200, multiprocessors=66) if what == "device" and rank else H200
fwd, bwd = tunable("rms_norm.fwd"), tunable("rms_norm.bwd")
key = (4096, 13, 2)
legal = [c for c in fwd.space(target, key) if c != fwd.heuristic(target, key)]
store.add(target, [(("rms_norm", "fwd", key), entry(legal[rank], fwd))])  # tuned differently
if rank:
    store.add(target, [(("rms_norm", "bwd", key), entry(bwd.safe(target, key), bwd))])  # and more
if what == "failed before" and rank:  # noted on this node's disk by an earlier process
    for version, of in ((fwd.version, fwd), (99, bwd)):
        failed = entry(of.heuristic(target, (4096, 9, 2)), of, kind="failed", reason="out of shared memory")
        store.add(target, [((of.op, of.variant, (4096, 9, 2)), replace(failed, version=version))])
if what == "lock" and rank:
    os.environ["LIGER_HW_LOCK_FILE"] = "no-such.lock"
registry.reload()
with registry.pretend(target):
    device = torch.device("cuda", 0)
    if what == "failed" and rank:
        registry.quarantine(fwd.plan(device, (4096, 9, 2)), RuntimeError("out of shared memory"))
    if what == "late" and rank:
        import time
        time.sleep(6)
        os._exit(0)
    before = None if what == "lock" else liger_hw.distributed.digest(target)
    try:
        digest = liger_hw.distributed.sync(seconds=3 if what == "late" else None)
    except RuntimeError as error:
        print("raised", error)
    else:
        plans = [t.plan(device, k) for t in (fwd, bwd) for k in (key, (4096, 9, 2))]
        print(digest, digest != before, [(p.layer, p.config.to_text()) for p in plans])
sys.stdout.flush()
os._exit(0)  # a thread of gloo's that still runs would abort an orderly exit
"""


def ranks(tmp_path: Path, what: str, code: str = RANK) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    running = []
    for rank in range(2):
        environment = {
            **os.environ,
            "LIGER_HW_CACHE_DIR": str(tmp_path / f"rank{rank}"),
            "LIGER_HW_DISABLE_SHIPPED": "1",  # what ships for an H200 is no part of these tests
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent))),  # engines.py imports its neighbours
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-c", code, str(rank), what, address]
        running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=200) for process in running]
    assert all(p.returncode == 0 for p in running), [errors[-2000:] for _, errors in outputs]
    return [output.strip() for output, _ in outputs]


# Two processes each: one case that holds of caches and of failures.
@pytest.mark.daily(what="failed")
@pytest.mark.parametrize("what", ["caches", "failed", "failed before"])
def test_after_sync_both_ranks_launch_alike(clean_registry, tmp_path, what):
    one, two = ranks(tmp_path, what)
    assert one.split()[0] == two.split()[0] and len(one.split()[0]) == 16
    plans = [text.split("[", 1)[1] for text in (one, two)]
    assert plans[0] == plans[1]
    assert "('user'" in plans[0] and "heuristic" in plans[0], "rank 1's extra entry does not answer"
    if what != "caches":
        assert plans[0].count("('safe'") == 1, "what failed on rank 1, with these kernels, is set aside on rank 0 too"


@pytest.mark.full
@pytest.mark.parametrize(
    "what, word",
    [("device", "multiprocessors 66 instead of 132"), ("lock", "LIGER_HW_LOCK_FILE=no-such.lock: no such file")],
)
def test_every_rank_gets_the_error_of_one(clean_registry, tmp_path, what, word):
    """Devices that differ, and an error of one rank. A model's first step, below, has LIGER_HW_DETERMINISTIC."""
    for output in ranks(tmp_path, what):
        assert output.startswith("raised") and word in output and "rank 1" in output


@pytest.mark.full
def test_a_rank_that_does_not_answer_is_named(clean_registry, tmp_path):
    one, two = ranks(tmp_path, "late")
    assert "rank 1 of 2 has not answered in time" in one and not two


STEP = """
import os, sys, torch, torch.distributed as dist
import liger_hw
from liger_hw import registry
from engines import batches, make_model
rank, what = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
model = make_model()
liger_hw.patch(model, swiglu=not (what == "parts" and rank))
if what == "stages" and rank:
    del model.model.layers[1]
registry.set_deterministic(what == "drift" and rank == 1)
for _ in range(2):
    try:
        loss = model(**batches(1)[0]).loss
        print("trained", registry.is_deterministic())
    except RuntimeError as error:
        print("raised", error)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.daily(what="parts")
@pytest.mark.parametrize(
    "what, word",
    [
        ("parts", "raised.*rank 1: patched swiglu 0 instead of 2.*LIGER_HW_SYNC_SECONDS=0.*"),
        ("drift", "raised.*rank 1: deterministic True, not False.*"),
        ("stages", "trained False"),
        ("off", "trained False"),
    ],
)
def test_a_patched_models_first_step_compares_the_ranks(clean_registry, monkeypatch, tmp_path, what, word):
    """And so does the next one of a loop that goes on after an error."""
    if what == "off":
        monkeypatch.setenv("LIGER_HW_SYNC_SECONDS", "0")
    for output in ranks(tmp_path, what, STEP):
        first, second = output.splitlines()
        assert re.fullmatch(word, first) and re.fullmatch(word, second), output


SLOW_READER = """
import os, sys, time, torch.distributed as dist
from liger_hw.distributed import agreement
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
store = agreement._store()
class Slow:
    def __getattr__(self, name):
        return getattr(store, name)
    def wait(self, *args):
        store.wait(*args)
        time.sleep(1.5 * rank)
def tell():
    raise KeyError("a key")
try:
    agreement._exchange(Slow(), "here", tell if rank else dict, [0, 1], 60)
except RuntimeError as error:
    print(error)
sys.stdout.flush()
os._exit(0)
"""


def test_the_rank_with_the_store_does_not_end_before_all_have_read(clean_registry, tmp_path):
    """Otherwise the others would get an error about the store instead of the cause."""
    for output in ranks(tmp_path, "-", SLOW_READER):
        assert "rank 1: KeyError: 'a key'" in output


@pytest.fixture
def two_ranks(monkeypatch):
    """This process as one rank of a group of two, which has a store."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    yield
    monkeypatch.undo()
    torch.distributed.destroy_process_group()


def test_the_first_step_that_can_compare_does(two_ranks, monkeypatch):
    """Not one under graph capture. After an error the next step compares again."""
    asked, quiet, failing = [], True, True

    def sync(*args):
        asked.append(args)
        if failing:
            raise RuntimeError("the ranks differ")

    monkeypatch.setattr(agreement, "_sync", sync)
    monkeypatch.setattr(registry, "is_capturing_or_tracing", lambda: quiet)
    step = partial(agreement.at_first_step, torch.nn.Linear(2, 2), lambda model: {})
    step()
    assert not asked
    quiet = False
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the ranks differ"):
            step()
    failing = False
    step()
    step()
    assert len(asked) == 3


def test_a_forward_without_gradients_is_no_training_step(monkeypatch):
    """One rank alone may run a model in training mode, before all ranks train it."""
    transformers = pytest.importorskip("transformers")
    from liger_hw.transformers.tiny import tiny_model

    asked = []
    monkeypatch.setattr(agreement, "at_first_step", lambda *args: asked.append(args))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    model = tiny_model(transformers.LlamaForCausalLM, num_hidden_layers=1)
    ids = torch.tensor([[5, 6, 7, 8]])
    with liger_hw.patch(model):
        with torch.no_grad():
            model(ids, labels=ids)
        assert not asked
        model(ids, labels=ids)
        assert len(asked) == 1


REJOIN = """
import os, sys, torch.distributed as dist
import liger_hw.distributed
rank, folder = int(sys.argv[1]), sys.argv[2]
def join(number):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=2)
    print("agreed", liger_hw.distributed.sync(device="cpu", seconds=60))
    sys.stdout.flush()
    dist.destroy_process_group()
if rank == 0 or os.fork() == 0:
    join(0)
    if rank:
        os._exit(0)
else:
    assert os.wait()[1] == 0
join(1)
os._exit(0)  # a thread of gloo's that still runs would abort an orderly exit
"""


def test_a_new_process_joins_one_that_was_in_a_group_before(clean_registry, tmp_path):
    """As after an elastic restart: rank 0's process has synchronised before, rank 1's has not."""
    for output in ranks(tmp_path, str(tmp_path), REJOIN):
        assert re.fullmatch(r"(agreed \w{16}\n?){2}", output), output


def test_without_a_process_group_it_is_the_digest(clean_registry):
    fwd = tunable()
    with registry.pretend(H200):
        bare = distributed.sync()
        assert bare == distributed.digest(H200) == distributed.sync()
        store.add(H200, [(NAME, entry(fwd.safe(H200, NAME[2]), fwd))])
        registry.reload()
        tuned = distributed.sync()
        assert tuned != bare
        failed = entry(fwd.safe(H200, NAME[2]), fwd, kind="failed", reason="failed")
        store.add(H200, [(NAME, replace(failed, version=99))])
        registry.reload()
        assert distributed.sync() == tuned, "of another version of the kernel: it decides nothing"
        store.add(H200, [(NAME, failed)])
        registry.reload()
        assert distributed.sync() not in (bare, tuned)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e300])
def test_invalid_seconds_are_refused(clean_registry, seconds):
    with pytest.raises(ValueError, match="liger_hw.distributed.sync: seconds must be above 0"):
        distributed.sync(device="cpu", seconds=seconds)
