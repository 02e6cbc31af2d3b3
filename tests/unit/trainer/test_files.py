"""trainer.files: what is no regular file is not read, and errors in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from elaunch.trainer.files import read_regular, reason


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "record.json")

    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path / "record.json", 100)


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "No space left on device"),
        (RuntimeError("first\nsecond"), "first"),
        (KeyError(), "KeyError"),
        (OSError("put the file there"), "put the file there"),
    ],
)
def test_a_reason_is_one_line(error: BaseException, logged: str) -> None:
    assert reason(error) == logged
