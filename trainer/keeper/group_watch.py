"""Saves the state when a collective has failed and nobody has died: torch ends this process soon after."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable

from elaunch.trainer.ranks.group_status import GroupStatus, contradictions, has_nccl

# NCCL's watchdog waits for a minute (four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC) before it ends the process.
_LOOK_S = 1.0


class GroupWatch:
    """Within the `with` block a thread asks `status` once a second, and calls `save` when a collective has failed.

    There is no thread if no group has a status. With `tells` it first says which settings contradict each other. Raises
    ValueError for settings under which steps could be wrong.
    """

    def __init__(
        self,
        status: GroupStatus,
        save: Callable[[], object],
        say: Callable[[str], None],
        *,
        tells: bool,
        look_s: float = _LOOK_S,
    ) -> None:
        self._status, self._save, self._say = status, save, say
        self._tells, self._look_s = tells, look_s
        self._is_over = threading.Event()

    def __enter__(self) -> GroupWatch:
        is_known = self._status.is_known
        timeout_s = self._status.timeout_s()
        for sentence in contradictions(os.environ, has_nccl=has_nccl(), is_known=is_known, timeout_s=timeout_s):
            if self._tells:
                self._say(sentence)
        if is_known:
            threading.Thread(target=self._run, name="elaunch-group-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(self._look_s):
            if error := self._status.error():
                self._say(f"a collective has failed, and this rank keeps its last complete step: {error}")
                try:
                    self._save()
                except Exception:
                    # The outermost frame of the thread. torch ends the process in any case.
                    traceback.print_exc()
                return
