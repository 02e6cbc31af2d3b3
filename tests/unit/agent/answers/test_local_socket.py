"""agent.answers.local_socket: a socket for this user's processes, which nobody can hold or fill."""

from __future__ import annotations

import os
import selectors
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elaunch.agent.answers.local_socket import Asked, LocalSocket, credentials
from tests.harness import DEADLINE_S, RUN_LIMIT_S, joined, wait_for

NOBODY = 65534


class Desk:
    """A loop with the socket in it, in a thread; every request is answered with `text`."""

    def __init__(self, folder: Path, text: str = "{}") -> None:
        self.selector = selectors.DefaultSelector()
        self.topics: list[str] = []
        self.text = text
        folder.mkdir(mode=0o700)
        self.socket = LocalSocket([folder], self.selector, self._asked)
        self._end_r, self._end_w = os.pipe()
        self.selector.register(self._end_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        os.write(self._end_w, b"x")
        joined(self._thread)
        self.socket.close()
        os.close(self._end_r)
        os.close(self._end_w)

    @property
    def path(self) -> str:
        assert self.socket.path
        return str(self.socket.path)

    def connected(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(DEADLINE_S)
        made.connect(self.path)
        return made

    def said(self, request: bytes) -> bytes:
        with self.connected() as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    def _asked(self, asked: object) -> None:
        self.topics.append(asked.topic)  # type: ignore[attr-defined]
        asked.reply(self.text)  # type: ignore[attr-defined]

    def _run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fd == self._end_r:
                    return
                key.data()


@contextmanager
def desk(folder: Path, text: str = "{}") -> Iterator[Desk]:
    made = Desk(folder, text)
    try:
        yield made
    finally:
        made.close()


def test_a_line_is_answered_by_a_line_and_nothing_stays(tmp_path: Path) -> None:
    with desk(tmp_path / "private", '{"version":1}') as open_desk:
        assert stat.S_IMODE(Path(open_desk.path).stat().st_mode) == 0o600
        assert open_desk.said(b'{"ask":"status"}\n') == b'{"version":1}\n'
        assert open_desk.topics == ["status"]

    assert not (tmp_path / "private").exists()


@pytest.mark.parametrize(
    "request_",
    [b"\n", b"garbage\n", b'{"ask":7}\n', b"[" * 5000, b'{"ask":"status"}' + b" " * 9000, b"\xff\xfe\n", b""],
)
def test_what_is_no_request_is_let_go_of_without_an_answer(tmp_path: Path, request_: bytes) -> None:
    with desk(tmp_path / "private") as open_desk:
        with open_desk.connected() as connection:
            connection.sendall(request_)
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert connection.recv(100) == b""

        assert open_desk.topics == []
        assert open_desk.said(b'{"ask":"status"}\n') == b"{}\n"


def test_those_that_connect_and_ask_nothing_keep_nobody_out(tmp_path: Path) -> None:
    with desk(tmp_path / "private") as open_desk:
        idle = [open_desk.connected() for _ in range(30)]
        for number, connection in enumerate(idle):
            # The oldest ones are let go of by now.
            with suppress(BrokenPipeError):
                connection.sendall(b"{" if number % 2 else b"\xf0")

        assert open_desk.said(b'{"ask":"status"}\n') == b"{}\n"
        for connection in idle:
            connection.close()


def test_a_process_that_asks_and_does_not_read_holds_nobody(tmp_path: Path) -> None:
    with desk(tmp_path / "private", "x" * (3 << 20)) as open_desk, open_desk.connected() as deaf:
        deaf.sendall(b'{"ask":"status"}\n')
        wait_for(lambda: open_desk.topics, "it asks")

        assert len(open_desk.said(b'{"ask":"status"}\n')) == (3 << 20) + 1


def test_a_reply_knows_whether_somebody_waits_for_it() -> None:
    for is_waiting in (True, False):
        ours, asker = socket.socketpair()
        if not is_waiting:
            asker.close()
        assert Asked("stop", ours).reply("{}") is is_waiting
        asker.close()


def test_each_end_knows_the_other_by_the_kernels_word(tmp_path: Path) -> None:
    with desk(tmp_path / "private") as open_desk, open_desk.connected() as connection:
        assert credentials(connection) == (os.getpid(), os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_another_user_gets_nothing_even_if_somebody_opened_the_folder(tmp_path: Path, mode: int) -> None:
    # What pytest makes is closed to others.
    folder = Path(f"/tmp/elaunch-test-{os.getpid()}")
    try:
        with desk(folder) as open_desk:
            folder.chmod(mode)
            Path(open_desk.path).chmod(0o600 if mode == 0o700 else 0o666)
            ask = (
                "import os, socket, sys\n"
                f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
                f"s = socket.socket(socket.AF_UNIX); s.settimeout({DEADLINE_S})\n"
                "try:\n"
                f'    s.connect({open_desk.path!r}); s.sendall(b\'{{"ask":"status"}}\\n\'); print(s.recv(100))\n'
                "except OSError as error: print(type(error).__name__)\n"
            )

            said = subprocess.run(
                [sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=RUN_LIMIT_S
            ).stdout

            assert said.strip() in (
                ("PermissionError",) if mode == 0o700 else ("b''", "ConnectionResetError", "BrokenPipeError")
            )
            assert open_desk.topics == []
            assert open_desk.said(b'{"ask":"status"}\n') == b"{}\n"
    finally:
        if folder.exists():
            folder.rmdir()


def test_the_first_folder_that_takes_a_socket_is_used_and_the_others_are_removed(tmp_path: Path) -> None:
    # A socket's address has at most 108 bytes.
    long, short = tmp_path / ("x" * 120), tmp_path / "short"
    long.mkdir()
    short.mkdir()
    selector = selectors.DefaultSelector()

    made = LocalSocket([long, short], selector, lambda asked: None)

    assert made.path == short / "agent"
    assert not long.exists()
    made.close()
    assert not short.exists()
    assert LocalSocket([], selector, lambda asked: None).path is None
