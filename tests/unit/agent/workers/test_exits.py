"""agent.workers.exits: what is made of a worker's exit."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.diagnosis.oom import KernelLog, OutOfMemoryWatch
from elaunch.agent.workers.exits import ExitReader
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.types import RankTable, Seat

NODE = "node-a-00000001"


@pytest.mark.parametrize("keeps_files", [True, False])
def test_an_error_file_is_read_and_named_only_if_it_outlives_the_job(tmp_path: Path, keeps_files: bool) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "ValueError: bad"}')
    group = WorkerGroup(RankTable(3, (Seat(NODE, 1, 4),), "", 0, ""), 0, error_files={0: path})
    reader = ExitReader("node-a", OutOfMemoryWatch(KernelLog(), []), keeps_files=keeps_files)

    failure = reader.exited(group, 0, 17, 1).failure

    assert failure
    assert failure.message == "raised an error: ValueError: bad"
    assert failure.error_file == (str(path) if keeps_files else "")


LOST = '{"message": "RuntimeError: Connection closed by peer [127.0.0.1]:4711"}'


@pytest.fixture
def three(tmp_path: Path) -> Iterator[tuple[WorkerGroup, list[socket.socket]]]:
    """Three workers of a node, and their ends of the links."""
    group = WorkerGroup(RankTable(3, (Seat(NODE, 3, 4),), "", 0, ""), 0, pids={0: 17, 1: 18, 2: 19})
    workers = []
    for local_rank in range(3):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        group.links[local_rank] = Link(3, local_rank, ours)
        group.error_files[local_rank] = tmp_path / f"{local_rank}.json"
        workers.append(theirs)
    yield group, workers
    for link in group.links.values():
        link.socket.close()
    for worker in workers:
        worker.close()


def ends_its_program(worker: socket.socket, *, raised: bool) -> None:
    said = {"event": "ended", "raised": raised, "reached_store": True, "unused": []}
    worker.send(f"\n{json.dumps(said)}\n".encode())
    worker.shutdown(socket.SHUT_WR)
