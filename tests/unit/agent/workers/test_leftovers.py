"""Which processes count as left behind by workers."""

from __future__ import annotations

import os
import subprocess

from elaunch.agent.workers.leftovers import of_workers
from tests.harness import DEADLINE_S


def test_a_process_that_has_ended_meanwhile_is_not_left_behind() -> None:
    with subprocess.Popen(["sleep", "600"]) as living:
        ended = subprocess.Popen(["true"])
        ended.wait(DEADLINE_S)

        left = of_workers([ended.pid, living.pid], [])
        own = of_workers([living.pid], [os.getpid()])
        living.kill()

    assert left == [living.pid]
    assert own == [], "a child of the fork server is its own"
