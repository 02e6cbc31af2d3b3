"""launcher.watch.local: what an agent's socket answers, which need not be an agent of this user."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elaunch.launcher.watch import local
from elaunch.launcher.watch.local import NoAnswer, status_of
from tests.harness import DEADLINE_S, joined


def test_control_characters_of_an_agents_error_reach_no_terminal(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        answering = threading.Thread(target=_answer, args=(listener, {"error": "busy \x1b[2J"}))
        answering.start()

        with pytest.raises(NoAnswer, match="busy") as refused:
            status_of(tmp_path / "agent")
        joined(answering)

    assert str(refused.value).isprintable()


def _answer(listener: socket.socket, answer: dict[str, str]) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def test_an_agent_that_is_stopped_is_said_to_be_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the check the call would wait this long.
    monkeypatch.setattr(local._ask, "__defaults__", (2 * DEADLINE_S,))
    listens = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(tmp_path / 'agent')!r}); s.listen()"
    waits = "print('listens', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{listens}; {waits}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout
        assert agent.stdout.readline()
        agent.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, agent.pid, os.WSTOPPED)
        begun_s = time.monotonic()

        with pytest.raises(NoAnswer, match=rf"pid {agent.pid} is stopped, .* \(kill -CONT {agent.pid}\)"):
            status_of(tmp_path / "agent")
        took_s = time.monotonic() - begun_s
        agent.kill()

    assert took_s < DEADLINE_S
