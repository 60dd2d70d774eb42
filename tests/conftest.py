"""Lanes, devices and hermetic state for every test.

A lane is a marker for the hardware that a test needs: cpu, interpret, aot, gpu, multigpu (see pyproject.toml). A test
with the fixture `lane` runs in cpu, interpret and gpu (fewer with `@pytest.mark.lanes(...)`), and once for each dtype
that is exact in the lane if it has `dtype` too. Fixture `op` is each registered op, `case` each op with each of its
option sets. Other tests without a lane marker are cpu tests. Lanes that this process cannot run are skipped. `pytest -m
interpret` starts the interpreter; otherwise a process interprets kernels if LIGER_HW_INTERPRET=1.

`make test` leaves out tests marked `full`, which repeat a proof with more ops, families, options, dtypes or
architectures. `@pytest.mark.daily(*lanes, **values)` marks as `full`, in these lanes (default: all that need no GPU),
all parameters but those with these values; several such marks on a test add up. A value is the text of a parameter, or
a tuple of texts. A `case` has the values `op` and `options`, which is "default" or "other".

`@pytest.mark.memory(GIB, op=GIB)`: the device memory that a test of the gpu lane needs, if much. Devices with less skip
the test; `ci/test.sh` runs such tests in one process.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

LANES = ("cpu", "interpret", "aot", "gpu", "multigpu")
_WITHOUT_GPU = LANES[:3]
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Lane:
    """Where a shared test body runs. dtypes: those that are exact enough to test there"""

    name: str
    device: str
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


_DTYPES = {
    "cpu": ("float32", "bfloat16"),
    "interpret": ("float32", "float16"),  # bf16 arithmetic is wrong in Triton's interpreter
    "gpu": ("float32", "float16", "bfloat16"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default=None, help="torch device of the gpu lane (default: the current accelerator)")


def pytest_configure(config: pytest.Config) -> None:
    if _lane_of_run(config) == "interpret":
        os.environ["LIGER_HW_INTERPRET"] = "1"
    config.addinivalue_line("markers", "lanes(*names): the lanes a test with the fixture `lane` runs in; default all")
    config.addinivalue_line("markers", "daily(*lanes, **values): other values of these parameters are `full`")
    config.addinivalue_line("markers", "memory(gib, **gib_of_op): device memory a test takes at its highest, if much")
    config.addinivalue_line("markers", "unpoisoned: uninitialised memory is left as it is")
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    for name in [n for n in os.environ if n.startswith("LIGER_HW_") and n != "LIGER_HW_INTERPRET"]:
        del os.environ[name]
    os.environ.pop("COLUMNS", None)  # else tables are folded, which a test that wants it asks for
    cache = tempfile.mkdtemp(prefix="liger_hw-tests-")
    os.environ["LIGER_HW_CACHE_DIR"] = cache  # never the user's
    os.environ["LIGER_HW_CPU_REFERENCE"] = "1"  # a patched model computes what the kernels do, not its own code twice
    if "liger_hw.env" in sys.modules:  # a conftest that is loaded before this has made it read the environment
        sys.modules["liger_hw.env"].clear()

    def forget() -> None:
        store = sys.modules.get("liger_hw.autotune.store")
        if store is not None:
            store.mute()  # else misses are written into the removed folder at exit
        shutil.rmtree(cache, ignore_errors=True)

    config.add_cleanup(forget)


def _lane_of_run(config: pytest.Config) -> str | None:
    """The lane of `-m LANE` or `-m "LANE and ..."`."""
    first = config.getoption("markexpr", "").split(" and ")[0].strip()
    return first if first in LANES else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without the name of the chosen lane and without the word `lane` has no test of it and is not imported."""
    lane_of_run = _lane_of_run(config)
    if lane_of_run in (None, "cpu") or collection_path.suffix != ".py":
        return None
    words = (lane_of_run, "lane") if lane_of_run in _DTYPES else (lane_of_run,)
    return True if not re.search(rf"\b({'|'.join(words)})\b", collection_path.read_text()) else None


def interprets() -> bool:
    """Whether this process runs kernels in the interpreter."""
    return os.environ.get("LIGER_HW_INTERPRET") == "1" or os.environ.get("TRITON_INTERPRET") == "1"


