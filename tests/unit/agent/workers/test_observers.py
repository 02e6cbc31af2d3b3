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


def no_failure(kind: FailureKind, generation: int, message: str) -> Failure:
    raise AssertionError((kind, generation, message))


class Node:
    """The second node's observers, what they log, and what they leave to another thread."""

    def __init__(self, folder: Path, times: Times, *, has_store: bool = False) -> None:
        self.logged: list[str] = []
        self.later: list[Callable[[], object]] = []
        self.run_dir = RunDir(folder, "job", self.logged.append)
        log, timeline = self.logged.append, Timeline(None, self.logged.append, self.later.append)
        reporter = Reporter(lambda _: None, log, log, timeline, no_failure)
        seats = (Seat("node-a-00000001", 0, 1), Seat("node-b-00000001", 1, 1))
        group = WorkerGroup(RankTable(0, seats, "node-a", 5, ""), 1)
        self.observers = Observers(group, reporter, self.run_dir, times, self.later.append, has_store=has_store)


def test_the_loop_never_waits_for_the_disk_to_which_stacks_go(tmp_path: Path) -> None:
    node = Node(tmp_path, Times(hang_after_s=60.0))

    for text in ("one\n", "two\n"):
        node.observers.act(KeepStacks(3, text))

    assert node.run_dir.logs
    path = node.run_dir.logs / "attempt_3" / STACKS_FILE
    assert not path.parent.exists()
    for work in node.later:
        work()
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert node.logged == [f"all stacks are in {path}"] * 2


@pytest.mark.parametrize("results", [["refused", "refused"], ["refused", ""]])
def test_a_node_that_cannot_reach_rank_0_in_two_tries_warns_once(
    tmp_path: Path, results: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [*results]
    monkeypatch.setattr(observers, "connect_error", lambda _: left.pop(0))
    monkeypatch.setattr(observers, "_MASTER_AFTER_S", 0.0)
    node = Node(tmp_path, Times(), has_store=True)

    node.observers.tick(float("inf"))
    wait_for(lambda: not left, "two tries")

    if all(results):
        wait_for(lambda: node.logged, "the line")
        assert node.logged[0].startswith(
            "this node cannot connect to node-a:5 (refused), MASTER_PORT on the node of rank 0: a fire"
        )
    else:
        assert not node.logged
