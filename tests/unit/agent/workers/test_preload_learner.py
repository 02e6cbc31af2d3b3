"""When a process tries what the program imports, what becomes of its answer, and what its end without one means."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaunch.agent.config import ProgramText
from elaunch.agent.default_preload import DEFAULT_PRELOAD
from elaunch.agent.forkserver.learned import Learned
from elaunch.agent.forkserver.learned_file import state_of_packages
from elaunch.agent.forkserver.selection import Cost, ProbeAnswer, Selection
from elaunch.agent.workers.group import CurrentGroup, WorkerGroup
from elaunch.agent.workers.preload_learner import PreloadLearner
from elaunch.records import replace
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.types import RankTable, Seat

TEXT = ProgramText(("torch._dynamo",), "a state")


class Successor:
    """A fork server that ends before it is ready, after `news`."""

    def __init__(self, news: list[dict[str, str]]) -> None:
        self._news = news
        self._ours, theirs = socket.socketpair()
        theirs.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def receive(self) -> dict[str, str] | None:
        return self._news.pop(0) if self._news else None

    def lost(self) -> str:
        self._ours.close()
        return "was killed by SIGKILL"


@dataclass
class Server:
    """Its probes end at once: after `answer`, or without one. The pipe's other end is the agent's."""

    preload: tuple[str, ...] = ("torch",)
    learned: Learned = field(default_factory=Learned)
    probed: list[int] = field(default_factory=list)
    answer: ProbeAnswer | None = None
    successors: list[Learned] = field(default_factory=list)
    successor: Successor | None = None

    def probe(self, generation: int, fds: tuple[int, ...]) -> None:
        self.probed.append(generation)
        if self.answer:
            os.write(fds[-1], encode(self.answer).encode())

    def prepare_successor(self, learned: Learned) -> Successor:
        self.successors.append(learned)
        if self.successor is None:
            raise OSError
        return self.successor

    def drop_successor(self) -> None:
        self.successor = None


@dataclass
class Loop:
    learner: PreloadLearner
    selector: selectors.BaseSelector
    current: CurrentGroup
    said: list[str]
    events: list[dict[str, object]]
    file: Path

    def begin(self, generation: int, local_rank: int = 0) -> WorkerGroup:
        """Begin a generation in which only one worker can be asked."""
        group = WorkerGroup(RankTable(generation, (Seat("a-00000001", 1, 0),), "127.0.0.1", 1, "the job starts"), 0)
        recorder = SimpleNamespace(imports=lambda: b"module\tslow\t/x/site-packages/slow.py")
        for rank in range(local_rank + 1):
            asked = recorder if rank == local_rank else None
            group.links[rank] = cast(Any, SimpleNamespace(recorder=asked, has_returned=False))
        self.current.begin(group)
        return group

    @property
    def kept(self) -> Learned:
        """What the next start would read."""
        return decode(Learned, self.file.read_text()) if self.file.exists() else Learned()

    def run(self, begin_s: int) -> None:
        for now_s in range(begin_s, begin_s + 20):
            self.learner.tick(now_s)
            for key, _ in self.selector.select(0):
                key.data()


@pytest.fixture
def server() -> Server:
    return Server()


@contextmanager
def loop_with(server: Server, folder: Path, text: ProgramText = TEXT) -> Iterator[Loop]:
    said: list[str] = []
    current = CurrentGroup()
    events: list[dict[str, object]] = []
    timeline = SimpleNamespace(stamp=lambda generation, event, **fields: events.append({"event": event, **fields}))
    reporter = cast(Any, SimpleNamespace(detail=said.append, timeline=timeline))
    with selectors.DefaultSelector() as selector:
        file = folder / "learned"
        learner = PreloadLearner(cast(Any, server), text, current, reporter, selector, file, lambda work: work())
        yield Loop(learner, selector, current, said, events, file)


@pytest.fixture
def loop(server: Server, tmp_path: Path) -> Iterator[Loop]:
    with loop_with(server, tmp_path) as made:
        yield made


def test_an_import_that_ends_its_process_is_tried_once_and_it_is_said(server: Server, loop: Loop) -> None:
    loop.begin(0)
    loop.run(0)

    assert server.probed == [0]
    (sentence,) = loop.said
    assert "an import ended the process that tried it" in sentence
    assert [each["failed"] for each in loop.events] == ["an import ended the process that tried it"]


@pytest.mark.parametrize(("seconds", "is_worth"), [(0.049, False), (0.05, True)])
def test_what_saves_a_twentieth_of_a_second_is_imported_ahead(
    server: Server, loop: Loop, seconds: float, is_worth: bool
) -> None:
    server.answer = ProbeAnswer(Selection(("slow",), ("bad",), ("bad starts a thread",), 2.0, (Cost("slow", seconds),)))
    loop.begin(0)
    loop.run(0)

    tried = {"modules": 1, "saved_s": seconds, "left_out": 1, "left_out_s": 2.0, "failed": ""}
    said = {"event": "imports_tried", "is_worth": is_worth, "reasons": ("bad starts a thread",), **tried}
    assert loop.events == [said]
    assert [each.program.entries for each in server.successors] == [("slow",)] * is_worth
    # The job may end before any fork server has imported it.
    assert (loop.kept.program.entries, loop.kept.is_tried) == (("slow",) if is_worth else (), False)


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


@pytest.mark.parametrize(
    ("news", "why"),
    [
        ([], "the process that imported it ahead was killed by SIGKILL"),
        ([{"event": "refused", "why": "slow has started a thread"}], "slow has started a thread"),
    ],
    ids=["ended", "refused"],
)
def test_a_fork_server_that_is_not_ready_when_it_ends_is_let_go_of_and_it_is_said_once(
    server: Server, loop: Loop, news: list[dict[str, str]], why: str
) -> None:
    server.answer = ProbeAnswer(Selection(("slow",), costs=(Cost("slow", 1.0),)))
    server.successor = Successor(news)
    loop.begin(0)

    loop.run(0)

    assert server.successor is None
    assert not loop.learner.has_successor
    (sentence,) = loop.said
    assert sentence.endswith(f"again at each restart, since it is not preloaded: {why}")
    assert loop.kept.program.entries == ()


SLOW = Learned(program=Selection(("slow",), costs=(Cost("slow", 1.0),)), variables=("MODE",))


@pytest.mark.parametrize("is_tried", [False, True])
def test_imports_that_no_fork_server_has_made_yet_are_kept_once_one_has_made_them(
    tmp_path: Path, is_tried: bool
) -> None:
    kept = replace(SLOW, is_tried=is_tried)
    (tmp_path / "learned").write_text(encode(kept))
    with loop_with(Server(learned=kept), tmp_path) as loop:
        # It may end here at each start.
        assert loop.kept.program.entries == (("slow",) if is_tried else ())

        loop.learner.ready({"tried": encode(Learned()), "has_programs": True})

        assert loop.kept == replace(SLOW, is_tried=True)


def returned(*unused: str) -> Any:
    return SimpleNamespace(recorder=None, has_returned=True, unused=frozenset(unused))


RAISED = SimpleNamespace(recorder=None, has_returned=False, unused=frozenset({"torch._dynamo"}))


@pytest.mark.parametrize(
    ("links", "noted"),
    [
        ((returned("torch._dynamo"), returned("torch._dynamo")), None),
        ((returned("torch._dynamo"), returned()), ()),
        ((returned(*DEFAULT_PRELOAD), returned(*DEFAULT_PRELOAD)), DEFAULT_PRELOAD),
        ((returned(), RAISED), None),
    ],
    ids=["as its text says", "one rank has used it", "nothing was used", "one rank raised"],
)
def test_what_no_worker_has_used_is_noted_where_the_text_did_not_show_it(
    loop: Loop, links: tuple[Any, ...], noted: tuple[str, ...] | None
) -> None:
    group = loop.begin(0)
    group.links.update(enumerate(links))

    loop.learner.end(group)

    assert ((loop.kept.unused, loop.kept.unused_in) if loop.file.exists() else None) == (
        None if noted is None else (noted, "a state")
    )


def test_what_another_job_of_the_program_has_learned_meanwhile_stays(loop: Loop) -> None:
    group = loop.begin(0)
    group.links.update({0: returned(*DEFAULT_PRELOAD)})
    loop.file.write_text(encode(replace(SLOW, packages=state_of_packages())))

    loop.learner.end(group)

    assert (loop.kept.program, loop.kept.unused_in) == (SLOW.program, "a state")


def test_a_run_of_a_program_without_torch_notes_nothing_that_its_text_shows(tmp_path: Path) -> None:
    with loop_with(Server(), tmp_path, ProgramText(DEFAULT_PRELOAD, "a state")) as loop:
        group = loop.begin(0)
        group.links.update({0: returned(*DEFAULT_PRELOAD)})

        loop.learner.end(group)

        assert not loop.file.exists()
