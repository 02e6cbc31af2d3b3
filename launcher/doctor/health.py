"""`--health-check`: the quick checks of this node, beside the import of torch and before the node joins its job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from elaunch.launcher.doctor.devices import gpus_probe
from elaunch.launcher.doctor.findings import Grade, Needs, ProbeFailed, from_json
from elaunch.launcher.doctor.host import check_limits, check_shm
from elaunch.launcher.errors import SiteError

# A healthy node answers in a moment, one whose GPUs have no persistence mode in seconds.
_LIMIT_S = 20.0
_CLOSE_S = 1.0


class HealthCheck:
    """GPUs are checked in a process of their own from the start. Make it while this process has one thread.

    A `strict` check keeps an unhealthy node out of the job: `done` waits, and raises. Else nothing waits, and `done`
    starts a thread that logs what is wrong.
    """

    def __init__(self, workers: int, environ: Mapping[str, str], *, is_strict: bool) -> None:
        self._is_strict, self._needs = is_strict, Needs(workers=workers)
        self._probe = gpus_probe(self._needs, _LIMIT_S, environ, has_processes=False)
        self._reporter: threading.Thread | None = None

    def done(self, say: Callable[[str], None]) -> None:
        """Raises SiteError for an unhealthy node, if the check is strict."""
        if not self._is_strict:
            self._reporter = threading.Thread(target=self._report, args=(say,), name="elaunch-health", daemon=True)
            self._reporter.start()
            return
        if complaints := self._complaints():
            raise SiteError(
                f"this node does not join the job, since it is not healthy: {'; '.join(complaints)}."
                " elaunch doctor shows more; --health-check warn joins all the same"
            )

    def close(self) -> None:
        """End what still runs of the check; nothing is logged of it any more."""
        self._probe.kill()
        if self._reporter:
            self._reporter.join(_CLOSE_S)

    def _report(self, say: Callable[[str], None]) -> None:
        for complaint in self._complaints():
            say(f"this node is not healthy: {complaint} (--health-check strict would keep it out of the job)")

    def _complaints(self) -> list[str]:
        """What is bad on this node. A check that fails itself is no complaint: that is not the node's fault."""
        findings = [*check_shm(self._needs), *check_limits(self._needs)]
        try:
            findings += from_json(self._probe.answer())
        except ProbeFailed as error:
            if error.is_late:
                return [f"its GPUs: {error}"]
        except ValueError:
            pass
        return [f"{each.found} ({each.advice})" for each in findings if each.grade is Grade.BAD]
