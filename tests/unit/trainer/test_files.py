"""trainer.files: records of this user's that may be torn or another's, and errors in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from elaunch.trainer.files import read_own_record, reason


def test_a_whole_record_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"steps": 3}')

    assert read_own_record(path, 100) == {"steps": 3}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"steps": 3', "delimiter"),
        ("[3]", "it is no record"),
        ('{"steps": NaN}', "no number of JSON"),
        (" " * 200, "more than the 100"),
    ],
)
def test_a_torn_or_foreign_file_is_no_record(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)

    with pytest.raises((OSError, ValueError), match=why):
        read_own_record(path, 100)


def test_another_users_record_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    path.write_text("{}")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(OSError, match="another user"):
        read_own_record(path, 100)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "record.json")

    with pytest.raises(OSError, match="no regular file"):
        read_own_record(tmp_path / "record.json", 100)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "No space left on device"),
        (RuntimeError("first\nsecond"), "first"),
        (KeyError(), "KeyError"),
        (OSError("put the file there"), "put the file there"),
    ],
)
def test_a_reason_is_one_line(error: BaseException, said: str) -> None:
    assert reason(error) == said
