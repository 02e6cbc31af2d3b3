"""A fork shows its job's command line and marker, whether the kernel moves them or not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from elaunch.agent.forkserver.warm.handover import MARKER_ROOM
from elaunch.agent.guardian.guardian import VARIABLE
from tests.harness import RUN_LIMIT_S

SHOW = """
import json, sys
from elaunch.agent.forkserver.warm import adopting
if sys.argv[1] == "fixed":
    adopting._move = lambda *_: False
adopting._show(("python", "-u", "train.py", "ü"), {"A": "1", "ELAUNCH_MARKER": "outer,inner"})
read = lambda name: open(f"/proc/self/{name}", "rb").read().decode()
print(json.dumps([read("cmdline"), read("environ")]))
"""


def shown(how: str, room: int = MARKER_ROOM) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", SHOW, how]
    env = {"BEFORE": "x", VARIABLE: "-" * room, "AFTER": "y"}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=RUN_LIMIT_S)


def test_the_kernel_shows_exactly_the_jobs_own() -> None:
    line, environment = json.loads(shown("moved").stdout)

    assert line == "python\0-u\0train.py\0ü\0"
    assert environment == "A=1\0ELAUNCH_MARKER=outer,inner\0"


def test_where_the_kernel_moves_nothing_the_guardian_finds_the_marker() -> None:
    line, environment = json.loads(shown("fixed").stdout)

    assert line.rstrip("\0") == "python\0-u\0train.py\0ü"
    assert [entry for entry in environment.split("\0") if entry] == ["BEFORE=x", f"{VARIABLE}=outer,inner", "AFTER=y"]


@pytest.mark.parametrize("room", [0, 5])
def test_without_room_for_the_marker_there_is_no_fork_server_that_nobody_could_find(room: int) -> None:
    assert "there is no room for the job's marker" in shown("fixed", room).stderr
