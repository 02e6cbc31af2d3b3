"""agent.diagnosis.stacks: the stacks of real processes, by py-spy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elaunch.agent import linux
from elaunch.agent.diagnosis import stacks
from elaunch.agent.diagnosis.stack_groups import Stack
from elaunch.agent.diagnosis.stacks import NO_TOOL, take
from elaunch.agent.diagnosis.waits import Doing, doing
from tests.harness import DEADLINE_S, script, wait_for

PROGRAM = """
import os, sys, threading, time
def locked():
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()
def busy():
    print("ready", flush=True)
    while True: pass
def asleep():
    print("ready", flush=True)
    time.sleep(600)
def reads_a_pipe():
    pipe = os.pipe()
    print("ready", flush=True)
    os.read(pipe[0], 1)
globals()[sys.argv[1]]()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Starts processes of the program above, which end with the test; the pid."""
    path, running = script(tmp_path, PROGRAM), list[subprocess.Popen[str]]()

    def begin(what: str) -> int:
        command = [sys.executable, str(path), what]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
        running.append(program)
        assert program.stdout
        assert program.stdout.readline() == "ready\n"
        return program.pid

    yield begin
    for program in running:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate(timeout=DEADLINE_S)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that puts a shell script in the place of py-spy."""

    def put(text: str) -> None:
        tool = tmp_path / "py-spy"
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o700)
        monkeypatch.setattr(stacks, "find_tool", lambda: str(tool))

    return put


def settled(pid: int, expected: Doing) -> Stack:
    """The process's stack once it has come to where it stays."""

    def found() -> Stack | None:
        (stack,) = take({0: pid}, within_s=DEADLINE_S)
        return stack if doing(stack) is expected else None

    return wait_for(found, f"pid {pid} does {expected}")


def test_the_stack_shows_where_a_process_is_and_what_it_waits_for(start: Callable[[str], int]) -> None:
    pids = {rank: start(what) for rank, what in enumerate(("locked", "busy", "asleep", "reads_a_pipe"))}
    for rank, what in enumerate((Doing.LOCK, Doing.RUNS, Doing.SLEEP, Doing.OTHER)):
        settled(pids[rank], what)

    taken = take(pids, within_s=DEADLINE_S)

    assert [(stack.rank, stack.pid) for stack in taken] == list(pids.items())
    mains = [stack.main for stack in taken]
    assert [main and main.frames[0].function for main in mains] == ["locked", "busy", "asleep", "reads_a_pipe"]
    assert [main and main.is_active for main in mains] == [False, True, False, False]
    assert [main and main.holds_gil for main in mains] == [False, True, False, False]
    assert mains[3]
    assert mains[3].target.startswith("pipe:")
    assert all(main and main.frames[0].short_file == "train.py" for main in mains)


def test_a_moment_in_which_another_thread_has_the_gil_does_not_count(
    stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    """elaunch's thread takes the GIL when the agent queries it. A loop that was sampled so was reported too late."""
    frames = [{"name": "busy", "filename": "/train.py", "line": 9, "locals": []}]
    main = {"os_thread_id": os.getpid(), "thread_name": "MainThread", "active": True, "frames": frames}
    (tmp_path / "seen").write_text(json.dumps([{**main, "owns_gil": False}]))
    (tmp_path / "seen--locals").write_text(json.dumps([{**main, "owns_gil": True}]))
    stand_in(f"with=\nfor option; do [ $option = --locals ] && with=$option; done\ncat {tmp_path}/seen$with")

    (stack,) = take({0: os.getpid()})

    assert stack.main
    assert stack.main.holds_gil


def test_a_process_that_cannot_be_read_has_the_reason() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(DEADLINE_S)
    with subprocess.Popen(["sleep", "600"]) as other:
        wait_for(lambda: Path(f"/proc/{other.pid}/comm").read_text() == "sleep\n", "exec")
        troubles = [stack.trouble for stack in take({0: gone.pid, 1: other.pid}, within_s=DEADLINE_S)]
        other.kill()

    assert troubles == ["the process is gone", "it is not a Python process, or its interpreter is still starting"]


def test_without_py_spy_that_is_the_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_tool", lambda: None)

    (stack,) = take({5: os.getpid()})

    assert (stack.rank, stack.trouble, linux.state(os.getpid())) == (5, NO_TOOL, "R")


@pytest.mark.parametrize("printed", ["", "{}", "[1]", '[{"frames": 1}]', "[" * 100_000])
def test_output_that_is_none_of_py_spys_is_a_trouble(
    stand_in: Callable[[str], None], tmp_path: Path, printed: str
) -> None:
    (tmp_path / "printed").write_text(printed)
    stand_in(f"cat {tmp_path}/printed")

    (stack,) = take({0: os.getpid()})

    assert stack.trouble == "py-spy printed something that cannot be parsed"


def test_a_py_spy_that_does_not_even_end_when_it_is_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # As one that waits for a process in an uninterruptible sleep, which no test can make.
    never = threading.Event()

    def hangs(command: list[str], timeout: float, **_: object) -> None:
        never.wait(DEADLINE_S)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(stacks.subprocess, "run", hangs)
    begun_s = time.monotonic()

    (stack,) = take({3: os.getpid()}, within_s=0.2)

    never.set()
    assert time.monotonic() - begun_s < 60
    assert (stack.rank, stack.pid, stack.threads) == (3, os.getpid(), ())
    assert stack.trouble == "py-spy did not finish in time"
