"""agent.answers.answers: a question makes the node answer, and decides nothing."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest

from elaunch.agent.answers.answers import Answers
from elaunch.agent.answers.limits import LOCAL_BURST
from elaunch.agent.core.leaving import OrderAnswer
from elaunch.agent.core.state import Running, Stopping
from elaunch.agent.core.timeline import WorkersSeen
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.rules.questions import Question, Topic, ask
from elaunch.rendezvous.rules.reports import RankReport, read_node_report
from elaunch.rendezvous.store import LeaseGone, Put, Txn
from tests.harness import DEADLINE_S, wait_for
from tests.unit.agent.driver import KEYS, Driver, pair, started

QUESTION = Question("0123456789abcdef", Topic.STATUS, 4711)
SEEN = WorkersSeen(0, 1.0, tuple(RankReport(local, local, -1, step=3) for local in range(3)))


class Heard:
    """What stands in for a loop's `Request`: a question that came by the socket, and its answer."""

    def __init__(self, topic: str, waits: bool = True) -> None:
        self.topic = topic
        self.answer = ""
        self.waits = waits

    def reply(self, text: str) -> bool:
        self.answer = text
        return self.waits


def asking(driver: Driver, question: Question = QUESTION) -> None:
    """Somebody asks in the driver's store, and its agent looks."""
    driver.store.grant(question.lease, 100)
    assert driver.store.commit(ask(KEYS, question)).held
    driver.look()


def answers_of(driver: Driver, offered: list[Txn], way: str = "") -> Answers:
    def offer(txn: Txn, held: Callable[[], object] | None) -> None:
        offered.append(txn)
        with suppress(LeaseGone):
            if held and driver.store.commit(txn).held:
                held()

    return Answers(lambda: driver.agent, lambda now_s: SEEN, offer, way, time.monotonic(), driver.happen)


def when_due(answers: Answers) -> None:
    due_s = wait_for(lambda: answers.due_s, "an answer is due")
    answers.tick(due_s)


def test_an_agent_that_sees_a_question_decides_nothing_by_it() -> None:
    driver = started()
    before = driver.agent

    asking(driver)

    assert driver.agent.snapshot.question == QUESTION
    assert driver.acted == []
    assert driver.agent.phase == before.phase
    assert driver.agent.membership == before.membership


def test_a_question_gets_this_nodes_report_on_the_askers_lease_once() -> None:
    driver, offered = started(), list[Txn]()
    answers = answers_of(driver, offered)
    asking(driver)

    answers.note(driver.agent.snapshot.question)
    when_due(answers)
    answers.note(driver.agent.snapshot.question)
    answers.tick(time.monotonic() + 100)

    (txn,) = offered
    (put,) = txn.then
    assert isinstance(put, Put)
    assert (put.key, put.lease) == (KEYS.answers(QUESTION.identity, driver.node_id), 4711)
    report = read_node_report(put.value, driver.node_id)
    assert report is not None
    assert [rank.step for rank in report.ranks] == [3, 3, 3]
    assert driver.store.commit(txn).held
    assert answers.due_s is None


def test_an_answer_never_stands_on_a_lease_of_the_job() -> None:
    driver, offered = started(), list[Txn]()
    answers = answers_of(driver, offered)
    for number, lease in enumerate((driver.agent.membership.lease, driver.agent.snapshot.lease)):
        assert lease
        answers.note(Question(f"{number:016x}", Topic.STATUS, lease))
        when_due(answers)

    assert offered == []


def test_stacks_are_taken_by_a_thread_one_question_at_a_time() -> None:
    driver, offered = started(), list[Txn]()
    answers = answers_of(driver, offered)
    first, second = Heard("stacks"), Heard("stacks")

    answers.asked(first)  # type: ignore[arg-type]
    answers.asked(second)  # type: ignore[arg-type]

    wait_for(lambda: first.answer and second.answer, "both are answered")
    # None of these workers has a process, so there is nothing to wait for; the second may come later.
    assert first.answer.startswith('{"version":1,"stacks":{"node_id":')
    asking(driver, Question("f" * 16, Topic.STACKS, 4712))
    answers.note(driver.agent.snapshot.question)
    _until(lambda: bool(offered), lambda: answers.tick(time.monotonic()))
    assert driver.store.commit(offered[0]).held


