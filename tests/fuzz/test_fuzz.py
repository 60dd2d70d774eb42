"""The same few attempts of every area; `bash ci/test.sh fuzz` is the lane."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz import __main__ as fuzz


@pytest.mark.daily(area="store")
@pytest.mark.parametrize("area", fuzz.AREAS)
def test_an_area_finds_nothing_in_its_first_attempts(area):
    assert fuzz.run(area, seed=0, seconds=2.0)["findings"] == []


@pytest.mark.full
def test_an_attempt_is_the_same_every_time():
    command = [sys.executable, "-m", "tests.fuzz", "--areas", "api", "--seed", "4", "--attempt", "17"]
    said = {subprocess.run(command, cwd=fuzz.ROOT, capture_output=True, text=True).stdout for _ in range(2)}
    assert len(said) == 1 and said != {""}
