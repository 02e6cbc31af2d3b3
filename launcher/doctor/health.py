"""`--health-check`: the quick checks of this node, beside the import of torch and before the node joins its job."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from elaunch.launcher.doctor.devices import check_gpus
from elaunch.launcher.doctor.findings import Finding, Grade, Needs, Probe, ProbeFailed, as_json, from_json, python
from elaunch.launcher.doctor.host import check_limits, check_shm
from elaunch.launcher.errors import SiteError

# A healthy node answers in a moment, one whose GPUs have no persistence mode in seconds.
_LIMIT_S = 20.0
# A check that nobody waits for leaves the CPUs to others, and may have to wait for one.
_IDLE_LIMIT_S = 60.0
_CLOSE_S = 1.0


class HealthCheck:
    """The checks run in a process of their own from the start. Make it while this process has one thread.

    A `strict` check keeps an unhealthy node out of the job: `done` waits, and raises. Else nothing waits, and `done`
    starts a thread that logs what is wrong.
    """

    def __init__(self, workers: int, environ: Mapping[str, str], *, is_strict: bool) -> None:
        self._is_strict = is_strict
        limit_s = _LIMIT_S if is_strict else _IDLE_LIMIT_S
        self._probe = Probe(python(__name__, str(workers), "strict" if is_strict else "warn"), limit_s, environ)
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
        try:
            findings = from_json(self._probe.answer())
        except ProbeFailed as error:
            return [f"its health check: {error}"] if "within" in str(error) else []
        except ValueError:
            return []
        return [f"{each.found} ({each.advice})" for each in findings if each.grade is Grade.BAD]


def quick_findings(needs: Needs, environ: Mapping[str, str]) -> list[Finding]:
    """The findings of the checks that take a moment."""
    # The address is not among them: joining finds it and waits for it.
    checks: tuple[Callable[[], tuple[Finding, ...]], ...] = (
        lambda: check_shm(needs),
        lambda: check_limits(needs),
        lambda: check_gpus(environ, needs, has_processes=False),
    )
    found: list[Finding] = []
    for check in checks:
        with suppress(Exception):
            found += check()
    return found


def main(workers: int, *, is_strict: bool) -> None:
    """Print the findings, as the process of a `HealthCheck`."""
    if not is_strict:
        # It takes little from the import of torch. With SCHED_IDLE it could not even be killed while all CPUs are busy.
        with suppress(OSError):
            os.nice(19)
    print(as_json(quick_findings(Needs(workers=workers), os.environ)))


if __name__ == "__main__":
    main(int(sys.argv[1]), is_strict=sys.argv[2] == "strict")
