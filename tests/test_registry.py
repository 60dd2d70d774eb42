"""The registry: which layer answers, why others are refused, and failures at launch.

Most tests run on an op made up here, so that every layer's answer is known.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from harness import in_threads

from liger_hw import ops
from liger_hw.autotune import store
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.registry import LAYERS, Entry, Op, Sample, Tunable, get_op, next_power_of_2, row_key

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KEY = (1024, 3, 2)
HEURISTIC, SAFE = LaunchConfig({"BLOCK": 1024}, 4, 2), LaunchConfig({"BLOCK": 128}, 1)
SM90, GFX942 = known_target("sm90"), known_target("gfx942")
STORED = ("lock", "user", "shipped-device", "shipped-arch", "shipped-family")


def _kernel(x):
    """In place of a jit function."""
    return x + 1


def _valid(config, key):
    return None if set(config.blocks) == {"BLOCK"} else f"blocks must be BLOCK, got {dict(config.blocks)}"


def _named(number: int) -> LaunchConfig:
    """A legal configuration for each number."""
    return LaunchConfig({"BLOCK": 2**number}, 2)


@pytest.fixture
def made_up(clean_registry, monkeypatch):
    """A tunable of a made-up op, and `stored`: layer -> configuration, empty at first."""
    registry = clean_registry
    tunable = Tunable(
        "made_up",
        "fwd",
        kernels=(_kernel,),
        key=row_key,
        dims=("n_rows", "n_cols"),
        heuristic=lambda target, key: HEURISTIC,
        safe=lambda target, key: SAFE,
        space=lambda target, key: [HEURISTIC, SAFE],
        valid=_valid,
    )
    op = Op("made_up", print, print, (tunable,), {"only": (8, 1024)}, lambda *a, **k: Sample(()))
    registry.register(op)
    stored: dict[str, LaunchConfig | Entry] = {}

    def read(target):
        entries = {n: c if isinstance(c, Entry) else Entry(c, {"kind": "static"}, 1, n) for n, c in stored.items()}
        return {("made_up", "fwd", KEY): [replace(entries[name], layer=name) for name in STORED if name in entries]}

    monkeypatch.setattr("liger_hw.autotune.store.read", read)
    yield registry, tunable, stored
    del ops._ops[op.name]


def _layer(made_up, target=SM90):
    registry, tunable, _ = made_up
    registry.reload()
    with registry.pretend(target):
        plan = tunable.plan(CPU, KEY)
        return plan.layer, plan.config


# -- order -----------------------------------------------------------------------------------------------------------


def test_layers_answer_in_their_order(made_up):
    registry, _, stored = made_up
    assert LAYERS == ("explicit", *STORED, "heuristic", "safe")
    assert _layer(made_up) == ("heuristic", HEURISTIC)
    for number, layer in enumerate(reversed(STORED), 4):
        stored[layer] = _named(number)
        assert _layer(made_up) == (layer, _named(number))
    with registry.override("made_up", _named(3)):
        assert _layer(made_up) == ("explicit", _named(3))
    assert _layer(made_up) == ("lock", _named(8))


def test_keys():
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 1024, 1025)] == [1, 1, 2, 4, 1024, 2048]
    assert row_key(1, 1, 2) == (1, 0, 2) and row_key(4096, 4097, 4) == (8192, 12, 4)
    assert row_key(4097, 4096, 2) == (4096, 13, 2)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "config", "reason"),
    [
        (GFX942, LaunchConfig({"BLOCK": 64}, 32), "2048 threads"),
        (SM90, LaunchConfig({"OTHER": 64}), "blocks must be BLOCK"),
    ],
)
def test_illegal_answers_are_refused_with_the_reason(made_up, target, config, reason):
    """tests/backends/test_legality.py has all the rules of a vendor."""
    registry, tunable, stored = made_up
    stored["lock"], stored["shipped-arch"] = config, _named(6)
    assert _layer(made_up, target) == ("shipped-arch", _named(6))
    (explained,) = registry.explain("made_up", (8, 1024), torch.float16, target)
    refused = next(c for c in explained.candidates if c.layer == "lock")
    assert re.search(reason, refused.rejected), refused.rejected


def test_blocks_are_constexpr_parameters_of_the_kernels():
    """A configuration must have the heuristic's blocks, which are parameters of the kernels."""
    from liger_hw import registry

    for tunable in registry.tunables().values():
        names = {name for kernel in tunable.kernels for name in inspect.signature(kernel.fn).parameters}
        names.add("ENGINE")  # what the launcher of a product chooses by: a kernel or a library
        for sizes in registry.get_op(tunable.op).workloads.values():
            key = tunable.key(*sizes, 2)
            for target in (SM90, GFX942):
                heuristic = tunable.heuristic(target, key)
                assert set(heuristic.blocks) <= names, tunable.name
                if heuristic.blocks:
                    assert tunable.illegal(target, key, LaunchConfig({}, 4)), tunable.name
                extra = LaunchConfig({**heuristic.blocks, "BLOCK_OF_NOBODY": 16}, heuristic.num_warps)
                assert "blocks must be" in tunable.illegal(target, key, extra), tunable.name


