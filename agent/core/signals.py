"""The signals that the core speaks of, by their numbers on Linux; `signal` itself is of the operating system."""

from __future__ import annotations

from enum import IntEnum


class Signal(IntEnum):
    """As `signal.Signals`, and equal to it."""

    SIGHUP = 1
    SIGINT = 2
    SIGQUIT = 3
    SIGABRT = 6
    SIGKILL = 9
    SIGUSR1 = 10
    SIGUSR2 = 12
    SIGPIPE = 13
    SIGTERM = 15


SIGHUP, SIGINT, SIGQUIT, SIGABRT = Signal.SIGHUP, Signal.SIGINT, Signal.SIGQUIT, Signal.SIGABRT
SIGKILL, SIGUSR1, SIGUSR2, SIGTERM = Signal.SIGKILL, Signal.SIGUSR1, Signal.SIGUSR2, Signal.SIGTERM
# Not sent by anybody: the agent found that nobody reads its stdout any more (agent/output/streams.py).
SIGPIPE = Signal.SIGPIPE
# Those that end the job on all nodes, not only this node's part in it: they are a person's.
ENDS_JOB = frozenset((SIGINT, SIGPIPE))
# Exit code of a program that a signal ended, as a shell says it: this and the signal.
SHELL_BASE = 128
