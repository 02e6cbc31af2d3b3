"""agent.linux: what the kernel says of a process and a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from elaunch.agent.linux import catches, children, state
from tests.harness import DEADLINE_S, wait_for

_WAITS = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
print(flush=True)
sys.stdin.read()
"""


def test_who_has_a_handler_and_who_is_stopped_shows() -> None:
    with subprocess.Popen([sys.executable, "-c", _WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()

        assert catches(process.pid, signal.SIGUSR1)
        assert not catches(process.pid, signal.SIGUSR2)

        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: state(process.pid) == "T", "the stop")
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: state(process.pid) != "T", "its going on")

        process.communicate(timeout=DEADLINE_S)
    assert not catches(process.pid, signal.SIGUSR1)


def test_the_children_of_every_thread_are_found() -> None:
    program = """
import subprocess, threading
def begin(): subprocess.Popen(["sleep", "600"]).wait()
thread = threading.Thread(target=begin, daemon=True)
thread.start()
thread.join()
"""
    with subprocess.Popen([sys.executable, "-c", program], process_group=0) as process:
        (child,) = wait_for(lambda: children(process.pid), "the child of the thread")
        assert state(child) in "SRD"
        os.killpg(process.pid, signal.SIGKILL)
    assert children(process.pid) == []
    assert state(process.pid) == ""
