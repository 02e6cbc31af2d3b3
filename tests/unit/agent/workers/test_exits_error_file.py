"""agent.workers.exits: the agent waits for nothing in an error file's place, and fills no memory with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elaunch.agent.workers.exits import read_error_file
from tests.harness import Job
from tests.standin import WITHOUT_TORCH

NO_FILES: list[Callable[[Path], object]] = [
    os.mkfifo,
    Path.mkdir,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path),
    lambda path: None,
]


@pytest.mark.parametrize("make", NO_FILES, ids=["pipe", "folder", "device", "loop", "nothing"])
def test_what_is_no_regular_file_holds_no_record(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    make(path)

    assert read_error_file(path) is None


@pytest.mark.parametrize("made", ["os.mkfifo(path)", "os.symlink('/dev/zero', path)", "os.truncate(path, 3 << 30)"])
def test_a_worker_that_spoils_its_error_file_ends_its_job_and_not_its_agent(made: str, tmp_path: Path) -> None:
    first = "open(path, 'w').close()" if "truncate" in made else "pass"
    program = f"import os\npath = os.environ['TORCHELASTIC_ERROR_FILE']\n{first}\n{made}\nraise SystemExit(7)\n"
    (tmp_path / "train.py").write_text(program)

    words = ("--nproc-per-node", "1", "--no-preload", "--max-restarts", "1", "train.py")
    with Job(tmp_path, *words, env=WITHOUT_TORCH) as job:
        code = job.wait()

    assert code == 1
    assert "exited with code 7" in job.output
