"""Which processes count as left behind by workers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from elaunch.agent.workers.orphans import Leftovers, of_workers
from tests.harness import DEADLINE_S, wait_for

# A shell that becomes another program, with the name that it reads in its arguments.
BECOMES = 'read name; exec sh -c "read end; : $name"'


class Said(list[str]):
    """In place of a reporter."""

    def say(self, text: str) -> None:
        self.append(text)


def test_a_process_that_has_ended_meanwhile_is_not_left_behind() -> None:
    with subprocess.Popen(["sleep", "600"]) as living:
        ended = subprocess.Popen(["true"])
        ended.wait(DEADLINE_S)

        left = of_workers([ended.pid, living.pid], [])
        own = of_workers([living.pid], [os.getpid()])
        living.kill()

    assert left == [living.pid]
    assert own == [], "a child of the fork server is its own"


def test_a_helper_that_was_seen_before_its_program_had_begun_is_not_waited_for() -> None:
    said: Any = Said()
    with subprocess.Popen(["sh", "-c", BECOMES], stdin=subprocess.PIPE) as process:
        assert process.stdin
        left = Leftovers(lambda: of_workers([process.pid], []), 600.0, 100.0, said)
        left.tick(100.5)
        due_s = left.due_s

        process.stdin.write(b"multiprocessing.spawn\n")
        process.stdin.flush()
        wait_for(lambda: b": multiprocessing" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "its program")
        left.tick(102.0)
        process.kill()

    assert due_s is not None
    assert left.due_s is None
    assert not said
