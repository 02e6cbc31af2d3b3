"""Reads what a worker leaves at its exit (exit code, error file, link, kernel log) and makes one event of it."""

from __future__ import annotations

import signal
import time

from elaunch.agent.core.crash import CODES
from elaunch.agent.core.events import WorkerExited
from elaunch.agent.core.failures import Place, Remains, end_of, failure_of
from elaunch.agent.workers.error_file import read_error_file
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.oom import OutOfMemoryWatch, held_text, limit_text
from elaunch.records import replace


class ExitReader:
    """Reads what workers on `host` leave. `keeps_files` says that their error files outlive the job."""

    def __init__(self, host: str, oom: OutOfMemoryWatch, *, keeps_files: bool) -> None:
        self._host = host
        self._oom = oom
        self._keeps_files = keeps_files

    def exited(self, group: WorkerGroup, local_rank: int, pid: int, code: int) -> WorkerExited:
        """The event of a worker's exit; `code` is as in `Failure`."""
        link = group.links.get(local_rank)
        if link:
            link.read()
        now, step, lived_s = time.time(), link.step if link else -1, group.lived_s(local_rank)
        place = Place(group.generation, group.node_id, self._host, group.rank(local_rank), local_rank, pid)
        progressed = True if link and link.step >= 0 else link.reached_store if link else None
        end = None
        if code == 0 or (link and link.has_returned):
            remains = Remains(code, progressed=progressed, step=step, lived_s=lived_s)
            end = end_of(place, remains, time.strftime("%H:%M:%S", time.localtime(now)), now)
            end = replace(end, log_path=group.log_files.get(local_rank, ""))
        if code == 0:
            return WorkerExited(group.generation, local_rank, 0, end=end)
        error_file = group.error_files.get(local_rank)
        record = read_error_file(error_file) if error_file else None
        kernel = self.word_of_kernel(pid, group) if code == -signal.SIGKILL else ""
        stack = group.crash_files[local_rank].read() if code in CODES and local_rank in group.crash_files else ""
        remains = Remains(
            code,
            record or "",
            kernel=kernel,
            crash=stack,
            progressed=progressed,
            raised=link is not None and link.raised,
            step=step,
            lived_s=lived_s,
        )
        failure = failure_of(place, remains, signal_name(code), now)
        failure = replace(
            failure,
            log_path=group.log_files.get(local_rank, ""),
            error_file=str(error_file) if record is not None and self._keeps_files else "",
            is_mixed=local_rank in group.mixed,
        )
        group.failures[local_rank] = failure
        return WorkerExited(group.generation, local_rank, code, failure, end)

    def word_of_kernel(self, pid: int, group: WorkerGroup | None) -> str:
        """What the kernel says about the SIGKILL of this process, with the numbers as they are now.

        Empty if it was not for lack of memory, as far as is known. The other workers of `group` still live.
        """
        word = self._oom.word_on(pid, time.monotonic())
        if not word:
            return ""
        pids = group.pids.items() if group else ()
        others = {group.rank(local_rank): other for local_rank, other in pids if group and other != pid}
        limit, held = limit_text(), held_text(others) if others else ""
        return "; ".join([word, *([f"its cgroup may hold {limit}"] if limit else []), *([held] if held else [])])


def signal_name(code: int) -> str:
    """The name of the signal whose number is minus `code`. Empty if `code` is not negative."""
    try:
        return signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        return f"signal {-code}"
