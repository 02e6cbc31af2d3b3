"""agent.workers.exits: what is made of a worker's exit and its error file, which may be anything."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.diagnosis.investigate import KernelLog
from elaunch.agent.workers.exits import ExitReader
from elaunch.agent.workers.group import Worker, WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.types import RankTable, Seat
from tests.harness import Job
from tests.standin import WITHOUT_TORCH


@pytest.mark.parametrize("keeps_files", [True, False])
def test_an_error_file_is_read_and_named_only_if_it_outlives_the_job(tmp_path: Path, keeps_files: bool) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "ValueError: bad"}')
    ours, theirs = socket.socketpair()
    theirs.close()
    worker = Worker(4, 0, Link(3, 0, ours), 17)
    group = WorkerGroup(RankTable(3, (Seat("node-a-00000001", 1, 4),), "", 0, ""), 0, [worker])
    run_dir: Any = SimpleNamespace(error_file=lambda *_: path, logs=tmp_path if keeps_files else None)
    reader = ExitReader("node-a", KernelLog([]), run_dir)

    with ours:
        failure = reader.exited(group, worker, 1).failure

    assert failure
    assert failure.message == "raised an error: ValueError: bad"
    assert failure.error_file == (str(path) if keeps_files else "")


@pytest.mark.parametrize("made", ["os.mkfifo(path)", "os.symlink('/dev/zero', path)", "os.truncate(path, 3 << 30)"])
def test_a_worker_that_spoils_its_error_file_ends_its_job_and_not_its_agent(made: str, tmp_path: Path) -> None:
    first = "open(path, 'w').close()" if "truncate" in made else "pass"
    program = f"import os\npath = os.environ['TORCHELASTIC_ERROR_FILE']\n{first}\n{made}\nraise SystemExit(7)\n"
    (tmp_path / "train.py").write_text(program)

    options = ("--nproc-per-node", "1", "--no-preload", "--max-restarts", "1")
    with Job(tmp_path, *options, "train.py", env=WITHOUT_TORCH) as job:
        code = job.wait()

    assert code == 1
    assert "exited with code 7" in job.output
