"""`--health-check`: the quick checks of this node, beside the import of torch and before the node joins its job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from elaunch.launcher.doctor.devices import check_gpus
from elaunch.launcher.doctor.host import Finding, Grade, Needs, check_limits, check_shm
from elaunch.launcher.errors import SiteError

# A healthy node answers in a moment, one whose GPUs have no persistence mode in seconds.
_LIMIT_S = 20.0


@contextmanager
def health_check(
    workers: int, environ: Mapping[str, str], say: Callable[[str], None], *, is_strict: bool
) -> Iterator[None]:
    """Run the checks in a thread: a driver may hang. What is wrong is logged when it is known, until the context ends.

    A strict check is waited for, and raises SiteError for an unhealthy node, which keeps it out of the job.
    """
    needs, findings, is_over = Needs(workers=workers), list[Finding](), threading.Event()

    def complaints() -> list[str]:
        return [f"{each.found} ({each.advice})" for each in findings if each.grade is Grade.BAD]

    def check() -> None:
        # A check that fails itself is no complaint: that is not the node's fault.
        with suppress(Exception):
            findings.extend([*check_shm(needs), *check_limits(needs)])
            findings.extend(check_gpus(environ, needs))
        for complaint in () if is_strict or is_over.is_set() else complaints():
            say(f"this node is not healthy: {complaint} (--health-check strict would keep it out of the job)")

    thread = threading.Thread(target=check, name="elaunch-health", daemon=True)
    thread.start()
    if is_strict:
        thread.join(_LIMIT_S)
        if bad := ["its GPUs do not answer"] if thread.is_alive() else complaints():
            raise SiteError(
                f"this node does not join the job, since it is not healthy: {'; '.join(bad)}."
                " elaunch doctor shows more; --health-check warn joins all the same"
            )
    try:
        yield
    finally:
        is_over.set()
