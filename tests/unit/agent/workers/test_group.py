"""agent.workers.group: whether a node's workers made progress, from what their links and their store say."""

from __future__ import annotations

import socket

import pytest

from elaunch.agent.core.timeline import NO_GENERATION
from elaunch.agent.workers.group import LASTING_S, CurrentGroup, WorkerGroup
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


def test_a_group_that_ran_for_long_has_done_something_also_where_nobody_says_so() -> None:
    short, long = group(reached_store=None), group(reached_store=None)
    long.started_s -= LASTING_S

    assert not short.lasted
    assert long.lasted


def test_news_of_another_generation_than_the_current_one_finds_no_workers() -> None:
    current = CurrentGroup()
    before = (current.generation, current.of(TABLE.generation))
    now = group(reached_store=None)

    current.latest = now

    assert before == (NO_GENERATION, None)
    assert current.generation == TABLE.generation
    assert current.of(TABLE.generation) is now
    assert current.of(TABLE.generation - 1) is None
    assert current.of(None) is None
