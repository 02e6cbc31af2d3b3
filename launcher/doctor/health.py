"""`--health-check`: the quick checks of this node, beside the import of torch and before the node joins its job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from elaunch.launcher.doctor.devices import check_gpus
from elaunch.launcher.doctor.host import Finding, Grade, Needs, check_limits, check_shm
from elaunch.launcher.errors import SiteError

# A healthy node answers in a moment, one whose GPUs have no persistence mode in seconds.
_LIMIT_S = 20.0


class HealthCheck:
    """The checks run in a thread: a driver may hang.

    A `strict` check keeps an unhealthy node out of the job: `begin` waits, and raises. Else nothing waits, and what is
    wrong is logged when it is known.
    """

    def __init__(self, workers: int, environ: Mapping[str, str], *, is_strict: bool) -> None:
        self._is_strict, self._needs, self._environ = is_strict, Needs(workers=workers), environ
        self._findings: list[Finding] = []
        self._is_closed = False

    def begin(self, say: Callable[[str], None]) -> None:
        """Raises SiteError for an unhealthy node, if the check is strict."""
        thread = threading.Thread(target=self._check, args=(say,), name="elaunch-health", daemon=True)
        thread.start()
        if not self._is_strict:
            return
        thread.join(_LIMIT_S)
        if complaints := ["its GPUs do not answer"] if thread.is_alive() else self._complaints():
            raise SiteError(
                f"this node does not join the job, since it is not healthy: {'; '.join(complaints)}."
                " elaunch doctor shows more; --health-check warn joins all the same"
            )

    def close(self) -> None:
        """Nothing is logged of the check any more."""
        self._is_closed = True

    def _check(self, say: Callable[[str], None]) -> None:
        # A check that fails itself is no complaint: that is not the node's fault.
        with suppress(Exception):
            self._findings += [*check_shm(self._needs), *check_limits(self._needs)]
            self._findings += check_gpus(self._environ, self._needs, has_processes=False)
        for complaint in () if self._is_strict else self._complaints():
            if not self._is_closed:
                say(f"this node is not healthy: {complaint} (--health-check strict would keep it out of the job)")

    def _complaints(self) -> list[str]:
        return [f"{each.found} ({each.advice})" for each in self._findings if each.grade is Grade.BAD]
