"""agent.diagnosis.samplers: real processes from outside, and replies about collectives.

tests/e2e/test_hangs.py has real ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from elaunch.agent.diagnosis.hang import HangState, IdleKind, Window, after_windows
from elaunch.agent.diagnosis.samplers import FlightRecorder, ProcSampler
from tests.harness import DEADLINE_S, wait_for

PROGRAMS = {
    "idle": "threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()",
    "loop": "ready()\nwhile True: pass",
    "touches_memory": "import mmap; ready()\nwhile True: mmap.mmap(-1, 1 << 22).write(bytes(1 << 22))",
    "reads": "file = open('/dev/zero', 'rb'); ready()\nwhile not time.sleep(0.01): file.read(1 << 14)",
    "child": "ready()\nif os.fork(): time.sleep(600)\nwhile True: pass",
    "stopped": "ready(); time.sleep(600)",
}
# One that gets a twentieth of a CPU does nothing, by definition: on a busy machine they need more than a fair share.
BEGIN = """
import contextlib, os, threading, time
with contextlib.suppress(PermissionError): os.nice(-15)
def ready(): print('ready', flush=True)
"""
REST = b'"last_started_collective": -1, "last_completed_collective": 0}}}'
EXPECTED = {"idle": IdleKind.IDLE, "loop": IdleKind.SPINS, "stopped": IdleKind.STOPPED}


@pytest.fixture
def running() -> Iterator[dict[str, int]]:
    programs = {
        name: subprocess.Popen([sys.executable, "-c", BEGIN + text], stdout=subprocess.PIPE, process_group=0)
        for name, text in PROGRAMS.items()
    }
    for program in programs.values():
        assert program.stdout
        assert program.stdout.readline() == b"ready\n"
    yield {name: program.pid for name, program in programs.items()}
    for program in programs.values():
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate(timeout=DEADLINE_S)


def idle_kind_of(window: Window) -> IdleKind | None:
    state = after_windows(HangState(), frozenset({0}), {0: window})
    return state.idle[0][0] if 0 in state.idle else None


def test_a_process_that_does_nothing_is_distinguished_from_one_that_works(running: dict[str, int]) -> None:
    os.kill(running["stopped"], signal.SIGSTOP)
    names = list(running)
    sampler = ProcSampler(every_s=0.25)
    matched: set[str] = set()

    def all_match() -> bool:
        # They share few CPUs, so a short window of one of them may be between two turns of its work.
        if time.monotonic() < sampler.due_s:
            return False
        windows = sampler.sample(dict(enumerate(running.values())), time.monotonic())
        kinds = {names[rank]: idle_kind_of(window) for rank, window in windows.items()}
        matched.update(name for name, kind in kinds.items() if kind is EXPECTED.get(name))
        return matched == set(names)

    try:
        wait_for(all_match, "each process is what it is", every_s=0.05)
    except AssertionError as error:
        raise AssertionError(f"{error}; {matched} match") from None


def test_a_pid_that_is_gone_or_that_another_process_has_now_is_not_the_worker() -> None:
    sampler = ProcSampler(every_s=0.0)
    with subprocess.Popen(["sleep", "600"]) as worker, subprocess.Popen(["sleep", "600"]) as other:
        try:
            sampler.sample({0: worker.pid, 1: os.getpid()}, 1.0)
            both = sampler.sample({0: worker.pid, 1: os.getpid()}, 2.0)
            # Rank 1 has the pid of another process now.
            first = sampler.sample({0: worker.pid, 1: other.pid}, 3.0)
            # It began at the same time.
            exchanged = sampler.sample({0: other.pid, 1: worker.pid}, 4.0)
        finally:
            worker.kill()
            other.kill()

    assert (set(both), set(first), exchanged) == ({0, 1}, {0}, {})
    assert sampler.sample({0: worker.pid, 1: -1}, 4.0) == {}


@pytest.mark.parametrize("reply", [b"x", b"n[]", b"n\xff", b"e", b"n" + b"9" * 60_000])
def test_a_reply_of_another_form_has_no_counts(reply: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recorder = FlightRecorder(ours.detach())
    with theirs:
        assert recorder.poll(1.0) is None
        assert theirs.recv(32) == b"n"
        theirs.send(reply)
        theirs.send(b"n{}")

        assert not recorder.poll(2.0)
        assert not recorder.is_stalled(2.0)
        assert recorder.counts == {}
        theirs.close()
        assert recorder.poll(3.0) is None
    recorder.close()


def test_a_worker_that_floods_its_agent_is_read_in_order_and_only_in_part_at_each_poll() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recorder = FlightRecorder(ours.detach())
    theirs.setblocking(False)
    sent, polled = 0, []
    with theirs:
        for now_s in range(4):
            with suppress(BlockingIOError):
                while True:
                    theirs.send(b'n{"pg_status": {"0": {"last_enqueued_collective": %d,' % sent + REST)
                    sent += 1
            polled.append(recorder.poll(float(now_s)))
    recorder.close()

    seen = [counts[0, 0].entered if counts else -1 for counts in polled]
    assert sent > 32, "the flood is longer than what a poll reads"
    assert seen == [15, 31, 47, 63]
