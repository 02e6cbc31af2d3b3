"""When a process tries what the program imports, and what its end without an answer means."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaunch.agent.forkserver.learned import Learned
from elaunch.agent.workers.group import CurrentGroup, WorkerGroup
from elaunch.agent.workers.preload_learner import PreloadLearner
from elaunch.rendezvous.job_spec import Program, ProgramKind
from elaunch.rendezvous.types import RankTable, Seat


@dataclass
class Server:
    """Its probes end at once, without an answer: the agent's end of the pipe is the only one."""

    preload: tuple[str, ...] = ("torch",)
    learned: Learned = field(default_factory=Learned)
    probed: list[int] = field(default_factory=list)

    def probe(self, generation: int, fds: tuple[int, ...]) -> None:
        self.probed.append(generation)


@dataclass
class Loop:
    learner: PreloadLearner
    selector: selectors.BaseSelector
    current: CurrentGroup
    said: list[str]

    def begin(self, generation: int, local_rank: int = 0) -> WorkerGroup:
        """Begin a generation in which only one worker can be asked."""
        group = WorkerGroup(RankTable(generation, (Seat("a-00000001", 1, 0),), "127.0.0.1", 1, "the job starts"), 0)
        recorder = SimpleNamespace(imports=lambda: b"module\tslow\t/x/site-packages/slow.py")
        for rank in range(local_rank + 1):
            asked = recorder if rank == local_rank else None
            group.links[rank] = cast(Any, SimpleNamespace(recorder=asked, has_returned=False))
        self.current.begin(group)
        return group

    def run(self, begin_s: int) -> None:
        for now_s in range(begin_s, begin_s + 20):
            self.learner.tick(now_s)
            for key, _ in self.selector.select(0):
                key.data()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def loop(server: Server, tmp_path: Path) -> Iterator[Loop]:
    said: list[str] = []
    current, program = CurrentGroup(), Program(ProgramKind.SCRIPT, "train.py", (), ("python", "train.py"))
    reporter = cast(Any, SimpleNamespace(say=said.append))
    with selectors.DefaultSelector() as selector:
        file = tmp_path / "learned"
        learner = PreloadLearner(cast(Any, server), program, current, reporter, selector, file, lambda work: work())
        yield Loop(learner, selector, current, said)


def test_an_import_that_ends_its_process_is_tried_once_and_it_is_said(server: Server, loop: Loop) -> None:
    loop.begin(0)
    loop.run(0)

    assert server.probed == [0]
    (sentence,) = loop.said
    assert "an import ended the process that tried it" in sentence


def test_a_rank_with_a_process_group_is_asked_where_the_first_one_has_none(server: Server, loop: Loop) -> None:
    loop.begin(0, local_rank=1)
    loop.run(0)

    assert server.probed == [0]


def test_a_probe_that_ended_with_its_generation_is_made_again_in_the_next_one(server: Server, loop: Loop) -> None:
    group = loop.begin(0)
    for now_s in range(6):
        loop.learner.tick(now_s)
    # The sweep of the generation comes next, and the answer's end is read only then.
    loop.learner.end(group)
    loop.begin(1)
    loop.run(10)

    assert server.probed == [0, 1]
    assert len(loop.said) == 1, "generation 1 still runs"
