"""`elaunch store`, run as a user does."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.store.command import COMMAND as STORE
from tests.commands import read
from tests.harness import COMMAND, environment, finished


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "listens"),
    [
        ([], ("", 2379)),
        (["--listen", ":29400"], ("", 29400)),
        (["--listen=29400"], ("", 29400)),
        (["--listen", "[fd00::1]:7"], ("fd00::1", 7)),
    ],
)
def test_where_it_listens_is_a_host_with_a_port_or_a_port_of_all_addresses(
    argv: list[str], listens: tuple[str, int]
) -> None:
    assert read(STORE, *argv).params["listen"] == listens


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["train.py"], "unexpected extra argument (train.py)"),
        (["--token", "x"], "--token would show the job's token to everybody; set ELAUNCH_TOKEN, or give --token-file"),
        (["--listen", "a:b"], "--listen a:b is not a whole number; give a number from 0 to 65535"),
        (["--lisen", "a:1"], "No such option"),
        (["--listen"], "requires an argument"),
    ],
)
def test_a_wrong_request_is_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(STORE, *argv)

    assert sentence in str(raised.value)


def test_a_store_whose_token_nobody_could_learn_is_not_served(tmp_path: Path) -> None:
    job = finished(tmp_path, "store", "--listen", "127.0.0.1:0", env={"HOME": "/proc"})

    assert job.code == 2
    assert "stderr is no terminal, and no file can be written in ~/.elaunch/stores (" in job.stderr
    assert "give all nodes the same token: export ELAUNCH_TOKEN=$(openssl rand -hex 16)" in job.stderr


def test_at_a_terminal_the_token_is_in_the_line(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "store", "--listen", "0.0.0.0:0"]
    with subprocess.Popen(command, env=environment({"HOME": str(tmp_path)}), stderr=theirs, text=True) as store:
        os.close(theirs)
        said = b""
        while b"Ctrl-C ends the store" not in said:
            said += os.read(ours, 4096)
        kept = list((tmp_path / ".elaunch" / "stores").iterdir())
        store.terminate()
    os.close(ours)

    assert len(kept) == 1
    assert re.search(rb"ELAUNCH_TOKEN=[0-9a-f]{32} elaunch --nnodes 2 ", said)
    assert not kept[0].exists()