# -- layer 0 ---------------------------------------------------------------------------------------------------------


def test_environment(made_up, monkeypatch):
    registry, _, _ = made_up
    monkeypatch.setenv("LIGER_HW_CONFIG_MADE_UP", _named(7).to_text())
    assert _layer(made_up) == ("explicit", _named(7))
    monkeypatch.setenv("LIGER_HW_CONFIG_MADE_UP__FWD", _named(8).to_text())
    assert _layer(made_up) == ("explicit", _named(8))
    with registry.override("made_up.fwd", _named(9)):
        assert _layer(made_up) == ("explicit", _named(9))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not a launch configuration"),
        ("[]", "a JSON object"),
        ("[" * 100_000, "recursion depth exceeded"),
        ('{"warps": 4}', "unknown field 'warps'"),
        ('{"num_warps": "4"}', "num_warps must be an integer"),
        ('{"blocks": {"BLOCK": 0}}', "blocks.BLOCK must be a positive integer"),
        ('{"hint": "often"}', "hint must be one of"),
        ('{"blocks": {"BLOCK": 64}, "num_warps": 64}', "64 warps of 32 are 2048 threads"),
    ],
)
def test_a_bad_explicit_configuration_is_ignored_with_a_warning(made_up, monkeypatch, caplog, text, complaint):
    monkeypatch.setenv("LIGER_HW_CONFIG_MADE_UP", text)
    with caplog.at_level(logging.WARNING, "liger_hw"):
        assert _layer(made_up) == ("heuristic", HEURISTIC)
    (warning,) = [r.getMessage() for r in caplog.records if "explicit configuration ignored" in r.getMessage()]
    assert complaint in warning and "made_up.fwd" in warning


def test_override_of_something_unknown(made_up):
    registry, _, _ = made_up
    for scope in ("made_upp", "made_up.bwd"):
        with pytest.raises(ValueError, match="made_up"), registry.override(scope, HEURISTIC):
            pass


def test_overrides_nest_and_end(made_up):
    registry, tunable, _ = made_up
    with registry.override("made_up", _named(4)):
        with pytest.raises(KeyError), registry.override("made_up.fwd", _named(5)):
            assert tunable.plan(CPU, KEY).config == _named(5)
            raise KeyError
        assert tunable.plan(CPU, KEY).config == _named(4)
    assert tunable.plan(CPU, KEY).layer == "heuristic"


# -- failures at launch ----------------------------------------------------------------------------------------------


