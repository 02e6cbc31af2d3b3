"""agent.workers.observers: what the agent's loop leaves to other threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elaunch.agent.core.actions import KeepStacks
from elaunch.agent.output.run_dir import RunDir, Timeline
from elaunch.agent.workers import observers
from elaunch.agent.workers.group import Reporter, WorkerGroup
from elaunch.agent.workers.observers import STACKS_FILE, Observers
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Failure, FailureKind, RankTable, Seat
from tests.harness import wait_for


def group() -> WorkerGroup:
    seats = (Seat("node-a-00000001", 0, 1), Seat("node-b-00000001", 1, 1))
    return WorkerGroup(RankTable(0, seats, "node-a", 5, ""), 1)


def no_failure(kind: FailureKind, generation: int, message: str) -> Failure:
    raise AssertionError((kind, generation, message))


def test_the_loop_never_waits_for_the_disk_to_which_stacks_go(tmp_path: Path) -> None:
    said: list[str] = []
    works: list[Callable[[], object]] = []
    run_dir = RunDir(tmp_path, "job", said.append)
    reporter = Reporter(lambda _: None, said.append, said.append, Timeline(None, said.append, works.append), no_failure)
    monitor = Observers(group(), reporter, run_dir, Times(hang_after_s=60.0), works.append)

    for text in ("one\n", "two\n"):
        monitor.act(KeepStacks(3, text))

    assert run_dir.logs
    path = run_dir.logs / "attempt_3" / STACKS_FILE
    assert not path.parent.exists()
    for work in works:
        work()
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert said == [f"all stacks are in {path}"] * 2


@pytest.mark.parametrize("answers", [["refused", "refused"], ["refused", ""]])
def test_a_node_that_cannot_reach_rank_0_in_two_tries_says_so_once(
    tmp_path: Path, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, said = [*answers], list[str]()
    monkeypatch.setattr(observers, "why_not", lambda _: left.pop(0))
    monkeypatch.setattr(observers, "_MASTER_AFTER_S", 0.0)
    works: list[Callable[[], object]] = []
    reporter = Reporter(lambda _: None, said.append, said.append, Timeline(None, said.append, works.append), no_failure)
    run_dir = RunDir(tmp_path, "job", said.append)
    monitor = Observers(group(), reporter, run_dir, Times(), works.append, has_store=True)

    monitor.tick(float("inf"))
    wait_for(lambda: not left, "two tries")

    if all(answers):
        wait_for(lambda: said, "the line")
        assert said[0].startswith(
            "this node cannot connect to node-a:5 (refused), MASTER_PORT on the node of rank 0: a fire"
        )
    else:
        assert not said
