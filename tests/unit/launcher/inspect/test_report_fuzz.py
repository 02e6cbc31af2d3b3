"""Whatever stands in a timeline or in metrics gives a page without markup of theirs, text, and numbers.

What nodes answer to `elaunch status` and `stacks` may be broken in every way.
"""

from __future__ import annotations

import json
import time

from hypothesis import example, given
from hypothesis import strategies as st

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
from elaunch.launcher.inspect.history import goodput, history
from elaunch.launcher.inspect.job_source import Gathered, NodeStacks
from elaunch.launcher.inspect.node_log import node_log
from elaunch.launcher.inspect.page import Report, StepMetrics, render
from elaunch.launcher.inspect.report import printed, summary
from elaunch.launcher.inspect.status import status_record, text_of
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.reports import NodeReport, RankReport, job_report, read_node_report
from tests.fuzzing import NESTED, VALUES, bounded, json_texts
from tests.unit.agent.driver import started
from tests.unit.launcher.inspect.test_page import TEMPLATE, Tags
from tests.unit.launcher.inspect.timelines import Timeline, restarted

# A job that is warned of, and has no end.
WARNED = restarted().add(61, 1, "seems_hung", host="node-a", rank=1, message="it runs").add(70, 1, "goes_on")
ROWS = WARNED.add(80, 1, "slow", rank=1, wait_percent=20).rows
del ROWS[[row["event"] for row in ROWS].index("ended")]
LINES = [json.dumps(row) for row in ROWS]
METRIC = json.dumps({"step": 3, "loss": 1.0, "seconds": 0.1, "generation": 0, "at": 1.8e9, "steps_lost": 2})
# The markup of pages is the template's: these tags are in it as often as it says, whatever the job wrote.
CODE = ("script", "style", "img", "iframe", "object", "link", "form")


@st.composite
def timelines(draw: st.DrawFn) -> bytes:
    """A job's timeline with some fields or lines replaced, doubled or moved."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(lines) - 1))
        match draw(st.integers(0, 3)):
            case 0:
                row = dict(draw(st.sampled_from(ROWS)))
                row[draw(st.sampled_from(sorted(row)))] = draw(VALUES)
                lines[place] = json.dumps(row)
            case 1:
                lines[place] = draw(json_texts(draw(st.sampled_from(LINES))))
            case 2:
                lines.insert(place, draw(st.sampled_from(LINES)))
            case _:
                del lines[place]
    return "\n".join(lines).encode(errors="surrogatepass")


@given(timelines(), st.lists(json_texts(METRIC), max_size=5))
@example(b"", [NESTED])
@example(Timeline().add(1e308, 0, "opened").add(-1e308, 2**31 - 1, "sealed").text, [])
@example(b"\n".join(b'{"generation": %d, "event": "opened", "at": 1, "monotonic_s": 1}' % n for n in range(3000)), [])
def test_any_timeline_gives_a_page_or_nothing(timeline: bytes, rows: list[str]) -> None:
    calm = Tags(_page(restarted().text, []))

    with bounded(cpu_s=4.0):
        page = _page(timeline, [row.encode(errors="surrogatepass") for row in rows])

    if page:
        page.encode()
        shown = Tags(page)
        assert all(shown.count(tag) <= calm.count(tag) for tag in CODE)


def _page(timeline: bytes, rows: list[bytes]) -> str:
    log = node_log("/logs/a", timeline.splitlines(keepends=True))
    if not log.events:
        return ""
    past = history([log])
    report = Report(past, goodput(past), StepMetrics(rows))
    json.dumps(summary(report), allow_nan=False)
    printed(report)
    return render(report, TEMPLATE)


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