def test_every_layer_may_fail_and_the_next_answers(made_up, caplog):
    """If one configuration after the other fails at launch, the safe one answers, with a warning for each."""
    from liger_hw.runtime.launch import LaunchFailed
    from liger_hw.runtime.operator import with_fallback

    registry, tunable, stored = made_up
    stored.update({layer: _named(number) for number, layer in enumerate(STORED, 4)})
    registry.reload()
    tried = []

    def launcher():
        plan = tunable.plan(CPU, KEY)
        tried.append(plan.layer)
        if plan.layer != "safe":
            raise LaunchFailed(plan, ValueError("out of resources: shared memory"))
        return "done"

    with caplog.at_level(logging.WARNING, "liger_hw"), registry.pretend(SM90), registry.override("made_up", _named(3)):
        assert with_fallback(launcher)() == "done"
        assert tried == list(LAYERS)
        assert with_fallback(launcher)() == "done" and tried[len(LAYERS) :] == ["safe"]
    messages = [r.getMessage() for r in caplog.records if "quarantined" in r.getMessage()]
    assert len(messages) == len(LAYERS) - 1
    assert all("out of resources: shared memory" in m and "made_up.fwd" in m for m in messages)


@pytest.mark.parametrize("alike", [False, True], ids=["", "the heuristic's too"])
def test_a_failing_safe_configuration_raises_its_own_error(made_up, monkeypatch, alike):
    from liger_hw.runtime.launch import LaunchFailed
    from liger_hw.runtime.operator import with_fallback

    _, tunable, _ = made_up
    if alike:
        monkeypatch.setattr(tunable, "heuristic", tunable.safe)

    def launcher():
        raise LaunchFailed(tunable.plan(CPU, KEY), ValueError("no device code for this GPU"))

    with pytest.raises(ValueError, match="no device code"):
        with_fallback(launcher)()


def test_two_threads_that_ask_at_once_get_one_plan(made_up):
    """A plan keeps its compiled kernels, so that a second plan would not have those that another thread compiles."""
    registry, tunable, _ = made_up
    registry.reload()
    found, heuristic, both = [], tunable.heuristic, threading.Barrier(2)

    def ask():
        both.wait()
        found.append(tunable.plan(CPU, KEY))

    def slow(target, key):
        threading.Event().wait(0.2)
        return heuristic(target, key)

    tunable.heuristic = slow
    in_threads(ask, ask)
    assert found[0] is found[1] is tunable.plan(CPU, KEY)


def test_what_fails_on_one_device_is_set_aside_on_its_twin(made_up, monkeypatch):
    """Each device of one Target has a plan; a failure on one drops both."""
    from liger_hw.runtime.launch import LaunchFailed
    from liger_hw.runtime.operator import with_fallback

    registry, tunable, stored = made_up
    stored["user"] = _named(5)
    registry.reload()
    monkeypatch.setattr(registry, "target_of", lambda device: SM90)
    one, two = (torch.device("cuda", index) for index in range(2))
    other = tunable.plan(one, (2048, 3, 2))
    plans = [tunable.plan(device, KEY) for device in (one, two)]
    assert plans[0] is not plans[1]
    assert all(registry.quarantine(plan, ValueError("boom")) for plan in plans)
    assert [tunable.plan(device, KEY).layer for device in (one, two)] == ["heuristic"] * 2
    assert tunable.plan(one, (2048, 3, 2)) is other, "other keys keep their plan"
    tried = []

    def launcher(device):
        assert len(tried) < 10, "the same plan again and again"
        tried.append(tunable.plan(device, KEY))
        raise LaunchFailed(tried[-1], ValueError("no device code for this GPU"))

    for device in (one, two):
        with pytest.raises(ValueError, match="no device code"):
            with_fallback(launcher)(device)
    assert [plan.layer for plan in tried] == ["heuristic", "safe", "safe"]


