"""Every op, forward and backward, compiled for every architecture with the configurations users get there.

The launchers are traced (liger_hw/autotune/compile.py) and every launch is compiled: at the first workload with the
heuristic's configurations (depth `quick`; every option set and fp32 on the architectures of DEEP), and with the largest
configurations of every shipped table. A launch must compile, be legal on the target and not spill without a reason in
SPILLS. `make test` compiles every op for DEEP and one architecture of Intel, and an op of each family of kernels for
the others, for option sets, small sizes and shipped tables; `make test LANES=full` all. Every workload with every
option set on every architecture is `ci/evidence.sh`.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness import ONE_OF_A_FAMILY, few_sizes, shipped_tables, small_sizes

from liger_hw import registry
from liger_hw.autotune import compile as aot
from liger_hw.autotune import store
from liger_hw.autotune.workers import CompilePool
from liger_hw.backends import backend, known_target

pytestmark = pytest.mark.aot
RELATIVES = {"sm86": "sm80", "sm89": "sm80", "gfx1151": "gfx1100"}
"""Architecture -> one that the compilers make the same code for: its limits are checked on the other's binaries."""
ARCHS = tuple(a for vendor in ("cuda", "rocm") for a in backend(vendor).known_archs() if a not in RELATIVES)
DEEP = ("sm90", "gfx942")

# (tunable, architectures) -> most registers it may spill, the reason, and the releases of Triton if not all
SPILLS: dict[tuple[str, tuple[str, ...]], tuple[str | int, ...]] = {
    ("cross_entropy.fwd", ("sm90", "sm100")): (2, "with smoothing and a loss a row: ptxas stops at 64"),
    ("dyt.bwd", ("gfx1100", "gfx1201")): (16, "its tiles take all 256 registers; later releases need fewer", "3.5"),
    ("dyt.bwd", ("gfx950",)): (44, "the shipped choice, which took 459 of 512 registers when chosen", "3.5"),
    ("fused_linear_cross_entropy.fwd", ("sm90",)): (2, "the same kernel as cross_entropy"),
    ("fused_linear_cross_entropy.fwd", ("sm100",)): (4, "with the column of the largest logit: ptxas stops at 128"),
    ("fused_neighborhood_attention.fwd", ("sm90",)): (12, "fp32, head of 64: all 255 registers", "3.4", "3.5", "3.6"),
    ("fused_neighborhood_attention.bwd_keys", ("sm90",)): (12, "the same", "3.4", "3.5", "3.6"),
    ("group_norm.fwd", ("sm80", "sm120")): (4, "32 x 32 x 4096 x 512: 80 registers for six programs"),
    ("group_norm.fwd", ("sm100",)): (2, "fp32 groups of 65536: 8 bytes a thread, around one barrier"),
    ("jsd.fwd", ("sm90",)): (2, "labels and a beta between 0 and 1: ptxas stops at 64, takes 71 without labels"),
    ("layer_norm.fwd", ("sm90", "sm100")): (2, "8192 columns with weight and bias, Triton 3.6: ptxas stops at 64"),
    ("modulated_rms_norm.fwd", ("sm90",)): (2, "1024 columns, Triton 3.9: ptxas stops at 96 for five programs"),
    ("modulated_rms_norm.bwd", ("sm80",)): (2, "8 bytes a thread with three tiles in flight"),
    ("multi_token_attention.channels_fill", ("sm100", "sm120")): (20, "ptxas stops at 80 registers"),
    ("multi_token_attention.channels_fill", ("sm90",)): (6, "the same, only by the ptxas of Triton 3.5", "3.5"),
    ("sparsemax.bwd", ("sm80",)): (16, "32768 columns held by 512 threads; another read would cost more"),
}


