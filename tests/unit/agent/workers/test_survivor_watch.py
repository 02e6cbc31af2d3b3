"""agent.workers.survivor_watch: real ranks in every state; no handler that does something is taken for a stuck one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.core.events import Event, WorkersStuck
from elaunch.agent.output.timeline import Timeline
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.agent.workers.reporter import Reporter
from elaunch.agent.workers.survivor_watch import SurvivorWatch
from elaunch.rendezvous.rules.table_codec import seats_of
from elaunch.rendezvous.types import RankTable
from tests.harness import environment, free_ports, wait_for
from tests.unit.agent.workers import survivors
from tests.unit.agent.workers.survivors import KINDS, SAVES, STUCK

# Many times as long as a survivor needs to be known as stuck.
SAVE_S = 0.6


@pytest.fixture
def group(tmp_path: Path) -> Iterator[WorkerGroup]:
    (port,) = free_ports(1)
    seats = seats_of([("a", len(KINDS), "default")])
    group = WorkerGroup(RankTable(0, seats, "127.0.0.1", port, ""), 0)
    fds: list[int] = []
    for rank in range(len(KINDS)):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        group.links[rank] = Link(0, rank, ours)
        fds.append(theirs.detach())
    program = subprocess.Popen(
        [sys.executable, str(survivors.__file__), str(tmp_path), str(SAVE_S), *map(str, fds)],
        env=environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}),
        pass_fds=fds,
    )
    for fd in fds:
        os.close(fd)
    yield group
    for pid in group.pids.values():
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    program.kill()
    program.wait()
    for link in group.links.values():
        link.forget_recorder()
        link.socket.close()


def read(group: WorkerGroup, folder: Path) -> bool:
    """Read the links and pids. Returns whether all ranks are in their states."""
    for rank, link in group.links.items():
        link.read()
        with suppress(FileNotFoundError):
            group.pids[rank] = int((folder / f"{KINDS[rank]}.pid").read_text())
    return len(group.pids) == len(group.recorders) == len(KINDS)


def test_only_those_that_wait_in_vain_are_told_from_those_that_save(group: WorkerGroup, tmp_path: Path) -> None:
    wait_for(lambda: read(group, tmp_path), "all ranks are in their states")
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
        return stuck >= set(STUCK) and all((tmp_path / f"{kind}.saved").exists() for kind in SAVES)

    wait_for(all_told, f"{STUCK} are told, and {SAVES} have saved")
    assert stuck == set(STUCK)