def test_what_failed_stays_set_aside_for_this_device_only(made_up):
    registry, tunable, stored = made_up
    stored["user"] = _named(5)
    registry.reload()
    with registry.pretend(SM90):
        registry.quarantine(tunable.plan(CPU, KEY), ValueError("boom"))
        assert tunable.plan(CPU, KEY).layer == "heuristic"
        registry.invalidate()
        assert tunable.plan(CPU, KEY).layer == "heuristic"
        (explained,) = registry.explain("made_up", (8, 1024), torch.float16)
        assert "failed at launch: ValueError: boom" in str(explained)
    with registry.pretend(GFX942):
        assert tunable.plan(CPU, KEY).layer == "user"


# -- determinism, targets, misses ------------------------------------------------------------------------------------


def test_deterministic_keeps_only_neutral_knobs(made_up, monkeypatch):
    registry, tunable, stored = made_up
    stored["user"] = LaunchConfig({"BLOCK": 64}, 16, 4, 3, "stream")
    kept = replace(HEURISTIC, num_stages=4, hint="stream")
    registry.set_deterministic(True)
    assert _layer(made_up) == ("user", kept)
    registry.set_deterministic(False)
    assert _layer(made_up) == ("user", stored["user"])
    registry.set_deterministic(None)
    monkeypatch.setenv("LIGER_HW_DETERMINISTIC", "1")
    assert _layer(made_up) == ("user", kept)


def test_a_configuration_is_lowered_for_the_device(made_up):
    registry, tunable, stored = made_up
    stored["user"] = LaunchConfig({"BLOCK": 64}, ctas_per_mp=3, hint="stream")
    registry.reload()
    for target, hints in ((SM90, ("evict_first", "evict_first")), (GFX942, (".cg", ""))):
        with registry.pretend(target):
            plan = tunable.plan(CPU, KEY)
        assert (plan.constexprs["LOAD_HINT"], plan.constexprs["LOAD_EVICT"]) == hints
        assert plan.programs == 3 * target.multiprocessors


def _missed() -> dict:
    """The misses that this process has not written: (op, variant, key) -> Target."""
    return {name: target for target, lines in store._pending.items() for name, kind, _ in lines if kind == "missed"}


def test_misses_are_recorded_and_hits_are_not(made_up, monkeypatch):
    registry, tunable, stored = made_up
    stored["user"] = _named(5)
    registry.reload()
    monkeypatch.setattr(registry, "target_of", lambda device: SM90)
    tunable.plan(GPU, KEY)
    assert not _missed()
    other = (2048, 3, 2)
    with registry.pretend(GFX942):
        assert tunable.plan(GPU, other).layer == "heuristic"
    assert not _missed(), "what is pretended was not missed"
    tunable.plan(GPU, other)
    assert _missed() == {("made_up", "fwd", other): SM90}


def test_what_a_search_found_no_better_than_the_heuristic_is_no_miss(made_up, monkeypatch):
    registry, tunable, stored = made_up
    stored["user"] = Entry(_named(5), {"kind": "heuristic"})
    registry.reload()
    monkeypatch.setattr(registry, "target_of", lambda device: SM90)
    assert tunable.plan(GPU, KEY).layer == "heuristic" and not _missed()
    stored["user"] = Entry(_named(5), {"kind": "heuristic"}, 99)
    registry.reload()
    assert tunable.plan(GPU, KEY).layer == "heuristic" and _missed(), "of another version of the kernel"


# -- explain ---------------------------------------------------------------------------------------------------------


def test_explain(made_up):
    registry, _, stored = made_up
    stored["lock"] = LaunchConfig({"BLOCK": 64}, 64)
    stored["user"] = Entry(_named(5), {"kind": "measured", "median_us": 12.5}, 1, "/cache/entry.json")
    stored["shipped-arch"] = _named(6)
    registry.reload()
    (found,) = registry.explain("made_up", (8, 1024), torch.float16, "sm90")
    assert found.key == KEY and found.target.arch == "sm90"
    assert [c.layer for c in found.candidates] == ["lock", "user", "shipped-arch", "heuristic", "safe"]
    assert found.chosen.layer == "user"
    text = str(found)
    assert "made_up.fwd on NVIDIA H100" in text and "measured" in text and "/cache/entry.json: taken" in text
    assert f"{_named(5).in_words()} from" in text and _named(5).in_words().startswith("BLOCK=")
    assert "64 warps of 32 are 2048 threads" in text and "a better layer answered" in text
    data = json.loads(json.dumps(found.to_json()))
    assert data["layer"] == "user" and data["config"] == _named(5).to_json() and data["key"] == list(KEY)
    assert data["provenance"]["median_us"] == 12.5 and data["candidates"][0]["rejected"]


