"""Runs the user's command for an event (`--on-event`), in a thread, one run at a time, each bounded in time."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from elaunch.agent.linux import memory_file, start_thread

RUN_S_MAX = 10.0
# At the job's end all pending runs together have this time.
FLUSH_S = 10.0
QUEUED_MAX = 32
# The log gets this much of a run's output.
OUTPUT_BYTES_MAX = 8 << 10
_KILLED_S, _LOOK_S = 1.0, 0.1


def run_limited(
    command: tuple[str, ...], environment: Mapping[str, str], stdin: int, output: int, limit_s: float
) -> str:
    """Run a command in a session of its own. Returns what went wrong, if anything. Raises OSError if none starts.

    The file `output` keeps its first OUTPUT_BYTES_MAX.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    until_s = time.monotonic() + limit_s
    try:
        while process.returncode is None:
            if time.monotonic() > until_s:
                return f"did not end within {limit_s:.0f} s and was killed"
            if (size := os.fstat(output).st_size) > OUTPUT_BYTES_MAX:
                # The output beyond the limit becomes a hole, which takes no memory.
                os.ftruncate(output, OUTPUT_BYTES_MAX)
                os.ftruncate(output, size)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                # SIGKILL does not end a process that waits in a driver.
                process.wait(_KILLED_S)
    if (code := process.returncode) < 0:
        return f"was killed by signal {-code}"
    return f"exited with code {code}" if code else ""


class EventHook:
    """Gives each event to `command` (without a shell) as one JSON object on stdin.

    Events run in order. A run that takes longer than RUN_S_MAX is killed with its process group. Its output, and how
    it failed, go to `log`. `environment` is what the command inherits.
    """

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str], log: Callable[..., None]) -> None:
        self._command = command
        self._environment = environment
        self._log = log
        self._events: queue.Queue[Mapping[str, Any] | None] = queue.Queue(QUEUED_MAX)
        self._until_s = float("inf")
        self._thread = start_thread(self._work, "elaunch-hook")

    def notify(self, event: Mapping[str, Any]) -> None:
        """Queue a run of the command for `event`. Never waits."""
        if self._thread is None:
            self._warn(f"no thread can be started, so {event['event']} is not delivered")
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._warn(f"{QUEUED_MAX} events already wait for the command; {event['event']} is not delivered")

    def close(self) -> None:
        """Wait for the pending runs, FLUSH_S at the longest."""
        if self._thread is None:
            return
        self._until_s = time.monotonic() + FLUSH_S
        # If the queue is full, the thread stops at `_until_s`.
        with suppress(queue.Full):
            self._events.put_nowait(None)
        self._thread.join(FLUSH_S + 1.0)

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            left_s = self._until_s - time.monotonic()
            if left_s <= 0:
                self._warn(f"there is no time left to deliver {event['event']}")
                return
            if trouble := self._run(event, min(RUN_S_MAX, left_s)):
                self._warn(f"{self._command[0]} {trouble}; {event['event']} may not have been delivered")

    def _warn(self, text: str) -> None:
        self._log(f"--on-event: {text}", "warning")

    def _run(self, event: Mapping[str, Any], limit_s: float) -> str:
        """Run the command. Returns what went wrong, if anything."""
        try:
            # Files, not pipes: this thread must not wait for a command that does not read, nor for its orphans.
            stdin, output = memory_file("event", f"{json.dumps(event)}\n"), os.memfd_create("output", os.MFD_CLOEXEC)
            with os.fdopen(stdin), os.fdopen(output):
                trouble = run_limited(self._command, self._environment, stdin, output, limit_s)
                for line in os.pread(output, OUTPUT_BYTES_MAX, 0).decode(errors="replace").splitlines():
                    self._log(f"[on-event] {line}")
                if (more := os.fstat(output).st_size - OUTPUT_BYTES_MAX) > 0:
                    self._log(f"[on-event] … {more} more bytes …")
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        return trouble
