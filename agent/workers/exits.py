"""Reads what a worker leaves at its exit (exit code, error file, link, kernel log) and makes one event of it."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from elaunch.agent.core.events import WorkerExited
from elaunch.agent.core.failures import Place, Remains, failure_of
from elaunch.agent.workers.error_file import read_error_file
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.oom import OutOfMemoryWatch


class ExitReader:
    """Reads what workers on `host` leave. Make it before any worker starts, since it counts the kernel's kills."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._oom = OutOfMemoryWatch()

    def exited(self, group: WorkerGroup, local_rank: int, pid: int, code: int) -> WorkerExited:
        """The event of a worker's exit; `code` is as in `Failure`."""
        link = group.links.get(local_rank)
        if link:
            link.read()
        if code == 0:
            return WorkerExited(group.generation, local_rank, 0)
        error_file = group.error_files.get(local_rank)
        record = read_error_file(error_file) if error_file else None
        kernel = self._oom.word_on(pid) if code == -signal.SIGKILL else ""
        progressed = True if link and link.step >= 0 else link.reached_store if link else None
        place = Place(group.generation, group.node_id, self._host, group.rank(local_rank), local_rank, pid)
        raised = link is not None and link.raised
        remains = Remains(code, record or "", kernel=kernel, progressed=progressed, raised=raised)
        failure = failure_of(place, remains, signal_name(code), time.time())
        failure = replace(
            failure,
            log_path=group.log_files.get(local_rank, ""),
            error_file="" if record is None else str(error_file),
        )
        return WorkerExited(group.generation, local_rank, code, failure)


def signal_name(code: int) -> str:
    """The name of the signal whose number is minus `code`. Empty if `code` is not negative."""
    try:
        return signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        return f"signal {-code}"
