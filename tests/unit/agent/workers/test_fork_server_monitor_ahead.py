"""When the next generation's workers are forked ahead, and by which fork server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.guardian.client import GuardianClient
from elaunch.agent.workers.fork_server_monitor import ForksAhead
from elaunch.agent.workers.group import WorkerGroup
from elaunch.rendezvous.types import RankTable, Seat


@dataclass
class Server:
    preload: tuple[str, ...] | None = ("torch",)
    said: list[tuple[str, int]] = field(default_factory=list)
    pid: int = 5

    def fork_ahead(self, count: int) -> None:
        self.said.append(("first", count))


@dataclass
class Guardian:
    """Also its cgroup."""

    said: list[tuple[tuple[int, ...], int] | str] = field(default_factory=list)
    is_moving: bool = False

    @property
    def cgroup(self) -> Guardian:
        return self

    def note(self, **facts: object) -> None:
        self.said.append("woken")

    def move(self, pids: tuple[int, ...], generation: int) -> None:
        self.said.append((pids, generation))


def group(slots: int = 3) -> WorkerGroup:
    """Workers that were not forked yet."""
    return WorkerGroup(RankTable(0, (Seat("a-00000001", slots, 0),), "127.0.0.1", 1, "the job starts"), 0)


def ahead(server: Server, *, is_wanted: bool = True, guardian: Guardian | None = None) -> ForksAhead:
    told = cast(GuardianClient, guardian or Guardian())
    return ForksAhead(cast(ForkServer, server), told, is_wanted=is_wanted)


def test_they_are_ordered_some_time_after_the_last_worker_was_forked() -> None:
    server, workers = Server(), group()
    forks = ahead(server)

    forks.begin(workers, 10.0)
    forks.tick(10.5)
    early = [*server.said]
    forks.tick(11.5)
    while_importing = [*server.said]
    workers.pids.update({0: 71, 1: 72, 2: 73})
    due_s = forks.due_s
    forks.tick(13.0)
    forks.tick(14.0)

    assert (early, while_importing, due_s) == ([], [], 12.5)
    assert server.said == [("first", 3)]
    assert forks.due_s is None


@pytest.mark.parametrize(("slots", "is_wanted"), [(1, True), (2, True), (3, False)])
def test_few_workers_and_those_that_are_not_restarted_have_none_that_wait(slots: int, is_wanted: bool) -> None:
    server, workers = Server(), group(slots)
    workers.pids.update({rank: 71 + rank for rank in range(slots)})
    forks = ahead(server, is_wanted=is_wanted)

    forks.begin(workers, 10.0)
    forks.tick(12.0)

    # The fork server is told all the same: it has nothing more to do for this generation.
    assert (server.said, forks.due_s) == ([("first", 0)], None)


def test_a_fork_server_that_has_imported_nothing_is_told_nothing() -> None:
    server, workers = Server(preload=None), group()
    workers.pids.update({0: 71, 1: 72, 2: 73})
    forks = ahead(server)

    forks.begin(workers, 10.0)
    forks.tick(12.0)

    assert (server.said, forks.due_s) == ([], None)


def test_at_the_last_fork_the_guardian_is_woken_and_the_fork_server_moves() -> None:
    server, workers, guardian = Server(), group(), Guardian()
    forks = ahead(server, guardian=guardian)

    forks.begin(workers, 10.0)
    workers.pids.update({0: 71, 1: 72})
    forks.tick(10.1)
    before = [*guardian.said]
    workers.pids[2] = 73
    forks.tick(10.2)
    forks.tick(10.3)

    assert (before, guardian.said) == ([], ["woken", ((5,), 1)])


def test_a_fork_server_that_is_on_its_way_forks_ahead_when_it_is_there() -> None:
    server, workers, guardian = Server(), group(), Guardian(is_moving=True)
    forks = ahead(server, guardian=guardian)

    forks.begin(workers, 10.0)
    workers.pids.update({0: 71, 1: 72, 2: 73})
    forks.tick(11.0)
    while_moving, due_s = [*server.said], forks.due_s
    guardian.is_moving = False
    forks.tick(11.1)

    assert while_moving == []
    assert due_s is not None
    assert 11.0 < due_s < 11.1
    assert server.said == [("first", 3)]


def test_the_last_fork_of_a_server_without_preloads_is_told_too() -> None:
    workers, guardian = group(), Guardian()
    forks = ahead(Server(preload=None), guardian=guardian)

    forks.begin(workers, 10.0)
    workers.pids.update({0: 71, 1: 72, 2: 73})
    forks.tick(10.1)

    assert guardian.said == ["woken", ((5,), 1)]
