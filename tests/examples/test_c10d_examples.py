"""The examples of c10d itself: each asserts what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, launched, told
from tests.harness import slow
from tests.ranks import RankForker

SHOWN = {
    "collectives.py": r"all_to_all_single +\[0, 10\]",
    "stores.py": r"TCPStore of rank 0 at port \d+: the same sum",
    "own_backend.py": r"backend 'store' sums to 1; DDP's weights over it are those over gloo",
    "timeouts.py": r"a new group of all 2 ranks works",
}


@pytest.mark.parametrize("name", ["collectives.py", "own_backend.py", "stores.py", slow("timeouts.py")])
def test_an_example_shows_what_it_says(forker: RankForker, name: str) -> None:
    assert re.search(SHOWN[name], told(forker, f"c10d/{name}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs_under_elaunch_with_three_workers(tmp_path: Path, name: str) -> None:
    assert "failed in" not in launched(tmp_path, str(EXAMPLES / "c10d" / name), ranks=3)
