"""`elaunch warm` where a fork server is there that does not answer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.forkserver.warm import client
from elaunch.launcher.warm_command import COMMAND
from tests.commands import call
from tests.harness import DEADLINE_S
from tests.warm import silent_server


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    path = tmp_path / "socket"
    monkeypatch.setattr("elaunch.agent.warm.servers", lambda: [path])
    monkeypatch.setattr(client, "_IMPORT_S", 0.1)
    with silent_server(path) as process:
        yield process


@pytest.mark.usefixtures("silent")
def test_one_that_lives_and_does_not_answer_cannot_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(COMMAND, "--status")

    assert code == 3
    assert capsys.readouterr().out == (
        f"{tmp_path}/socket: the warm fork server does not answer; elaunch warm --stop ends it\n"
    )


def test_one_that_does_not_answer_is_ended_and_said_to_be(
    silent: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(COMMAND, "--stop")

    assert code == 0
    assert capsys.readouterr().out == f"ended: {tmp_path}/socket\n"
    assert silent.wait(DEADLINE_S) != 0


def test_one_that_was_killed_is_gone(silent: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    silent.kill()
    silent.wait(DEADLINE_S)

    code = call(COMMAND, "--status")

    assert code == 0
    assert capsys.readouterr().out.endswith("elaunch --warm script.py leaves another one\n")
