"""The init process of a container: it reaps orphans, forwards signals, and exits with the agent's exit code.

The kernel drops signals for which process 1 has no handler, and kills all other processes when process 1 ends. So an
agent as process 1 would miss a SIGTERM that comes while it starts, and its guardian could not outlive it. Therefore the
agent is a child of process 1, as under tini, which need not be installed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Set
from contextlib import suppress

from elaunch.agent.linux import set_command_line

# After the agent exits, its guardian has this long to kill what is left. Then the kernel kills the rest.
_GUARDIAN_S = 10.0

# Faults of this process itself, and signals that no process can wait for.
_NOT_FORWARDED = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
    signal.SIGTRAP, signal.SIGSYS,
}  # fmt: skip
# `si_code` of a signal that the kernel sent, for example a terminal's Ctrl-C (asm-generic/siginfo.h).
_SI_KERNEL = 0x80


def become_init() -> None:
    """Fork. The child returns and becomes the agent. This process becomes the container's init and never returns."""
    waited = signal.valid_signals() - _NOT_FORWARDED
    # If SIGCHLD is ignored, the kernel reaps children and sends no signal.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    agent = os.fork()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    # The image's health check reads the pid (deploy/docker). A pid of 7 digits just fits into the name.
    set_command_line(("elaunch: init",), f"init-of-{agent}")
    code = _forward_signals(agent, waited)
    # This process adopted the guardian and other orphans when the agent exited.
    end_s = time.monotonic() + _GUARDIAN_S
    with suppress(ChildProcessError):
        while (left_s := end_s - time.monotonic()) > 0:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                signal.sigtimedwait({signal.SIGCHLD}, left_s)
    os._exit(code)


def _forward_signals(agent: int, waited: Set[int]) -> int:
    """Reap children and forward signals until the agent exits. Returns its exit code, 128 + n if signal n ended it."""
    while True:
        received = signal.sigwaitinfo(waited)
        if received.si_signo != signal.SIGCHLD:
            # The kernel sends a terminal's Ctrl-C to the agent too. A second Ctrl-C would mean "kill now".
            if received.si_code != _SI_KERNEL:
                os.kill(agent, received.si_signo)
            continue
        # One SIGCHLD may stand for several children.
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == agent:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
