"""agent.workers.group: whether a node's workers made progress, from what their links and their store say."""

from __future__ import annotations

import socket

import pytest

from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.rules.snapshot import seats_of
from elaunch.rendezvous.types import RankTable

TABLE = RankTable(4, seats_of([("a-00000001", 2, "default"), ("b-00000001", 2, "default")]), "10.0.0.1", 1, "a start")


def group(*links: tuple[int, bool | None], reached_store: bool | None) -> WorkerGroup:
    """One with links that said this of their newest step and of their process group."""
    made = {n: Link(0, n, socket.socket(), step, reached_store=reached) for n, (step, reached) in enumerate(links)}
    for link in made.values():
        link.socket.close()
    return WorkerGroup(TABLE, 1, links=made, reached_store=reached_store)


@pytest.mark.parametrize(
    ("links", "reached_store", "progressed"),
    [
        (((-1, None), (0, None)), False, True),
        (((-1, True), (-1, None)), False, True),
        (((-1, None), (-1, None)), False, False),
        (((-1, None), (-1, None)), True, True),
        ((), True, True),
        ((), False, False),
        ((), None, False),
        (((-1, None), (-1, False)), True, False),
    ],
    ids=[
        "a step",
        "a process group",
        "nothing",
        "a store",
        "no links, a store",
        "no links",
        "a store elsewhere",
        "one did not get there",
    ],
)
def test_progress_is_a_step_or_a_process_group_or_where_nobody_says_a_use_of_the_store(
    links: tuple[tuple[int, bool | None], ...], reached_store: bool | None, progressed: bool
) -> None:
    assert group(*links, reached_store=reached_store).progressed is progressed
