"""launcher.watch.local: root's look at the sockets of other users, who may put anything there."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from elaunch.launcher.watch.local import ANSWER_S, local_agents, user_name

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root looks at other users' sockets")


def folder_of(parent: Path, number: int, uid: int) -> Path:
    folder = parent / f"elaunch_{number:016x}_socket"
    folder.mkdir(mode=0o700)
    os.chown(folder, uid, uid)
    return folder


@contextmanager
def listening(path: Path, uid: int) -> Iterator[socket.socket]:
    """A socket that `uid` has opened."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        # The kernel keeps who calls this.
        os.seteuid(uid)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        yield listener


def take_one(listener: socket.socket) -> None:
    """Take a connection and what it says, if one comes before the end."""
    with suppress(OSError):
        listener.accept()[0].recv(100)


def test_sockets_that_are_silent_are_asked_at_the_same_time_and_of_another_user_not_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:
        for number in range(6):
            stack.enter_context(listening(folder_of(tmp_path, number, 0) / "agent", 0))
        for number in range(6, 6 + 66):
            stack.enter_context(listening(folder_of(tmp_path, number, NOBODY) / "agent", NOBODY))
        begun_s = time.monotonic()

        found = local_agents()

        # One after the other they would take six times that long.
        assert time.monotonic() - begun_s < 5 * ANSWER_S
    assert f"2 more sockets of {user_name(NOBODY)} were not asked: it takes too long" in found.troubles
    assert f"the elaunch with pid {os.getpid()} did not answer within 3 s" in found.silent


def test_a_user_hears_who_else_may_have_jobs_and_which_folders_cannot_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # pytest's folders are closed to other users.
    open_folder = Path(tempfile.mkdtemp(dir="/tmp"))
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(closed))
    monkeypatch.setenv("TEMP", str(open_folder))
    folder_of(open_folder, 1, NOBODY + 1)
    (own := folder_of(open_folder, 2, NOBODY)).chmod(0o755)
    open_folder.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        found = local_agents()
    finally:
        os.seteuid(0)
        shutil.rmtree(open_folder)

    assert f"the folder {closed}, where jobs may be, cannot be read: Permission denied" in found.troubles
    assert f"{own} is open to other users, so its socket is not believed" in found.troubles
    assert NOBODY + 1 in found.others
    assert user_name(3_999_999_999) == "the user with id 3999999999"


def test_a_link_to_a_socket_that_root_has_opened_is_not_believed_to_be_roots_own_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = folder_of(tmp_path, 1, NOBODY)
    (folder / "agent").symlink_to(tmp_path / "daemon")
    with listening(tmp_path / "daemon", 0) as daemon:
        # Programs of other users may answer a socket that root has opened for them.
        threading.Thread(target=take_one, args=(daemon,), daemon=True).start()

        silent = local_agents().silent

    assert f"the socket {folder / 'agent'} is served by another user; it is not believed" in silent
