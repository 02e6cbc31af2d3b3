"""inspect.job_source: what answers on this host, which may be anybody; root queries other users' sockets too."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from elaunch.launcher.inspect.job_source import RESPONSE_S, NoResponse, local_jobs, status_of
from tests.harness import joined

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root queries other users' sockets")


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


@as_root
def test_silent_sockets_are_queried_at_the_same_time_and_of_another_user_not_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:
        for number in range(6):
            stack.enter_context(listening(folder_of(tmp_path, number, 0) / "agent", 0))
        for number in range(6, 6 + 66):
            stack.enter_context(listening(folder_of(tmp_path, number, OTHER_USER) / "agent", OTHER_USER))
        begun_s = time.monotonic()

        _, troubles = local_jobs()

        # One after the other they would take six times that long.
        assert time.monotonic() - begun_s < 5 * RESPONSE_S
    assert f"2 more sockets of user {OTHER_USER} were not queried: it takes too long" in troubles
    assert f"the elaunch with pid {os.getpid()} did not answer within 3 s" in troubles


@as_root
def test_a_link_to_a_socket_that_root_has_opened_is_not_believed_to_be_roots_own_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = folder_of(tmp_path, 1, OTHER_USER)
    (folder / "agent").symlink_to(tmp_path / "daemon")
    with listening(tmp_path / "daemon", 0) as daemon:
        # Programs of other users may answer a socket that root has opened for them.
        threading.Thread(target=take_one, args=(daemon,), daemon=True).start()

        _, troubles = local_jobs()

    assert f"the socket {folder / 'agent'} is served by another user; it is not trusted" in troubles


def test_control_characters_of_an_agents_error_reach_no_terminal(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        answering = threading.Thread(target=_answer, args=(listener,))
        answering.start()

        with pytest.raises(NoResponse, match="busy") as refused:
            status_of(tmp_path / "agent")
        joined(answering)

    assert str(refused.value).isprintable()


def _answer(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b'{"error": "busy \\u001b[2J"}\n')
