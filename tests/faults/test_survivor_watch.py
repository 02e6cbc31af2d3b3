"""Real ranks in every state after a failure: no handler that does something is taken for one that waits in vain."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent import linux
from elaunch.agent.core import survivors
from elaunch.agent.core.events import Event, WorkersStuck
from elaunch.agent.output.timeline import Timeline
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.agent.workers.reporter import Reporter
from elaunch.agent.workers.survivor_watch import SurvivorWatch
from elaunch.rendezvous.rules.table_codec import seats_of
from elaunch.rendezvous.types import RankTable
from tests.faults import surviving
from tests.faults.surviving import KINDS, STUCK
from tests.harness import wait_for
from tests.ranks import RankForker, Ranks

SAVES = tuple(kind for kind in KINDS if kind not in STUCK)
# Many times as long as a survivor needs to be known as stuck.
SAVE_S = 0.6


@pytest.fixture
def group(forker: RankForker, tmp_path: Path) -> Iterator[WorkerGroup]:
    """The ranks, all of them in their states, as their agent knows them."""
    group = WorkerGroup(RankTable(0, seats_of([("a", len(KINDS), "default")]), "127.0.0.1", 1, ""), 0)
    env = {"SURVIVORS_FOLDER": str(tmp_path), "SURVIVORS_SAVE_S": str(SAVE_S)}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "link"))
        listener.listen(len(KINDS))
        with Ranks(forker, len(KINDS), Path(surviving.__file__), env=env) as ranks:
            for _ in KINDS:
                connection, _ = listener.accept()
                connection.setblocking(False)
                link = Link(0, -1, connection)
                wait_for(lambda link=link: link.read() and link.phase, "the rank's name")
                group.links[KINDS.index(link.phase)] = link
            try:
                wait_for(lambda: read(group, tmp_path), "all ranks are in their states")
                yield group
            finally:
                for pid in ranks.pids:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
    for link in group.links.values():
        link.forget_recorder()
        link.socket.close()


def read(group: WorkerGroup, folder: Path) -> bool:
    """Read the links and pids. Returns whether all ranks are in their states."""
    for rank, link in group.links.items():
        link.read()
        with suppress(FileNotFoundError):
            group.pids[rank] = int((folder / f"{KINDS[rank]}.pid").read_text())
    if not len(group.pids) == len(group.recorders) == len(KINDS):
        return False
    # They have written their pids before they enter the collective, and must be there when their signal comes.
    return all(is_in_collective(group, KINDS.index(kind)) for kind in STUCK if kind != "in_handler")


def is_in_collective(group: WorkerGroup, rank: int) -> bool:
    answer = group.recorders[rank].look_at_threads()
    inside = survivors.read_inside(answer) if answer else None
    return inside is not None and survivors.waits_in_collective(inside, len(KINDS))


def is_out(group: WorkerGroup, folder: Path, kind: str) -> bool:
    """Whether the rank has come out of its collective by an error: its process has ended, or its handler has run."""
    return linux.state(group.pids[KINDS.index(kind)]) in ("", "Z", "X") or (folder / f"{kind}.saved").exists()


@pytest.mark.slow
def test_only_those_that_wait_in_vain_are_told_from_those_that_save(group: WorkerGroup, tmp_path: Path) -> None:
    posted: list[Event] = []
    no_failure: Any = None
    quiet = Timeline(None, lambda _: None, lambda _: None)
    watch = SurvivorWatch(group, Reporter(posted.append, lambda *_: None, quiet, no_failure))
    stuck: set[str] = set()
    (tmp_path / "begun").touch()

    watch.add(range(len(KINDS)))
    for pid in group.pids.values():
        os.kill(pid, signal.SIGTERM)

    def all_told() -> bool:
        watch.tick(time.monotonic())
        while posted:
            event = posted.pop()
            assert isinstance(event, WorkersStuck)
            stuck.update(KINDS[rank] for rank in event.local_ranks)
        freed = {kind for kind in STUCK if is_out(group, tmp_path, kind)}
        return stuck | freed >= set(STUCK) and all((tmp_path / f"{kind}.saved").exists() for kind in SAVES)

    try:
        wait_for(all_told, "those that wait in vain are told, or get the error, and the others have saved")
    finally:
        left = [kind for kind in SAVES if not (tmp_path / f"{kind}.saved").exists()]
        print(f"told: {sorted(stuck)}; not saved: {left}")
    assert stuck <= set(STUCK)
