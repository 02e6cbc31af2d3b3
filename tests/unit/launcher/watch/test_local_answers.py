"""launcher.watch.local: what an agent's socket answers, which need not be an agent of this user."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from elaunch.launcher.watch.local import NoAnswer, status_of


def test_control_characters_of_an_agents_error_reach_no_terminal(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        answering = threading.Thread(target=_answer, args=(listener, {"error": "busy \x1b[2J"}))
        answering.start()

        with pytest.raises(NoAnswer, match="busy") as refused:
            status_of(tmp_path / "agent")
        answering.join()

    assert str(refused.value).isprintable()


def _answer(listener: socket.socket, answer: dict[str, str]) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(json.dumps(answer).encode() + b"\n")
