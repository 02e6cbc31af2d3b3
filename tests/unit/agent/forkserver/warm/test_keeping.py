"""The end of a warm fork server."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from elaunch.agent.forkserver.warm.client import Cold
from elaunch.agent.forkserver.warm.keeping import stop
from tests.harness import DEADLINE_S
from tests.warm import silent_server


def test_one_that_hangs_before_it_has_its_name_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "socket"

    with silent_server(path) as hanging:
        was_there = stop(path)
        code = hanging.wait(DEADLINE_S)

    assert was_there
    assert code == -signal.SIGKILL
    assert not path.exists()


def test_a_socket_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()

        with pytest.raises(Cold, match="is no fork server yet; try again, or remove it"):
            stop(path)

    assert path.exists()
