"""What nodes answer to `elaunch status` and `stacks`, and what is asked in the store: broken in every way."""

from __future__ import annotations

import time

from hypothesis import given

from elaunch.agent.core.timeline import WorkersSeen, node_report
from elaunch.agent.diagnosis.stack_groups import (
    Frame,
    Stack,
    StackResponse,
    ThreadStack,
    read_stack_response,
    stack_response,
    stacks_in,
)
from elaunch.launcher.inspect.commands import stacks_text
from elaunch.launcher.inspect.job_source import Gathered, NodeStacks
from elaunch.launcher.inspect.status import status_record, text_of
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.reports import NodeReport, RankReport, job_report, read_node_report
from tests.fuzzing import bounded, json_texts
from tests.unit.agent.driver import started

AGENT = started().agent
NODE = AGENT.me.node_id
RANKS = (RankReport(0, 0, 100, "running", 5, "trains", 0.5, 0.1),)
REPORT = encode(node_report(AGENT, 77, 12.5, WorkersSeen(0, 3.0, RANKS)))
MAIN = ThreadStack("MainThread", (Frame("wait", "/a.py", 3),), is_main=True)
STACKS = stack_response(NODE, 0, [Stack(0, 100, (MAIN,), "S", children=(Stack(0, 101, (MAIN,)),))])


@given(json_texts(REPORT))
def test_a_node_report_is_shown_or_left_out(text: str) -> None:
    with bounded():
        report = read_node_report(text, NODE)

        assert report is None or isinstance(report, NodeReport)
        if report:
            known = Gathered(job_report(AGENT.snapshot), {NODE: report}, {})
            shown = text_of(status_record(known, time.time()), every_rank=True)
            assert all(letter.isprintable() or letter == "\n" for letter in shown)


@given(json_texts(STACKS))
def test_a_nodes_stacks_are_shown_or_left_out(text: str) -> None:
    with bounded():
        answer = read_stack_response(text, NODE)

        assert answer is None or isinstance(answer, StackResponse)
        if answer:
            shown = stacks_text(NodeStacks("night", stacks_in([answer])))
            assert all(letter.isprintable() or letter == "\n" for letter in shown)
