"""Reads what a worker leaves at its exit (exit code, error file, link, kernel log) and makes one event of it."""

from __future__ import annotations

import os
import signal
import stat
import time
from contextlib import suppress
from dataclasses import replace

from elaunch.agent.core.events import WorkerExited
from elaunch.agent.diagnosis.exit_status import CRASH_CODES, Remains, end_of, failure_of
from elaunch.agent.diagnosis.investigate import KernelLog, limit_text
from elaunch.agent.forkserver.reports import EXIT_CODE
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers.group import Worker, WorkerGroup
from elaunch.rendezvous.types import Failure, FailureKind

# The record holds Python's text of the exception twice. The agent's loop waits while a record is read.
BYTES_MAX = 32 << 20
# faulthandler writes at most 100 frames of each of 100 threads; the newest stack is at the end.
_CRASH_BYTES_MAX = 256 << 10


def read_error_file(path: str | os.PathLike[str]) -> str | None:
    """The record in the file. "" if the file is too large to be a record, None if it is not a regular file.

    A pipe would wait for its writer, and a device has no end: neither is read.
    """
    more = os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError), open(path, "rb", opener=lambda path, flags: os.open(path, flags | more)) as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode):
            # The program may still write to the file, so the read has a limit too.
            return "" if found.st_size > BYTES_MAX else file.read(BYTES_MAX).decode(errors="replace")
    return None


def _left_at_crash(fd: int) -> bytes:
    """The tail of a worker's crash file."""
    with suppress(OSError):
        size = os.fstat(fd).st_size
        return os.pread(fd, _CRASH_BYTES_MAX, max(size - _CRASH_BYTES_MAX, 0))
    return b""


class ExitReader:
    """Reads what workers on `host` leave, also in their folders in `run_dir`."""

    def __init__(self, host: str, log: KernelLog, run_dir: RunDir) -> None:
        self._host = host
        self._log = log
        self._run_dir = run_dir

    def exited(self, group: WorkerGroup, worker: Worker, code: int) -> WorkerExited:
        """The event of a worker's exit; `code` is as in `Failure`."""
        link = worker.link
        link.read()
        # A signal did not end a program that had returned. An exit code is a failure, as without a link.
        has_end = code == 0 or (code < 0 and link.has_returned)
        clock = time.strftime("%H:%M:%S")
        end = end_of(self._record(group, worker), clock, is_gone=code == 0) if has_end else None
        if code == 0:
            return WorkerExited(group.generation, worker.local_rank, 0, end=end)
        worker.failure = self._failure(group, worker, code)
        return WorkerExited(group.generation, worker.local_rank, code, worker.failure, end)

    def parent_killed(self, group: WorkerGroup, parent: Failure) -> Failure:
        """The failure of the workers' parent process, killed by SIGKILL."""
        for worker in group.workers:
            worker.link.read()
        group.parent_killed = replace(
            parent,
            code=-signal.SIGKILL,
            progressed=group.progressed or None,
            step=max(worker.link.step for worker in group.workers),
            lived_s=max(worker.lived_s for worker in group.workers),
        )
        return group.parent_killed

    def _failure(self, group: WorkerGroup, worker: Worker, code: int) -> Failure:
        link, error_file = worker.link, self._run_dir.error_file(group.generation, worker.rank)
        record = read_error_file(error_file) if error_file else None
        kernel = self.oom_text(worker.pid) if code == -signal.SIGKILL else ""
        left = _left_at_crash(worker.crash_fd) if code in CRASH_CODES else b""
        remains = Remains(
            code,
            record or "",
            kernel=kernel,
            crash=left.decode(errors="replace"),
            returned=link.has_returned,
            # The program's own, if it had ended before its process crashed.
            own_code=left[-1] if left[:-1].endswith(EXIT_CODE) else None,
            progressed=link.progressed,
            raised=link.raised,
            lost=link.lost_at_end,
            refused=link.refused,
        )
        return replace(
            failure_of(self._record(group, worker), remains, signal_name(code)),
            error_file=str(error_file) if record is not None and self._run_dir.logs else "",
            is_mixed=worker.is_mixed,
        )

    def _record(self, group: WorkerGroup, worker: Worker) -> Failure:
        return Failure(
            FailureKind.EXIT_CODE,
            group.generation,
            group.node_id,
            self._host,
            worker.rank,
            worker.local_rank,
            worker.pid,
            None,
            "",
            log_path=worker.log_path,
            failed_at=time.time(),
            progressed=worker.link.progressed,
            step=worker.link.step,
            lived_s=worker.lived_s,
            world_size=group.table.world_size,
        )

    def oom_text(self, pid: int) -> str:
        """Why the kernel killed this process for lack of memory; empty if it did not."""
        text = self._log.oom_text(pid, time.monotonic())
        limit = limit_text() if text else ""
        return f"{text}; its cgroup may hold {limit}" if limit else text


def signal_name(code: int) -> str:
    """The name of the signal whose number is minus `code`. Empty if `code` is not negative."""
    try:
        return signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        return f"signal {-code}"
