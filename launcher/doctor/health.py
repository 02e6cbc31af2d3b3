"""`--health-check`: the quick checks of this node, beside the import of torch and before the node joins its job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from elaunch.launcher.doctor.children import Task, TaskProcess, Unfinished
from elaunch.launcher.errors import SiteError

if TYPE_CHECKING:
    from elaunch.launcher.doctor.findings import Finding

# A healthy node answers in milliseconds, one whose GPUs have no persistence mode in seconds.
_LIMIT_S = 20.0
# A check that nobody waits for leaves the CPUs to others, and may have to wait for one.
_IDLE_LIMIT_S = 60.0
_CLOSE_S = 1.0


class HealthCheck:
    """The checks run in a process of their own from the start. Make it while this process has one thread.

    A `strict` check keeps an unhealthy node out of the job: `done` waits, and raises. Else nothing waits, and `done`
    has a thread say what is wrong.
    """

    def __init__(self, workers: int, environ: Mapping[str, str], *, is_strict: bool) -> None:
        self._is_strict = is_strict
        limit_s = _LIMIT_S if is_strict else _IDLE_LIMIT_S
        self._child = TaskProcess(Task(lambda: _complaints(workers, environ, is_strict), limit_s))
        self._reporter: threading.Thread | None = None

    def done(self, say: Callable[[str], None]) -> None:
        """Raises SiteError for an unhealthy node, if the check is strict."""
        if not self._is_strict:
            self._reporter = threading.Thread(target=self._report, args=(say,), name="elaunch-health", daemon=True)
            self._reporter.start()
            return
        if complaints := self._wait():
            raise SiteError(
                f"this node does not join the job, since it is not healthy: {'; '.join(complaints)}."
                " elaunch doctor shows more; --health-check warn joins all the same"
            )

    def close(self) -> None:
        """End what still runs of the check; nothing is said of it any more."""
        self._child.kill()
        if self._reporter:
            # It reaps the child.
            self._reporter.join(_CLOSE_S)
        else:
            self._child.end()

    def _report(self, say: Callable[[str], None]) -> None:
        for complaint in self._wait():
            say(f"this node is not healthy: {complaint} (--health-check strict would keep it out of the job)")

    def _wait(self) -> list[str]:
        found = self._child.wait()
        if isinstance(found, Unfinished):
            return [f"its health check: {found.why}"] if found.is_late else []
        assert isinstance(found, list)
        return found


def _complaints(workers: int, environ: Mapping[str, str], is_strict: bool) -> list[str]:
    """What is bad on this node, in words. A check that fails itself is no complaint: that is not the node's fault."""
    if not is_strict:
        # It takes little from the import of torch. With SCHED_IDLE it could not even be killed while all CPUs are busy.
        with suppress(OSError):
            os.nice(19)
    # Imported in the child alone, and only these: the list of all checks imports much more.
    from elaunch.launcher.doctor.facts import DiskFacts, Needs
    from elaunch.launcher.doctor.findings import Grade
    from elaunch.launcher.doctor.judging import gpus as judge_gpus
    from elaunch.launcher.doctor.judging import host as judge_host
    from elaunch.launcher.doctor.reading import gpus as read_gpus
    from elaunch.launcher.doctor.reading import host as read_host

    needs = Needs(workers=workers)
    # The address and the log folder are not among them: joining finds the one and waits for it, and a job goes on
    # without the other.
    quick: tuple[Callable[[], tuple[Finding, ...]], ...] = (
        lambda: judge_host.judge_shm(read_host.read_shm(), needs),
        lambda: judge_host.judge_disk(DiskFacts((read_host.read_temporary(environ),)), needs),
        lambda: judge_host.judge_limits(read_host.read_limits(), needs),
        lambda: judge_gpus.judge_gpus(read_gpus.read_gpu_facts(environ, has_processes=False), needs),
    )
    complaints: list[str] = []
    for check in quick:
        with suppress(Exception):
            complaints += [f"{each.found} ({each.advice})" for each in check() if each.grade is Grade.BAD]
    return complaints
