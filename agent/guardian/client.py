"""The agent's client of the guardian, which also kills the workers' processes after each generation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from elaunch.agent.guardian import guardian
from elaunch.agent.guardian.guardian import RUN_DIRS, VARIABLE, JobProcesses, clean_up, is_cleaner, living, sweep


class GuardianClient:
    """Starts the guardian. From then on this process may die at any moment, without leaving any of the job behind.

    Those of `run_dirs` that exist at the end are removed. The job's processes have `marker` in their environment;
    `inherited` is the rest of that environment. `fileno` is readable when the guardian has been killed.
    """

    def __init__(self, run_dirs: tuple[str, ...], inherited: Mapping[str, str]) -> None:
        self.marker = os.urandom(8).hex()
        self._job = JobProcesses.of_this_process(self.marker, inherited)
        self.restarts = 0
        self._run_dirs = run_dirs
        self._notes: dict[str, object] = {}
        self._socket, self._process = self._start()

    def fileno(self) -> int:
        return self._socket.fileno()

    def restart(self) -> None:
        """Replace a guardian that was killed. Raises OSError where that fails."""
        self._socket.close()
        self._process.wait()
        self.restarts += 1
        self._socket, self._process = self._start()
        self.note()

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        # A guardian that is stopped (SIGSTOP) reads nothing, and must not block the agent.
        ours.setblocking(False)
        with theirs:
            # Without the user's environment: the guardian must have neither its PYTHON* variables nor its markers.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", guardian.__file__, json.dumps(self._job)],
                # Every user can read the arguments of a process, and could create these folders first.
                env={"PATH": os.environ.get("PATH", os.defpath), RUN_DIRS: json.dumps(self._run_dirs)},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        return ours, process

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """`inherited` with this agent's marker after those of the agents above it."""
        above = inherited.get(VARIABLE)
        return {**inherited, VARIABLE: f"{above},{self.marker}" if above else self.marker}

    def note(self, **facts: object) -> None:
        """Note facts for the guardian's report of a killed agent.

        `pid`, `host`, `form` of lines, `timeline`, `generation` and its `workers`. An agent that notes `is_over` exits
        normally.
        """
        self._notes |= facts
        # The agent's loop notices a killed guardian by `fileno`.
        with suppress(OSError):
            self._socket.send(json.dumps(self._notes).encode() + b"\n")

    def left(self, spare: Collection[int]) -> list[int]:
        """The job's live processes, except fork servers (`spare`) and helpers that exit by themselves.

        The store of a generation, a child of the fork server, is one of them.
        """
        return [pid for pid in sorted(living(self._job, spare)) if not is_cleaner(pid)]

    def end_generation(self, spare: Collection[int], meanwhile: Callable[[], None]) -> None:
        """Kill every process of the workers, orphans too, except the fork servers (`spare`, their pids).

        A process that waits for a disk may exit seconds after its signal. `meanwhile` is called repeatedly then.
        """
        sweep(self._job, spare, meanwhile)

    def finish(self) -> None:
        """Let the guardian clean up, and wait for it. If the guardian was killed, this process cleans up."""
        self.note(is_over=True)
        self._socket.close()
        if self._process.wait() != 0:
            clean_up(self._job, self._run_dirs)