def test_explain_refuses_what_it_does_not_know(made_up):
    registry, _, _ = made_up
    with pytest.raises(ValueError, match="did you mean made_up"):
        registry.explain("made_upp", (8, 1024), torch.float16, "sm90")
    with pytest.raises(ValueError, match="n_rows x n_cols"):
        registry.explain("made_up", (8,), torch.float16, "sm90")
    with pytest.raises(ValueError, match="gfx942"):
        registry.explain("made_up", (8, 1024), torch.float16, "gfx9000")


def test_heuristics_and_safe_configurations_are_legal():
    """On each known architecture, at the workloads and at odd widths, one row, heads of 96."""
    from sweep import MANY

    from liger_hw.backends import VENDORS, backend

    for target in (known_target(arch) for vendor in VENDORS for arch in backend(vendor).known_archs()):
        for op in ops.ops().values():
            for tunable in op.tunables:
                sizes = {*op.workloads.values(), *(s for s in MANY.get(op.name, ()) if len(s) == len(tunable.dims))}
                for key in {tunable.key(*shape, itemsize) for shape in sizes for itemsize in (2, 4)}:
                    for config in (tunable.heuristic(target, key), tunable.safe(target, key)):
                        assert tunable.illegal(target, key, config) is None, f"{tunable.name} {key} on {target.arch}"


# -- configurations --------------------------------------------------------------------------------------------------


def test_launch_configurations_are_values():
    import pickle

    a = LaunchConfig({"B": 2, "A": 1}, 8, 2, 1, "keep", {"maxnreg": 64})
    b = LaunchConfig.from_json(json.loads(a.to_text()))
    assert a == b and hash(a) == hash(b) and a.to_text() == b.to_text() and pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(TypeError):
        a.blocks["A"] = 3
    assert a != replace(a, num_warps=4)


def test_registration_is_checked(clean_registry):
    taken = get_op("rms_norm")
    with pytest.raises(ValueError, match="registered twice"):
        clean_registry.register(taken)
    with pytest.raises(ValueError, match="no workloads"):
        clean_registry.register(replace(taken, name="empty_op", workloads={}))


# -- threads and time ------------------------------------------------------------------------------------------------


def test_many_threads_resolve_at_once(made_up):
    """Every thread gets the right plan while another reloads the tables."""
    registry, tunable, stored = made_up
    stored["user"] = _named(5)
    stop = threading.Event()

    def resolve() -> None:
        for i in range(300):
            plan = tunable.plan(CPU, (KEY[0], i % 7, KEY[2]))
            assert plan.key == (KEY[0], i % 7, KEY[2])
            assert plan.config == (_named(5) if plan.key == KEY else HEURISTIC)

    def disturb() -> None:
        while not stop.is_set():
            registry.reload()
            time.sleep(0.001)

    other = threading.Thread(target=disturb)
    other.start()
    try:
        in_threads(*[resolve] * 16)
    finally:
        stop.set()
        other.join()


def test_a_hit_is_one_dictionary_lookup(made_up):
    """A hit calls no further function (benchmarks/registry_cost.py measures its time)."""
    _, tunable, _ = made_up
    tunable.plan(CPU, KEY)
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append((event, arg or frame.f_code.co_name)))
    try:
        tunable.plan(CPU, KEY)
    finally:
        sys.setprofile(None)
    assert [name for event, name in calls if event == "call"] == ["plan"], calls
    assert len([event for event, _ in calls if event == "c_call"]) <= 2, calls
