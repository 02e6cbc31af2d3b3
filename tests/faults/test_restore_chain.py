"""A state that several nodes lack goes from one to the next: no node sends it twice, so it takes one copy's time.

It goes over the ranks' own connections: here is no group that moves host memory.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.ranks import RankForker, Ranks

SCRIPT = Path(__file__).with_name("restoring.py")
NODES = 4


def generation(number: int, forker: RankForker, memory: Path) -> list[Any]:
    envs = {}
    for rank in range(NODES):
        (memory / str(rank)).mkdir(exist_ok=True)
        envs[rank] = {"ELAUNCH_MEMORY": str(memory / str(rank)), "LOCAL_RANK": "0"}
    with Ranks(forker, NODES, SCRIPT, env={"ELAUNCH_GENERATION": str(number)}, envs=envs) as ranks:
        return ranks.answers()


def test_each_node_sends_the_state_once(forker: RankForker) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        memory = Path(folder)
        first = generation(0, forker, memory)
        for rank in (0, 1, 3):
            shutil.rmtree(memory / str(rank))

        second = generation(1, forker, memory)

    assert [rank["restored"] for rank in second] == [2] * NODES
    assert {str(rank["state"]) for rank in second} == {str(first[2]["state"])}
    assert [rank["sent"] for rank in second] == [[1], [3], [0], []], "rank 2 has it; ranks 0, 1 and 3 lack it"