def test_the_way_to_the_store_is_told_only_where_there_is_one() -> None:
    driver, way = started(), '{"token":"t"}'
    with_store, alone, unknown = Heard("store"), Heard("store"), Heard("shutdown")

    answers_of(driver, [], way).asked(with_store)  # type: ignore[arg-type]
    answers_of(driver, []).asked(alone)  # type: ignore[arg-type]
    answers_of(driver, [], way).asked(unknown)  # type: ignore[arg-type]

    assert with_store.answer == '{"version":1,"store":{"token":"t"}}'
    assert "error" in alone.answer
    assert "error" in unknown.answer
    assert "token" not in encode(driver.agent.me) + alone.answer + unknown.answer


def test_an_order_is_obeyed_by_the_leader_alone_and_answered_first() -> None:
    leader, other = pair()
    question = Question("e" * 16, Topic.STOP, 4713)
    offered: list[Txn] = []
    asking(leader, question)
    for driver in (other, leader):
        answers = answers_of(driver, offered)
        answers.note(question)
        when_due(answers)

    assert isinstance(other.agent.phase, Running)
    assert isinstance(leader.agent.phase, Stopping)
    (txn,) = offered
    (put,) = txn.then
    assert isinstance(put, Put)
    assert decode(OrderAnswer, put.value).is_done


def test_an_order_whose_asker_was_told_that_nobody_answered_is_not_obeyed() -> None:
    leader, _ = pair()
    question = Question("e" * 16, Topic.STOP, 4713)
    answers = answers_of(leader, [])
    asking(leader, question)
    answers.note(question)
    leader.store.revoke(question.lease)

    when_due(answers)
    answers.asked(Heard("stop", waits=False))  # type: ignore[arg-type]

    assert isinstance(leader.agent.phase, Running)


def test_an_order_of_this_host_is_obeyed_by_any_node() -> None:
    _, other = pair()
    heard = Heard("restart")

    answers_of(other, []).asked(heard)  # type: ignore[arg-type]
    other.settle()

    assert json.loads(heard.answer)["order"]["is_done"]
    assert isinstance(other.agent.phase, Stopping)


def test_a_burst_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    # No time passes, however long the answers take.
    monkeypatch.setattr("elaunch.agent.answers.answers.time", SimpleNamespace(monotonic=lambda: 100.0))
    driver = started()
    answers = answers_of(driver, [])
    heard = [Heard("status") for _ in range(100)]

    for each in heard:
        answers.asked(each)  # type: ignore[arg-type]

    refused = [each for each in heard if "it is asked too often" in each.answer]
    assert len(refused) == len(heard) - LOCAL_BURST


def _until(fact: Callable[[], bool], act: Callable[[], None]) -> None:
    wait_for(lambda: (act(), fact())[1], "the answer in the store")


def test_an_answer_has_the_memory_of_a_rank_and_of_its_host() -> None:
    driver = started()
    ended = subprocess.Popen(["true"])
    ended.wait(DEADLINE_S)
    seen = WorkersSeen(0, 1.0, (RankReport(0, 0, os.getpid()), RankReport(1, 1, -1), RankReport(2, 2, ended.pid)))
    answers = Answers(lambda: driver.agent, lambda now_s: seen, lambda *_: None, "", time.monotonic(), driver.happen)
    heard = Heard("status")

    answers.asked(heard)  # type: ignore[arg-type]

    node = json.loads(heard.answer)["node"]
    mine, starting, gone = (rank["memory_bytes"] for rank in node["ranks"])
    # The interpreter alone has more than a MiB.
    assert 1 << 20 < mine < node["memory_bytes"]
    assert (starting, gone) == (None, None)
    assert 0 < node["memory_free_bytes"] <= node["memory_bytes"]
    assert node["cpus"] >= len(os.sched_getaffinity(0))
    assert node["load"] >= 0