def gpu_device(config: pytest.Config) -> str | None:
    """The device of the gpu lane, or None when there is no accelerator."""
    import torch

    chosen = config.getoption("--device")
    if chosen and torch.device(chosen).type != "cpu":
        return chosen
    if chosen is None and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        return f"{device.type}:{torch.get_device_module(device.type).current_device()}"
    return None


def why_not(lane: str, config: pytest.Config) -> str | None:
    """Why this process cannot serve a lane, or None."""
    if lane == "interpret":
        if not interprets():
            return "kernels are not interpreted in this process: pytest -m interpret, or LIGER_HW_INTERPRET=1"
        return _no_triton()
    if interprets():
        return f"kernels are interpreted in this process: run pytest -m {lane} in one without LIGER_HW_INTERPRET"
    if lane == "aot":
        return _no_triton()
    if lane in ("gpu", "multigpu"):
        device = gpu_device(config)
        if device is None:
            return "torch sees no accelerator here" + (" (--device cpu)" if config.getoption("--device") else "")
        if lane == "multigpu":
            import torch

            count = torch.accelerator.device_count()
            return f"needs two GPUs, this machine has {count}" if count < 2 else None
    return None


def _no_triton() -> str | None:
    from liger_hw.runtime import triton_import as _triton

    return None if _triton.AVAILABLE else "Triton is not installed"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = set(metafunc.fixturenames) - set(
        getattr(metafunc, "_arg2fixturedefs", ())
    )  # a fixture of that name goes first
    for mark in metafunc.definition.iter_markers("parametrize"):
        argnames = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names -= {name.strip() for name in (argnames.split(",") if isinstance(argnames, str) else argnames)}
    if "lane" in names:
        device = gpu_device(metafunc.config) or "none"
        chosen = next((mark.args for mark in metafunc.definition.iter_markers("lanes")), tuple(_DTYPES))
        lane_of_run = _lane_of_run(metafunc.config)
        chosen = [name for name in chosen if name == lane_of_run] or chosen  # the others would be deselected
        lanes = [Lane(name, device if name == "gpu" else "cpu", _DTYPES[name]) for name in chosen]
        marks = {lane: getattr(pytest.mark, lane.name) for lane in lanes}
        if "dtype" in names:
            import torch

            pairs = [(lane, name) for lane in lanes for name in lane.dtypes]
            values = [pytest.param(l, getattr(torch, n), marks=marks[l], id=f"{l}-{n}") for l, n in pairs]
            metafunc.parametrize(("lane", "dtype"), values)
        else:
            metafunc.parametrize("lane", [pytest.param(lane, marks=marks[lane], id=lane.name) for lane in lanes])
    if "op" in names or "case" in names:
        from liger_hw import registry

        ops = registry.ops().values()
        if "op" in names:
            metafunc.parametrize("op", list(ops), ids=[op.name for op in ops])
        else:
            cases = [(op, options) for op in ops for options in op.options]
            ids = [f"{op.name}-{_name(options)}" for op, options in cases]
            metafunc.parametrize("case", cases, ids=ids)