@pytest.fixture(scope="module")
def workers():
    processes = max(1, (os.cpu_count() or 2) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    with CompilePool(min(processes, 8)) as workers:
        yield workers


def _allowed_spills(tunable: str, arch: str) -> int:
    here = store.minor(store.triton_version())
    found = [
        most
        for (name, archs), (most, _, *only) in SPILLS.items()
        if name == tunable and arch in archs and here in (only or [here])
    ]
    return max(found, default=0)


@pytest.mark.daily(arch=DEEP)
@pytest.mark.daily(op=ONE_OF_A_FAMILY)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(op, arch, workers, record_property):
    _compiles(op, arch, "quick", workers, record_property)


@pytest.mark.daily(arch="sm90", op=ONE_OF_A_FAMILY)
@pytest.mark.parametrize("arch", DEEP)
def test_every_option_compiles(op, arch, workers, record_property):
    """Every option set, and fp32."""
    _compiles(op, arch, "deep", workers, record_property)


def _refuses(op, target):
    """Whether a target cannot run an op; the op must then raise the reason."""
    why_not = op.why_not(target)
    if why_not:
        with pytest.raises(ValueError, match=re.escape(why_not)):
            aot.trace(op.name, small_sizes(op)[0], torch.bfloat16, target)
    return bool(why_not)


def _compiles(op, arch, depth, workers, record_property):
    target = known_target(arch)
    if _refuses(op, target):
        return
    launches = [launch for _, launch in aot.trace_cases(op, target, depth, shipped=False)]
    reached = {launch.tunable for launch in launches}
    certificates = list(aot.certify(launches, workers))
    assert len(certificates) == len(launches)
    record_property("kernels", len({launch.compile_key() for launch in launches}))
    failed = Counter(f"{c}" for c in certificates if c.error)
    assert not failed, _listed("did not compile", failed)
    illegal = Counter(f"{c}" for c in certificates if c.illegal)
    assert not illegal, _listed("may not be launched", illegal)
    spilled = Counter(str(c) for c in certificates if c.resources.spills > _allowed_spills(c.launch.tunable, arch))
    assert not spilled, _listed("spilled registers without a reason in SPILLS", spilled)
    assert reached, f"{op.name} launched nothing"


@pytest.mark.daily(arch="sm89", op=ONE_OF_A_FAMILY)
@pytest.mark.parametrize("arch", ["sm89", "sm90"])
def test_small_sizes_compile(op, arch, workers):
    """Tiles of one element or one warp take other paths through the compiler, some of which crash it: LLVM's vectoriser
    in Triton 3.9 for both architectures, and in 3.8 for sm89."""
    target = known_target(arch)
    sizes = (few_sizes(op), small_sizes(op)[1])
    launches = [one for few in sizes for one in aot.trace(op.name, few, torch.bfloat16, target, shipped=False)]
    assert launches, f"{op.name} launched nothing"
    failed = Counter(f"{c}" for c in aot.certify(launches, workers) if not c.ok)
    assert not failed, _listed("did not compile or may not be launched", failed)


def _listed(what: str, found: Counter) -> str:
    lines = [f"  {text}" + (f" ({count} times)" if count > 1 else "") for text, count in found.most_common(12)]
    return f"{len(found)} launches {what}:\n" + "\n".join(lines)


TABLES = shipped_tables()
PAIRS = sorted({(table, name) for table, entries in TABLES.items() for (name, _, _), _ in entries})


def _appetite(entry) -> int:
    """Elements of a configuration's tiles in flight."""
    return math.prod(entry.config.blocks.values()) * max(1, entry.config.num_stages)


def _current_entries(table, name):
    """({tunable: [(key, entry)]} of an op in a shipped table, how many entries are of another version)"""
    op, current, stale = registry.get_op(name), {}, 0
    for (made_for, variant, key), entry in TABLES[table]:
        tunable = next((t for t in op.tunables if t.variant == variant), None)
        if made_for != name or tunable is None or entry.version != tunable.version:
            stale += made_for == name
            continue
        current.setdefault(tunable, []).append((key, entry))
    return current, stale


def _target_of(table):
    return known_target(table.split("/")[1].split("-")[0])


@pytest.mark.parametrize("table", TABLES)
def test_every_shipped_entry_is_legal(table):
    for name in (name for of, name in PAIRS if of == table):
        for tunable, entries in _current_entries(table, name)[0].items():
            for key, entry in entries:
                assert not tunable.illegal(_target_of(table), key, entry.config), f"{table}: {tunable.name} {key}"


@pytest.mark.daily(
    table=tuple(table for table in TABLES if table.split("/")[1].split("-")[0] in DEEP), name=ONE_OF_A_FAMILY
)
@pytest.mark.parametrize(("table", "name"), PAIRS)
def test_shipped_tables(table, name, workers, record_property):
    """The largest entry of each tunable, and the last by key, compiled at their sizes. A measured entry may spill a
    little and still be the fastest."""
    op, target = registry.get_op(name), _target_of(table)
    current, stale = _current_entries(table, name)
    record_property("stale", stale)
    measured = {}
    for tunable, entries in current.items():
        for key, entry in (max(entries, key=lambda item: _appetite(item[1])), entries[-1]):
            sizes, dtype = entry.provenance["sizes"], getattr(torch, entry.provenance["dtype"])
            found = aot.trace(op.name, sizes, dtype, target, configs={tunable.name: entry.config}, shipped=False)
            chosen = [launch for launch in found if launch.tunable == tunable.name and launch.key == key]
            assert chosen, f"{table}: {tunable.name} {key} is not what {sizes} launches"
            measured |= dict.fromkeys(chosen, entry.provenance.get("kind") == "measured")
    for certificate in aot.certify(measured, workers):
        assert certificate.ok and certificate.launch.layer == "explicit", str(certificate)
        most = 64 if measured[certificate.launch] else _allowed_spills(certificate.launch.tunable, target.arch)
        assert certificate.resources.spills <= most, str(certificate)
        for relative in map(known_target, backend(target.vendor).known_archs()):
            takes_entries = (relative.family, relative.warp_size) == (target.family, target.warp_size)
            if takes_entries:
                assert not backend(target.vendor).illegal_resources(relative, certificate.resources), relative.arch


@pytest.mark.daily(arch=("sm89", "gfx1151"), op=ONE_OF_A_FAMILY)
@pytest.mark.parametrize("arch", RELATIVES)
def test_relatives(op, arch, workers):
    """The launches of an architecture, compiled for its relative, are within its limits."""
    target, other = known_target(arch), known_target(RELATIVES[arch])
    if _refuses(op, target):
        return
    other = target if op.why_not(other) else other
    launches = [replace(launch, target=other) for _, launch in aot.trace_cases(op, target, "quick", shipped=False)]
    assert launches
    for certificate in aot.certify(launches, workers):
        assert not certificate.error, str(certificate)
        assert not backend(target.vendor).illegal(target, certificate.launch.config), str(certificate)
        assert not backend(target.vendor).illegal_resources(target, certificate.resources), str(certificate)


@pytest.mark.parametrize("arch", RELATIVES)
def test_relatives_are_alike(arch, workers):
    """An op compiled for both has the same spills, shared memory and widths, and about as many registers."""
    launches = _first(arch, shipped=False)
    twins = [replace(launch, target=known_target(RELATIVES[arch])) for launch in launches]
    mine, theirs = ({c.launch.kernel: c.resources for c in aot.certify(found, workers)} for found in (launches, twins))
    assert mine.keys() == theirs.keys() and mine
    for a, b in ((mine[kernel], theirs[kernel]) for kernel in mine):
        assert (a.spills, a.shared, a.loads, a.stores) == (b.spills, b.shared, b.loads, b.stores)
        assert abs(a.registers - b.registers) <= 0.25 * b.registers


MATRIX_INSTRUCTIONS = {"sm80": "mma.sync", "sm90": "wgmma", "gfx942": "v_mfma_", "gfx1100": "v_wmma_"}


@pytest.mark.daily(arch=("sm90", "gfx942"))
@pytest.mark.parametrize("arch", MATRIX_INSTRUCTIONS)
def test_products_of_experts_use_matrix_instructions(arch):
    """A `tl.dot` of types that do not fit is silently compiled to fused multiply-adds."""
    sizes = registry.get_op("fused_moe").workloads["qwen3_30b_a3b"]
    launches = aot.trace("fused_moe", sizes, torch.bfloat16, known_target(arch), shipped=False)
    products = {one.kernel: one for one in launches if one.tunable.endswith((".down", ".up_weights"))}
    assert len(products) == 2
    for one in products.values():
        compiled = aot.build(one.target, one.kernel, one.args, dict(one.options))
        text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
        assert MATRIX_INSTRUCTIONS[arch] in text, one.kernel


# -- the compiler's own tests ----------------------------------------------------------------------------------------


def _first(arch="gfx942", **more):
    return aot.trace("rms_norm", (8192, 4096), torch.bfloat16, known_target(arch), **more)


def test_what_is_recorded():
    launches = _first()
    assert [launch.tunable for launch in launches][:2] == ["rms_norm.fwd", "rms_norm.bwd"]
    forward = launches[0]
    assert forward.layer == "heuristic" and forward.kernel == "liger_hw.kernels.norms.forward:_norm_fwd_kernel"
    assert forward.args[0] == ("ptr", "bfloat16", True, True)
    assert dict(forward.options)["num_warps"] == forward.config.num_warps
    assert forward.grid == (-(-8192 // forward.config.blocks["ROWS"]),)


def test_specialisation_is_that_of_the_launch():
    """A tensor past 2 GiB loses AMD's 32-bit pointer range, and an odd width its divisibility, so both are other
    kernels."""

    def forward(rows, cols):
        return aot.trace("rms_norm", (rows, cols), torch.bfloat16, known_target("gfx942"))[0]

    assert forward(8192, 4096).compile_key() == forward(8000, 4096).compile_key()
    assert forward(8192, 4096).compile_key() != forward(8192, 4095).compile_key()
    assert forward(8192, 4096).args[0] != forward(1 << 19, 4096).args[0] == ("ptr", "bfloat16", True, False)


def test_tracing_leaves_the_registry_alone():
    from liger_hw.runtime.launch import observers

    before = dict(store._pending)
    _first()
    assert store._pending == before and not observers and registry.pretended() is None
    assert all(plan.target.arch == "cpu" for plan in registry.plans())


@pytest.mark.parametrize("arch", ["sm90", "bmg"])
def test_compiling_in_this_process_leaves_tritons_driver_as_it_was(arch):
    from triton.runtime import driver

    before = dict(vars(driver))
    launch = aot.trace("relu_squared", (4, 64), torch.float32, known_target(arch))[0]
    assert aot.certificate_from(launch, aot.compiled(launch)).level == ("ttir" if arch == "bmg" else "binary")
    assert vars(driver) == before


def test_the_certificate_of_a_known_kernel(workers):
    for arch in ("gfx942", "gfx1100", "sm90"):
        certificate = next(iter(aot.certify(_first(arch)[:1], workers)))
        r = certificate.resources
        assert certificate.ok and r.spills == 0 and r.scratch == 0
        assert 16 <= r.registers <= 255 and 0 < r.occupancy <= 1
        assert r.threads == certificate.launch.config.num_warps * certificate.launch.target.warp_size
        assert max(r.loads) == max(r.stores) == 128 and r.instructions["load"] == sum(r.loads.values())
        assert certificate.to_json()["resources"]["registers"] == r.registers


def test_a_configuration_that_spills_is_seen(workers):
    """4 warps cannot hold a row of 65536 columns."""
    from liger_hw.backends import LaunchConfig

    wide = {"rms_norm.fwd": LaunchConfig({"BLOCK_SIZE": 65536, "ROWS": 1}, 4)}
    for arch in ("gfx1100", "sm90"):
        launches = aot.trace("rms_norm", (64, 65536), torch.float32, known_target(arch), configs=wide)
        (certificate,) = aot.certify(launches[:1], workers)
        r = certificate.resources
        assert r.spills > 500 and r.scratch > 2000, certificate


def test_what_compiles_may_still_be_illegal():
    """96 KiB of LDS compile for gfx942 and cannot be launched there."""
    from liger_hw.backends.base import Resources

    launch = _first()[0]
    certificate = aot.Certificate(launch, Resources(32, 0, 0, 96 * 1024, 256, 1.0))
    assert "98304 bytes of shared memory" in certificate.illegal and not certificate.ok


def test_a_crash_of_the_compiler_ends_no_run(tmp_path, monkeypatch):
    """The next kernel compiles in a new process. tests/autotune/test_worker.py has the other ways to fail."""
    (tmp_path / "aborts.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    launch = _first()[0]
    with CompilePool(1) as fresh:
        crashed, good = aot.certify([replace(launch, kernel="aborts:kernel"), launch], fresh)
    assert crashed.error.startswith("the compiler crashed (signal 6)") and not crashed.resources
    assert good.ok and not good.error


def test_an_unknown_option_is_an_error(workers):
    launch = _first()[0]
    (certificate,) = aot.certify([replace(launch, options=(*launch.options, ("grf_mode", "256")))], workers)
    assert "grf_mode" in certificate.error


def test_launches_alike_are_compiled_once(workers):
    launches = _first() * 3
    certificates = list(aot.certify(launches, workers))
    assert len(certificates) == len(launches)
    seconds = {(c.launch.compile_key(), c.seconds) for c in certificates}
    assert len(seconds) == len({launch.compile_key() for launch in launches})


@pytest.mark.daily(arch="pvc")
@pytest.mark.parametrize("arch", backend("xpu").known_archs())
def test_intel_down_to_ttir(op, arch, workers, record_property):
    """The stock Triton has no compiler for Intel: kernels are specialised, type-checked and simplified. Launches are
    legal and no tile outgrows the register file."""
    if _refuses(op, known_target(arch)):
        return
    launches = [launch for _, launch in aot.trace_cases(op, known_target(arch), "quick")]
    certificates = list(aot.certify(launches, workers))
    assert len(certificates) == len(launches) > 0
    wrong = Counter(str(c) for c in certificates if not c.ok)
    assert not wrong, _listed("are wrong", wrong)
    assert all(c.level == "ttir" and c.accesses for c in certificates), "every tensor's loads and stores can be told"
    record_property("kernels", len({launch.compile_key() for launch in launches}))


def test_what_ttir_says_is_near_what_a_compiler_makes(workers, monkeypatch):
    """Counted from TTIR and read from the binary, for a target that has a compiler."""
    (exact,) = aot.certify(_first("sm90")[:1], workers)
    monkeypatch.setattr(backend("cuda"), "triton_target", lambda target: None)
    launch = _first("sm90")[0]
    counted = aot.certificate_from(launch, aot.compiled(launch))
    assert counted.level == "ttir" and exact.level == "binary" and counted.accesses == exact.accesses
    a, b = counted.resources, exact.resources
    assert a.threads == b.threads and a.loads[128] == b.loads[128] and a.stores[128] == b.stores[128]
    assert 0.5 < sum(a.instructions.values()) / sum(b.instructions.values()) < 2
    registers = a.registers + a.spills  # a.registers is cut to the register file of Intel
    assert 0.5 < registers / b.registers < 3
