"""agent.answers.limits: a burst of questions costs a bounded number of answers."""

from __future__ import annotations

import pytest

from elaunch.agent.answers.limits import LOCAL_BURST, LOCAL_PER_S, STORE_PAUSE_S, Allowance, Docket
from elaunch.rendezvous.rules.questions import ANSWERS_PER_S, Question, Topic


def question(number: int) -> Question:
    return Question(f"{number:016x}", Topic.STATUS, 1 + number)


def test_a_burst_of_local_questions_is_answered_up_to_the_limit_and_then_at_the_rate() -> None:
    allowance, answered = Allowance(at_s=100.0), 0

    for number in range(2000):
        # Two seconds of a thousand questions each.
        allowance, is_answered = allowance.take(100.0 + number / 1000)
        answered += is_answered

    assert answered == pytest.approx(LOCAL_BURST + 2 * LOCAL_PER_S, abs=1)


def test_a_burst_of_questions_in_the_store_gets_an_answer_now_and_then_and_the_newest_wins() -> None:
    docket, answered = Docket(), []

    for number in range(1000):
        now_s = 100.0 + number / 200
        docket = docket.after(question(number), now_s, 2, 0.0)
        docket, due = docket.take_due(now_s)
        answered += [(now_s, due)] if due else []

    assert len(answered) == pytest.approx(5 / STORE_PAUSE_S, abs=1)
    assert docket.waiting == question(999)
    assert docket.due_s is not None


def test_a_question_that_is_gone_is_not_answered_and_wakes_nobody() -> None:
    docket = Docket().after(question(1), 100.0, 1000, 0.5)
    assert docket.due_s is not None

    docket = docket.after(None, 100.1, 1000, 0.5)

    assert docket.due_s is None
    assert docket.take_due(1000.0)[1] is None


def test_one_question_is_answered_once_however_often_it_is_seen() -> None:
    docket, due = Docket().after(question(1), 100.0, 1, 0.0).take_due(100.0)
    assert due == question(1)

    docket = docket.after(question(1), 200.0, 1, 0.0)

    assert docket.due_s is None


@pytest.mark.parametrize("nodes", [1, 8, 1024, 4096])
def test_the_nodes_of_a_job_answer_in_turns_at_the_rate_of_the_job(nodes: int) -> None:
    due_s = [Docket().after(question(1), 100.0, nodes, node / nodes).due_s for node in range(nodes)]

    in_one_second = sum(100.5 <= at_s < 101.5 for at_s in due_s if at_s is not None)
    assert in_one_second <= ANSWERS_PER_S
    assert max(at_s for at_s in due_s if at_s is not None) < 100.0 + nodes / ANSWERS_PER_S
    # Nor does a second question at once raise the rate.
    docket, _ = Docket().after(question(1), 100.0, nodes, 0.0).take_due(100.0)
    again = docket.after(question(2), 100.0, nodes, 0.0)
    assert again.due_s == 100.0 + max(STORE_PAUSE_S, nodes / ANSWERS_PER_S)
