"""rendezvous.rules.reports, agent.core.node_report, agent.core.stack_response: what nodes report, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.timeline import WorkersSeen, node_report
from elaunch.agent.diagnosis.stack_groups import (
    Frame,
    Stack,
    ThreadStack,
    read_stack_response,
    stack_response,
    stacks_in,
)
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.queries import RESPONSE_BYTES_MAX
from elaunch.rendezvous.rules.reports import RankReport, read_node_report
from tests.unit.agent.driver import started

RANKS = tuple(RankReport(local, local, 100 + local, step=5, step_s=0.5) for local in range(3))


def test_a_report_that_is_none_or_anothers_is_left_out() -> None:
    whole = node_report(started().agent, 77, 12.5, WorkersSeen(0, 3.0, RANKS))
    report = encode(whole)

    assert read_node_report(report, "stranger-00000001") is None
    assert read_node_report("[" * 100_000, "x") is None
    for impossible in (1e308, -1.0):
        changed = report.replace('"age_s":12.5', f'"age_s":{impossible}')
        assert changed != report
        assert read_node_report(changed, started().agent.me.node_id) is None
    for changed in (replace(whole, memory_bytes=-1), replace(whole, load=float("inf")), replace(whole, cpus=1 << 40)):
        assert read_node_report(encode(changed), whole.node_id) is None
    assert read_node_report(report.replace('"pid":77', '"pid":"77"'), started().agent.me.node_id) is None


def test_the_stacks_of_many_ranks_fit_into_an_answer() -> None:
    frames = tuple(Frame(f"f{i}" * 20, "/lib/" + "x" * 250, i) for i in range(200))
    threads = tuple(ThreadStack(f"t{i}", frames, is_main=i == 0) for i in range(50))
    stacks = [
        Stack(rank, 100 + rank, (ThreadStack("m", frames[rank:], is_main=True), *threads[1:])) for rank in range(8)
    ]

    text = stack_response("node-a-1", 3, stacks)

    answer = read_stack_response(text, "node-a-1")
    assert len(text) <= RESPONSE_BYTES_MAX
    assert answer is not None
    shown = stacks_in([answer])
    assert sorted(stack.rank for stack in shown) == list(range(8))
    assert all(stack.trouble or stack.main for stack in shown)
