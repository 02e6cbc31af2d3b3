"""The first process of a container: it reaps what loses its parent, passes signals on, and ends with the agent's code.

The kernel drops signals that process 1 has no handler for, and ends all others the moment it ends: an agent in its
place would not hear a SIGTERM that comes while it starts, and its guardian could not outlive it. So the agent is a
child, as under tini, and nothing has to be installed for that.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Set
from contextlib import suppress

# From the agent's end to that of what it leaves behind: its guardian's work. What is alive then dies by the kernel.
_LAST_S = 10.0

# Faults of this process itself, and what cannot be waited for.
_OWN = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
    signal.SIGTRAP, signal.SIGSYS,
}  # fmt: skip
# `si_code` of a signal that the kernel made, as a terminal's Ctrl-C (asm-generic/siginfo.h).
_SI_KERNEL = 0x80


def stand_in() -> None:
    """Return in a child, which is to be the agent; this process becomes the container's init and never returns."""
    waited = signal.valid_signals() - _OWN
    # Where it is ignored, the kernel reaps children itself and says nothing.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    agent = os.fork()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    from elaunch.agent.linux import set_command_line

    # The number is for the image's health check (deploy/docker); with 7 digits it just fits in.
    set_command_line(("elaunch: init",), f"init-of-{agent}")
    code = _attend(agent, waited)
    _wait_for_the_last()
    os._exit(code)


def _attend(agent: int, waited: Set[int]) -> int:
    """Reap and pass on until the agent has ended; its exit code, 128 + n where signal n ended it."""
    while True:
        heard = signal.sigwaitinfo(waited)
        if heard.si_signo != signal.SIGCHLD:
            # A terminal tells its whole foreground group, the agent too: a second Ctrl-C would be "kill now".
            if heard.si_code != _SI_KERNEL:
                os.kill(agent, heard.si_signo)
            continue
        for pid, status in _reaped():
            if pid == agent:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def _reaped() -> list[tuple[int, int]]:
    """All children that have ended by now: one SIGCHLD may stand for several."""
    found = []
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _wait_for_the_last() -> None:
    """A guardian that the agent had no time to wait for does its work, and it is no child's child any more."""
    end_s = time.monotonic() + _LAST_S
    with suppress(ChildProcessError):
        while (left_s := end_s - time.monotonic()) > 0:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                signal.sigtimedwait({signal.SIGCHLD}, left_s)
