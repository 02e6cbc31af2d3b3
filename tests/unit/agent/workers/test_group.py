"""agent.workers.group: whether a node's workers made progress, from what their links report."""

from __future__ import annotations

import socket
import time

import pytest

from elaunch.agent.diagnosis.exit_status import SILENT_S
from elaunch.agent.workers.group import LASTING_S, Worker, WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.rules.snapshot import seats_of
from elaunch.rendezvous.types import RankTable

TABLE = RankTable(4, seats_of([("a-00000001", 2, "default"), ("b-00000001", 2, "default")]), "10.0.0.1", 1, "a start")


def group(*links: tuple[int, bool | None], age_s: float = 1.0) -> WorkerGroup:
    """One with links that reported this of their newest step and of their process group."""
    made = [
        Worker(2 + n, n, Link(0, n, socket.socket(), step, reached_store=reached))
        for n, (step, reached) in enumerate(links)
    ]
    for worker in made:
        worker.link.socket.close()
    return WorkerGroup(TABLE, 1, made, started_s=time.monotonic() - age_s)


@pytest.mark.parametrize(
    ("links", "age_s", "progressed"),
    [
        (((-1, None), (0, None)), 1.0, True),
        (((-1, True), (-1, None)), 1.0, True),
        (((-1, None), (-1, None)), 1.0, False),
        (((-1, None), (-1, None)), SILENT_S, True),
        (((-1, None), (-1, False)), SILENT_S, False),
        (((-1, None), (-1, False)), LASTING_S, True),
    ],
    ids=["a step", "a process group", "nothing", "nothing for long", "one did not get there", "nor in long"],
)
def test_progress_is_a_step_or_a_process_group_or_a_long_life(
    links: tuple[tuple[int, bool | None], ...], age_s: float, progressed: bool
) -> None:
    assert group(*links, age_s=age_s).progressed is progressed
