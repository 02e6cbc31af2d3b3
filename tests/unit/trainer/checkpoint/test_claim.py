"""Whose checkpoints a place holds: one training, and one job of it at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elaunch.trainer.checkpoint import claim
from elaunch.trainer.checkpoint.claim import NOTE, UNNAMED, Claim, NotOurs, script_name
from elaunch.trainer.checkpoint.storage import storage_at
from tests.harness import DEADLINE_S

_OTHER = """
import sys
from elaunch.trainer.checkpoint.claim import Claim
from elaunch.trainer.checkpoint.storage import storage_at
mine = Claim(storage_at(sys.argv[1]), "training", 0, print)
mine.take(lambda: None)
print("taken", flush=True)
if sys.stdin.readline():
    mine.release()
"""


CLAIMS: list[Claim] = []


@pytest.fixture(autouse=True)
def no_claim_stays() -> Iterator[None]:
    yield
    while CLAIMS:
        CLAIMS.pop().leave()


def claimed(place: Path, name: str = UNNAMED, generation: int = 0, job: str = "") -> Claim:
    CLAIMS.append(Claim(storage_at(place), name, generation, lambda logged: None, job))
    return CLAIMS[-1]


@contextmanager
def other_job(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A job in a process of its own, which has taken the place."""
    command = [sys.executable, "-c", _OTHER, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert "taken" in job.stdout.read(6)
            yield job
        finally:
            job.kill()


def rewrite(place: Path, **fields: Any) -> None:
    path = place / NOTE
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_place_that_another_job_writes_to_is_refused_until_that_job_is_killed_or_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "_PATIENCE_S", 0.0)
    with other_job(tmp_path) as job:
        with pytest.raises(NotOurs, match=rf"is being written by a job \(on .*, pid {job.pid}, since 2.*end that job"):
            claimed(tmp_path).take(lambda: None)
        job.kill()
        job.wait(DEADLINE_S)

        claimed(tmp_path).take(lambda: None)

    (tmp_path / NOTE).unlink()
    with other_job(tmp_path) as job:
        job.communicate("end\n", timeout=DEADLINE_S)

        claimed(tmp_path).take(lambda: None)


def test_a_later_generation_of_the_same_job_takes_the_place_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "seven")
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    with other_job(tmp_path) as earlier:
        earlier.kill()
        earlier.wait(DEADLINE_S)

        claimed(tmp_path, generation=1).take(pytest.fail)
    rewrite(tmp_path, process="boot:namespace:1:1", token="its")

    claimed(tmp_path, generation=2).take(pytest.fail)


@pytest.mark.parametrize("lives", [True, False])
def test_a_job_on_another_host_lives_as_long_as_it_renews_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    claimed(tmp_path).take(lambda: None)
    rewrite(tmp_path, process="boot:namespace:1:1", token="its")
    numbers = iter(range(7, 1000))
    monkeypatch.setattr(claim, "_PATIENCE_S", 4 * claim._POLL_S)
    monkeypatch.setattr(claim, "_SILENT_S", 3 * claim._POLL_S)
    if lives:
        with pytest.raises(NotOurs, match="is being written by"):
            claimed(tmp_path).take(lambda: rewrite(tmp_path, renewals=next(numbers)))
    else:
        claimed(tmp_path).take(lambda: None)


def test_a_job_whose_place_was_taken_publishes_nothing_more_and_leaves_the_note(tmp_path: Path) -> None:
    mine = claimed(tmp_path)
    mine.take(lambda: None)
    mine.require()
    rewrite(tmp_path, token="its", host="elsewhere")

    with pytest.raises(OSError, match=r"on elsewhere.* has taken .*"):
        mine.require()
    mine.release()

    assert mine.lost
    assert json.loads((tmp_path / NOTE).read_text())["token"] == "its"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 2}', b"\xff"])
def test_a_note_that_cannot_be_read_is_no_training(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NOTE).write_bytes(content)

    claimed(tmp_path).take(pytest.fail)


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("train.py", "/moved/train.py", True),
        ("/a/pkg/__main__.py", "/b/pkg/__main__.py", True),
        ("train.py", "other.py", False),
        ("/a/one/__main__.py", "/a/two/__main__.py", False),
    ],
)
def test_a_training_may_move_and_another_script_is_another_training(first: str, second: str, is_same: bool) -> None:
    assert (script_name(first) == script_name(second)) == is_same
