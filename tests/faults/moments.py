"""Named moments in a worker's life at which a test has it killed or held; for scripts that workers run.

A file FOLDER/<moment>-<generation>-<step>-<rank> makes that rank do what is in it:

    (empty)    kill itself with SIGKILL
    hold       wait until the file is gone

An empty file FOLDER/together-<generation>-<step>-<rank> is a kill at once with all others that have such a file.

Each moment that strikes is appended to FOLDER/records as a JSON line: `killed` or `held`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])
GENERATION = int(os.environ["ELAUNCH_GENERATION"])
WAIT_S = 0.002


def fix_steps(*, looks: bool = False, snapshots: int = 0) -> None:
    """With `looks` each step has a sync point. `snapshots` is the number of steps between two, 0 as it would be."""
    from elaunch.trainer.keeper.copies import Copies
    from elaunch.trainer.keeper.sync_schedule import SyncSchedule

    if looks:
        SyncSchedule.wanted = lambda *_: 1  # type: ignore[method-assign]
    if snapshots:
        Copies.snapshot_every = property(lambda _: snapshots)  # type: ignore[method-assign, assignment]


class Moments:
    """This rank's moments in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, "generation": GENERATION, "rank": RANK, **fields})
        with (self._folder / "records").open("a") as file:
            file.write(line + "\n")

    def is_asked(self, name: str, step: int) -> bool:
        """Whether the test has such a file for that moment."""
        return self._path(name, step).exists()

    def strike(self, name: str, step: int) -> None:
        """Die, wait or stop here, if the test has such a file."""
        path = self._path(name, step)
        try:
            what = path.read_text()
        except FileNotFoundError:
            return
        if what == "hold":
            self.record("held", moment=name, step=step)
            while path.exists():
                time.sleep(WAIT_S)
        else:
            self.record("killed", moment=name, step=step)
            os.kill(os.getpid(), signal.SIGKILL)

    def strike_together(self, step: int) -> None:
        """Die together with all others that have such a file: the lowest rank kills them when all have come."""
        if not self.is_asked("together", step):
            return
        asked = {int(path.name.rpartition("-")[2]) for path in self._folder.glob(f"together-{GENERATION}-{step}-*")}
        self.record("killed", moment="together", step=step)
        mine = self._folder / f"pid-{GENERATION}-{step}-{RANK}"
        mine.with_suffix(".part").write_text(str(os.getpid()))
        mine.with_suffix(".part").rename(mine)
        if min(asked) != RANK:
            signal.pause()
        while len(pids := list(self._folder.glob(f"pid-{GENERATION}-{step}-?"))) < len(asked):
            time.sleep(WAIT_S)
        others = [int(path.read_text()) for path in pids if not path.name.endswith(f"-{RANK}")]
        # Whoever outlived the first by a millisecond would save its state. The others are stopped before one is killed,
        # and no other thread of this process runs Python code.
        sys.setswitchinterval(1000)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in others:
                os.kill(pid, number)
        os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner: Any, name: str, moment: str, step: Callable[[], int]) -> None:
        """Strike at `moment` before each call of `owner.name`; `step()` is the step then."""
        real = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            self.strike(moment, step())
            return real(*args, **kwargs)

        setattr(owner, name, struck)

    def record_stops(self) -> None:
        """Record each request to stop as `requested`."""
        from elaunch.trainer.keeper.boundary import Boundary

        request = Boundary.request

        def requested(boundary: Boundary, reason: str) -> None:
            request(boundary, reason)
            self.record("requested", reason=reason)

        Boundary.request = requested  # type: ignore[method-assign]

    def _path(self, name: str, step: int) -> Path:
        return self._folder / f"{name}-{GENERATION}-{step}-{RANK}"
