"""The shipped tables of GPUs that are not here: each made for its own device, and how they are kept current."""

from __future__ import annotations

from itertools import combinations

import pytest
import static_tables
from harness import shipped_tables

from liger_hw import registry
from liger_hw.autotune import static, store
from liger_hw.autotune.jobs import Job, Result
from liger_hw.backends import VENDORS, backend, known_target
from liger_hw.registry import Entry
from tests.autotune.fakes import other_config, tunable

TABLES = {name: dict(entries) for name, entries in shipped_tables().items()}
ARCHS = [(vendor, arch) for vendor in VENDORS if vendor != "cpu" for arch in backend(vendor).known_archs()]
RESOURCES = ("registers", "spills", "shared", "occupancy")

# -- what ships ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vendor", "arch"), ARCHS)
def test_every_architecture_ships_a_table(vendor, arch):
    assert [table for table in TABLES if table.split("-")[0] == f"{vendor}/{arch}"]


@pytest.mark.parametrize("table", TABLES)
def test_entries_are_of_their_own_device(table):
    """Each entry names the table's device, and only entries for NVIDIA GPUs were timed."""
    vendor, stem = table.split("/")
    target = known_target(stem.split("-")[0])
    compiles = backend(vendor).triton_target(target) is not None
    for name, entry in TABLES[table].items():
        facts, kind = entry.provenance, entry.provenance["kind"]
        if kind == "measured":
            assert vendor == "cuda" and store.slug(facts["device"]) in stem, f"{table} {name}"
            continue
        assert kind == ("static" if compiles else "modelled"), f"{table} {name}: {kind}"
        assert facts["device"] == target.name, f"{table} {name} was made for {facts['device']}"
        assert {*RESOURCES, "triton", "date", "sizes", "dtype", "predicted_us", "heuristic_us"} <= set(facts)
        assert facts["gain"] > static.MARGINS["binary" if compiles else "ttir"] and facts["spills"] == 0
        assert not {"median_us", "p20", "p80"} & set(facts), f"{table} {name} looks timed"


def test_no_two_vendors_ship_the_same_choices():
    """Unless the certificates show the same resources, entry by entry."""
    for (one, a), (other, b) in combinations(TABLES.items(), 2):
        if one.split("/")[0] == other.split("/")[0] or a.keys() != b.keys():
            continue
        differ = [name for name in a if a[name].config != b[name].config]
        alike = all(a[n].provenance.get(fact) == b[n].provenance.get(fact) for n in a for fact in RESOURCES)
        assert differ or alike, f"{one} and {other} hold the same configurations"


# -- how they are kept current ---------------------------------------------------------------------------------------


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """benchmarks/static_tables.py, with its tables and records in an empty folder."""
    monkeypatch.setattr(static_tables, "JUDGED", tmp_path / "judged.json")
    monkeypatch.setattr(store, "shipped_folder", lambda vendor: tmp_path / vendor)
    return static_tables


TARGET = known_target("gfx1151")
JOB = Job("rms_norm", "fwd", (4096, 14, 2), (16384, 4096), "bfloat16")
NAME = (JOB.op, JOB.variant, JOB.key)


class FakeTuner:
    """Chooses `config` if it is allowed, and notes its calls."""

    def __init__(self, config, spills=0) -> None:
        self.config, self.spills, self.asked, self.save = config, spills, [], None

    def choose(self, job, among=None):
        self.asked.append((job.name, among))
        result = Result(job, gain=0.2, tried=3, note="chosen by the model")
        if self.config is None or (among is not None and self.config not in among):
            result.note = "the heuristic stays"
        else:
            result.provenance = {"kind": "static", "sizes": list(job.sizes), "dtype": job.dtype, "spills": self.spills}
            entry = Entry(self.config, result.provenance, tunable().version)
            self.save((job.op, job.variant, job.key), entry)
        return result


def _arch(tool):
    return tool.Arch(TARGET.arch, tool.read_judged())


@pytest.mark.aot
def test_a_job_is_judged_once(tool, monkeypatch):
    config = other_config(tunable(), TARGET, JOB.key)
    arch = _arch(tool)
    jobs = arch.searches(["rms_norm"])
    assert JOB.name in {job.name for job in jobs} and len(jobs) == 3
    for job in jobs:
        arch.judge(job, FakeTuner(config if job.name == JOB.name else None), False)
    arch.write()
    again = _arch(tool)
    assert again.searches(["rms_norm"]) == [] and {n: e.config for n, e in again.entries.items()} == {NAME: config}
    assert {found["answer"] for found in again.judged.values()} == {"entry", "heuristic"}
    monkeypatch.setattr(registry.get_tunable("rms_norm.dw"), "version", 99)
    assert {job.name for job in _arch(tool).searches(["rms_norm"])} == {"rms_norm.dw"}


@pytest.mark.aot
@pytest.mark.parametrize("still_good", [True, False])
def test_a_stale_entry_is_held_against_the_heuristic(tool, still_good):
    config = other_config(tunable(), TARGET, JOB.key)
    provenance = {"kind": "static", "sizes": list(JOB.sizes), "dtype": JOB.dtype}
    gone = ("rms_norm", "fwd", (1, 2, 3))
    tool.write(TARGET, {NAME: Entry(config, provenance, 99), gone: Entry(config, provenance, 99)})
    arch = _arch(tool)
    (job,) = arch.rechecks(["rms_norm"])
    assert (job.name, job.key, job.sizes) == (JOB.name, JOB.key, JOB.sizes) and gone not in arch.entries
    tuner = FakeTuner(config if still_good else None)
    said = arch.judge(job, tuner, True)
    assert tuner.asked == [(JOB.name, [config])] and said.startswith("stays" if still_good else "goes")
    arch.write()
    after = _arch(tool)
    assert {n: e.version for n, e in after.entries.items()} == ({NAME: tunable().version} if still_good else {})
    assert not after.rechecks(["rms_norm"]) and after.judged == {}, "a recheck is no search"


@pytest.mark.aot
def test_what_was_measured_stays(tool):
    config = other_config(tunable(), TARGET, JOB.key)
    tool.write(
        TARGET,
        {NAME: Entry(config, {"kind": "measured", "sizes": [1, 1], "dtype": "bfloat16"}, tunable().version)},
    )
    arch = _arch(tool)
    assert arch.judge(JOB, FakeTuner(config), False) == "measured" and not arch.rechecks(["rms_norm"])
    assert arch.entries[NAME].provenance["kind"] == "measured"


@pytest.mark.aot
def test_a_choice_that_spills_does_not_ship(tool):
    """The tuner may choose it if the heuristic spills too, but no entry of a table spills."""
    arch = _arch(tool)
    said = arch.judge(JOB, FakeTuner(other_config(tunable(), TARGET, JOB.key), spills=4), False)
    assert said == "the heuristic stays: the choice spills" and not arch.entries
    assert [found["answer"] for found in arch.judged.values()] == ["heuristic"]