def _name(options: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items()).replace("/", "_") or "default"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons: dict[str, str | None] = {}
    for item in items:
        lanes = [name for name in LANES if item.get_closest_marker(name)]
        if not lanes:
            item.add_marker("cpu")
            lanes = ["cpu"]
        for lane in lanes:
            if lane not in reasons:
                reasons[lane] = why_not(lane, config)
            if reasons[lane]:
                item.add_marker(pytest.mark.skip(reason=f"lane {lane}: {reasons[lane]}"))
            if lane in _WITHOUT_GPU and not _runs_daily(item, lane):
                item.add_marker("full")
        if "gpu" in lanes and (needed := _memory_of(item)) and not reasons["gpu"]:
            if needed > (gib := _gib_of(gpu_device(config))):
                item.add_marker(pytest.mark.skip(reason=f"takes {needed} GiB of device memory, this one has {gib:.0f}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage collections need not look again through what was imported by now."""
    gc.collect()
    gc.freeze()


def _memory_of(item: pytest.Item) -> float:
    """The GiB of a test's mark `memory`, for its op if the mark names it; 0 without a mark."""
    mark = item.get_closest_marker("memory")
    if mark is None:
        return 0
    from liger_hw import registry

    if unknown := mark.kwargs.keys() - registry.ops().keys():
        raise pytest.UsageError(f"{item.nodeid}: memory names {sorted(unknown)}, which are no ops")
    return mark.kwargs.get(_values(item).get("op"), mark.args[0])


def _gib_of(device: str) -> float:
    import torch

    kind = torch.device(device).type
    return torch.get_device_module(kind).get_device_properties(device).total_memory / 2**30


def _runs_daily(item: pytest.Item, lane: str) -> bool:
    """Whether `make test` runs a test, by its marks `daily`."""
    values = _values(item)
    chosen = [mark.kwargs for mark in item.iter_markers("daily") if lane in (mark.args or _WITHOUT_GPU)]
    if not chosen and lane == "interpret" and values.get("dtype") == "float16":
        # A kernel's branches do not depend on its dtype; float16 adds the casts, which test_numerics.py runs.
        return False
    if unknown := {name for kwargs in chosen for name in kwargs} - values.keys():
        raise pytest.UsageError(f"{item.nodeid}: daily names {sorted(unknown)}, which are no parameters of the test")
    return not chosen or any(
        all(values[name] in (texts if isinstance(texts, tuple) else (texts,)) for name, texts in kwargs.items())
        for kwargs in chosen
    )


def _values(item: pytest.Item) -> dict[str, str]:
    """The parameters of a test as marks `daily` write them."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    if "case" in params and isinstance(params["case"], tuple):
        op, options = params["case"]
        params |= {"op": op, "options": "default" if options == op.options[0] else "other"}
    return {name: getattr(value, "name", str(value).removeprefix("torch.")) for name, value in params.items()}


@pytest.fixture(scope="session", autouse=True)
def _interpreter():
    if not interprets() or _no_triton():
        yield
        return
    import interpreting

    with pytest.MonkeyPatch.context() as patch:
        interpreting.maxima_of_a_device(patch)
        interpreting.faster(patch)
        yield


@pytest.fixture
def gpu(pytestconfig: pytest.Config) -> str:
    """The device of the gpu lane, for tests of only that lane."""
    device = gpu_device(pytestconfig)
    assert device is not None, "mark the test with pytest.mark.gpu"
    return device


@pytest.fixture(autouse=True)
def _memory_released(request: pytest.FixtureRequest):
    """After a test of the gpu lane, torch frees the memory that it has cached."""
    yield
    if request.node.get_closest_marker("gpu") and (device := gpu_device(request.config)):
        import torch

        torch.get_device_module(torch.device(device).type).empty_cache()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the test, the same in every run."""
    return zlib.crc32(request.node.name.encode())


@pytest.fixture
def generator(seed: int):
    """A seeded CPU generator."""
    import torch

    return torch.Generator().manual_seed(seed)


@pytest.fixture
def set_env():
    """Sets a variable that liger_hw reads, until the end of the test."""
    from liger_hw import env

    with pytest.MonkeyPatch.context() as patch:

        def set_variable(name: str, value: object) -> None:
            patch.setenv(name, str(value))
            env.clear()

        yield set_variable
    env.clear()


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch):
    """`runtime.operator.define` for operators that are removed after the test."""
    import torch

    from liger_hw.runtime import operator

    library = torch.library.Library("liger_hw", "FRAGMENT")
    monkeypatch.setattr(operator, "_library", library)
    tables = operator.declared, operator.launchers
    known = [set(table) for table in tables]
    yield operator.define
    for table, names in zip(tables, known):
        for name in set(table) - names:
            del table[name]
    library._destroy()


@pytest.fixture
def one_rank():
    """A gloo process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The registry without anything resolved, stored, overridden or quarantined, before and after the test."""
    from liger_hw import registry

    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / "cache"))
    registry.reset()
    yield registry
    monkeypatch.undo()
    registry.reset()


@pytest.fixture
def on_sm90(clean_registry):
    """The registry answers as on an sm90 device."""
    from liger_hw import registry
    from liger_hw.backends import known_target

    with registry.pretend(known_target("sm90")):
        yield


@pytest.fixture
def no_failed_configuration():
    """Fails a test if a configuration was quarantined in it."""
    from liger_hw import registry

    before = registry.quarantined()
    yield
    failed = {mark: why for mark, why in registry.quarantined().items() if mark not in before}
    if failed:
        registry.reset()
    assert not failed, "\n".join(
        f"{arch} {name} {key} {config}: {why}" for (arch, name, key, config), why in failed.items()
    )
