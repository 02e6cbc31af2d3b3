"""What an agent hands to a warm fork server, so that this forks a fork server for the agent's job."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.forkserver.warm.condition import Fact, condition
from elaunch.agent.forkserver.wire import Boot
from elaunch.agent.linux import memory_file
from elaunch.rendezvous.codec import decode, encode

# A fork server that stays begins with a marker of so many bytes, in place of which a job's can be written.
MARKER_ROOM = 1024


@dataclass(frozen=True)
class Handover:
    """The job's fork server is to be `boot`'s, with this `environment`; the rest is how the agent's process is.

    `ignored` are the signals that the agent ignores, `blocked` those that it blocks. `oom_score` is its adjustment.
    """

    boot: Boot
    environment: tuple[Fact, ...]
    condition: tuple[Fact, ...]
    umask: int
    ignored: tuple[int, ...]
    blocked: tuple[int, ...]
    oom_score: str

    @classmethod
    def of_this_process(cls, boot: Boot, environment: Mapping[str, str]) -> Handover:
        """For a job whose fork server would be a child of this process."""
        umask = os.umask(0o077)
        os.umask(umask)
        # Python ignores these two itself.
        pythons = (signal.SIGPIPE, signal.SIGXFSZ)
        every = [signum for signum in signal.valid_signals() if signum not in pythons]
        return cls(
            boot,
            tuple(Fact(*item) for item in environment.items()),
            condition(),
            umask,
            tuple(int(each) for each in every if signal.getsignal(each) == signal.SIG_IGN),
            tuple(int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            Path("/proc/self/oom_score_adj").read_text().strip(),
        )

    @property
    def variables(self) -> dict[str, str]:
        """The environment as a dictionary."""
        return {fact.what: fact.value for fact in self.environment}

    def memfd(self) -> int:
        """A new descriptor from which a process that gets it can `read` this."""
        return memory_file("elaunch-handover", encode(self))

    @classmethod
    def read(cls, fd: int) -> Handover:
        """Read it from `fd`, and close `fd`."""
        with open(fd) as file:
            return decode(cls, file.read())
