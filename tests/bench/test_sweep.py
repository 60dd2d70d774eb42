"""One list of cases and several processes; the lists of many shapes."""

from __future__ import annotations

import json
import math

import pytest
import sweep
import torch
from share import Share

from liger_hw import registry
from liger_hw.bench import cases
from liger_hw.bench.timing import Budget


@pytest.fixture
def two_shapes(monkeypatch):
    """The list `many` of two ops with two small shapes each."""
    monkeypatch.setattr(sweep, "MANY", dict.fromkeys(("rms_norm", "swiglu"), ((8, 16), (9, 16))))


COMMAND = ("many", "rms_norm", "swiglu", "--dtype", "fp32", "--device", "cpu", "--repeats", "1", "--against", "torch")


def todo():
    return cases.cases(["rms_norm"], ["8x16", "9x16", "10x16"])


@pytest.mark.parametrize("name", sorted(sweep.MANY))
def test_many_shapes_are_forty_that_the_op_takes(name):
    shapes = sweep.MANY[name]
    assert len(set(shapes)) == len(shapes) >= 40
    op = registry.get_op(name)
    assert all(len(shape) == len(op.tunables[0].dims) and min(shape) > 0 for shape in shapes)
    for shape in sorted(shapes, key=math.prod)[:4]:
        op.sample(shape, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    if name in ("rms_norm", "swiglu", "softmax"):
        rows, columns = zip(*shapes)
        assert 1 in rows and max(rows) == 131072 and any(width % 2 for width in columns) and (1, 512) in shapes


def test_a_size_may_name_its_dtype():
    (case,) = cases.cases(["jsd"], ["8x16@fp32"])
    assert case.dtype is torch.float32 and str(case) == "jsd 8x16 float32"
    with pytest.raises(ValueError, match="unknown dtype 'fp8'"):
        cases.cases(["jsd"], ["8x16@fp8"])


def test_two_takers_share_a_list(tmp_path):
    one, other = (Share(tmp_path, todo(), Budget()) for _ in range(2))
    first, second = iter(one), iter(other)
    assert [next(first).sizes, next(second).sizes, next(first).sizes] == [(8, 16), (9, 16), (10, 16)]
    one.keep([{"a": 1}])
    other.keep([{"a": 2}])
    assert one.rows() == other.rows() == [{"a": 2}, {"a": 1}] and not one.done()
    assert list(second) == [] and list(Share(tmp_path, todo(), Budget(), "warm")) == todo()


def test_another_list_is_refused(two_shapes, tmp_path, capsys):
    Share(tmp_path, todo()[:2], Budget())
    with pytest.raises(ValueError, match="another list of cases"):
        Share(tmp_path, todo(), Budget())
    assert sweep.main([*COMMAND, "--share", str(tmp_path)]) == 2 and "another list" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert sweep.main([*COMMAND, "--share", str(tmp_path / "file")]) == 2 and "File exists" in capsys.readouterr().err


def test_a_later_process_goes_on_and_a_last_one_finds_it_done(two_shapes, tmp_path, capsys):
    arguments = [*COMMAND, "--share", str(tmp_path / "share"), "--json", str(tmp_path / "all.json")]
    cases_here = sweep.cases_of("many", ["rms_norm", "swiglu"], torch.float32)
    taken = next(iter(Share(tmp_path / "share", cases_here, Budget())))  # another process has the first case
    assert sweep.main(arguments) == 0
    found = json.loads((tmp_path / "all.json").read_text())
    assert not found["complete"] and len(found["rows"]) == 2 * (len(cases_here) - 1)
    assert (taken.op.name, list(taken.sizes)) not in [(row["op"], row["sizes"]) for row in found["rows"]]
    capsys.readouterr()
    assert sweep.main(arguments) == 0 and "[2/4]" not in capsys.readouterr().err
    assert json.loads((tmp_path / "all.json").read_text())["rows"] == found["rows"]


def test_a_spent_budget_takes_no_case(tmp_path, capsys):
    words = ["many", "dyt", "--device", "cpu", "--budget", "1e-6", "--share", str(tmp_path)]
    assert sweep.main(words) == 0 and "stopped early: the budget" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.json"))
