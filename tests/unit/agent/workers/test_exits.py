"""agent.workers.exits: what is made of a worker's exit."""

from __future__ import annotations

import socket
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
    ours, theirs = socket.socketpair()
    theirs.close()
    links = {0: Link(3, 0, ours)}
    group = WorkerGroup(RankTable(3, (Seat(NODE, 1, 4),), "", 0, ""), 0, links=links, error_files={0: path})
    reader = ExitReader("node-a", OutOfMemoryWatch(KernelLog(), []), keeps_files=keeps_files)

    with ours:
        failure = reader.exited(group, 0, 17, 1).failure

    assert failure
    assert failure.message == "raised an error: ValueError: bad"
    assert failure.error_file == (str(path) if keeps_files else "")
