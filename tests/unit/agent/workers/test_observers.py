"""agent.workers.observers: what the agent's loop leaves to other threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elaunch.agent.core.actions import KeepStacks
from elaunch.agent.output.run_dir import RunDir, Timeline
from elaunch.agent.workers.group import CurrentGroup, Reporter
from elaunch.agent.workers.observers import STACKS_FILE, Observers
from elaunch.rendezvous.types import Failure, FailureKind


def no_failure(kind: FailureKind, generation: int, message: str) -> Failure:
    raise AssertionError((kind, generation, message))


def test_the_loop_never_waits_for_the_disk_to_which_stacks_go(tmp_path: Path) -> None:
    said: list[str] = []
    works: list[Callable[[], object]] = []
    run_dir = RunDir(tmp_path, "job", said.append)
    reporter = Reporter(
        lambda _: None, lambda text, _: said.append(text), Timeline(None, said.append, works.append), no_failure
    )
    monitor = Observers(CurrentGroup(), reporter, run_dir, 60.0, works.append)

    for text in ("one\n", "two\n"):
        monitor.keep_stacks(KeepStacks(3, text))

    assert run_dir.logs
    path = run_dir.logs / "attempt_3" / STACKS_FILE
    assert not path.parent.exists()
    for work in works:
        work()
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert said == [f"all stacks are in {path}"] * 2
