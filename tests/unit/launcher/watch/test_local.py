"""launcher.watch.local: root's look at the sockets of other users, who may put anything there."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from elaunch.launcher.watch.local import ANSWER_S, local_agents

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


def test_silent_sockets_of_another_user_hold_root_up_once_and_not_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:
        for number in range(4):
            stack.enter_context(listening(folder_of(tmp_path, number, NOBODY) / "agent", NOBODY))
        begun_s = time.monotonic()

        _, troubles = local_agents()

        assert time.monotonic() - begun_s < 2 * ANSWER_S
    assert [text for text in troubles if str(NOBODY) in text] == [
        f"the other sockets of the user with id {NOBODY} were not asked: it takes too long"
    ]


def test_a_link_to_a_socket_that_root_has_opened_is_not_believed_to_be_roots_own_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = folder_of(tmp_path, 1, NOBODY)
    (folder / "agent").symlink_to(tmp_path / "daemon")
    with listening(tmp_path / "daemon", 0) as daemon:
        # Programs of other users may answer a socket that root has opened for them.
        threading.Thread(target=take_one, args=(daemon,), daemon=True).start()

        _, troubles = local_agents()

    assert f"the socket {folder / 'agent'} is served by another user; it is not believed" in troubles
