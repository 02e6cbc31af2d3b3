"""report_page.page, .lanes and .trace: what the reader sees, whatever the job wrote."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from elaunch.launcher.report_page import command
from elaunch.launcher.report_page.goodput import goodput
from elaunch.launcher.report_page.history import History, history
from elaunch.launcher.report_page.lanes import LaneStage, MarkKind, lanes_of
from elaunch.launcher.report_page.metrics import StepMetrics
from elaunch.launcher.report_page.page import headline, link_to, make_page, subline, summary
from elaunch.launcher.report_page.render import render
from elaunch.launcher.report_page.trace import trace
from tests.unit.launcher.report_page.timelines import Timeline, restarted

TEMPLATE = Path(command.__file__).with_name("page.html").read_text()
HOSTILE = "</script><script>alert(1)</script>\"'>{{ 7*7 }}<img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800"


class Tags(HTMLParser):
    """The tags of a page, and its text without that of its script and style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_code = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_code = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._is_code = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._is_code else data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def past(*jobs: Timeline) -> History:
    return history([job.folder() for job in jobs], None)


def html(of: History, metrics: StepMetrics | None = None, tails: dict[int, str] | None = None) -> str:
    return render(make_page(of, goodput(of), metrics, {}, tails or {}), TEMPLATE)


def test_the_headline_is_one_sentence_with_the_end_the_time_the_restarts_and_the_lost_steps() -> None:
    def said(job: Timeline) -> str:
        return headline(past(job), goodput(past(job)))

    assert said(restarted()) == "Job night succeeded after 60.0 s: 1 restart, 3 steps lost."
    assert said(Timeline().opens(0, 0).succeeds(9, 0, 0)) == "Job night succeeded after 9.00 s: no restart."
    failed = Timeline().add(7200, 0, "ended", outcome="failed", code=1, restarts=3, max_restarts=3)
    assert said(failed) == "Job night failed after 2 h 00 min: 3 of 3 restarts used."
    silent = said(Timeline().opens(0, 0))
    assert silent == "Job night has no end in its log, which stops 1.00 s after the start: no restart."


def test_below_the_headline_the_jobs_first_failure_comes_first() -> None:
    first = {"generation": 0, "sentence": "rank 1 raised ValueError: loss is nan in generation 0"}
    last = {"kind": "exception", "sentence": "rank 0 raised FileExistsError in generation 2", "rank": 0, "host": "a"}
    job = Timeline().opens(0, 0).add(9, 2, "gave_up", reason="it exists", first_failure=first, failure=last)
    job.add(9, 2, "ended", outcome="failed", code=1, reason="it exists", restarts=2, max_restarts=3)

    assert subline(past(job)) == (
        "Failed first in generation 0: rank 1 raised ValueError: loss is nan."
        " Rank 0 raised FileExistsError in generation 2. The job was given up: it exists."
    )


def test_a_page_has_a_lane_for_each_rank_and_a_card_for_each_cause() -> None:
    shown = Tags(html(past(restarted())))

    assert sum("data-lane" in attrs for _, attrs in shown.tags) == 2
    assert sum(attrs.get("class") == "cause" for _, attrs in shown.tags) == 1
    assert "rank 1 died" in shown.text
    assert "Training went on 5.00 s later. 3 steps were lost" in shown.text
    assert "ETTR 79.3 %" in shown.text


def test_a_generation_that_never_ran_is_not_shown_and_no_folder_that_is_not_there_is_named() -> None:
    job = restarted()
    ended = job.rows.pop()
    job.add(60, 2, "opened", kind="fail", cause="a failure too many").add(60, 2, "joined")
    job.rows.append({**ended, "generation": 2})

    page = make_page(past(job), goodput(past(job)), None, {}, {})

    assert [each["generation"] for each in summary(page)["generations"]] == [0, 1]  # type: ignore[attr-defined]
    shown = render(page, TEMPLATE)
    assert "a failure too many" not in shown
    assert not re.search("attempt_[0-9]", shown)


def test_two_agents_of_one_host_have_names_of_their_own_and_failures_their_own_folder() -> None:
    first, second = Timeline(workers=1).opens(0, 0), Timeline(first_rank=1, workers=1).opens(0, 0).dies(20, 0, 0)

    both = history([first.folder("/logs/1"), second.folder("/logs/2")], None)

    assert [node.name for node in both.nodes] == ["node-a (1 of 2)", "node-a (2 of 2)"]
    assert [fault.folder for fault in both.faults] == ["/logs/2"]
    assert "node-a (2 of 2)" in html(both)


def test_an_agent_that_took_the_place_of_a_killed_one_has_its_lanes() -> None:
    """Four lanes for two ranks would be as many as two nodes have."""
    killed, other = Timeline().opens(0, 0), Timeline("node-b", 2).opens(0, 0).opens(30, 1, "loss").succeeds(60, 1)
    newer = Timeline(started_s=25).opens(30, 1, "loss").dies(40, 1, 0).succeeds(60, 1)

    of = history([killed.folder("/logs/1"), newer.folder("/logs/2"), other.folder("/logs/3")], None)

    lanes = lanes_of(of, goodput(of)).shown
    assert [(lane.host, lane.name) for lane in lanes] == [
        ("node-a", "rank 0"), ("node-a", "rank 1"), ("node-b", "rank 2"), ("node-b", "rank 3")
    ]  # fmt: skip
    assert [bar.generation for bar in lanes[1].bars if bar.doing is LaneStage.RUNS] == [0, 1]
    assert lanes[1].bars[1].end_s <= 25
    assert len(lanes[0].marks) == 1


def test_nothing_that_a_job_writes_becomes_markup() -> None:
    hung = restarted().add(30, 1, "seems_hung", host="node-a", rank=1, message="calm")
    calm = Tags(html(past(hung), tails={0: "tail"}))
    job = restarted().add(30, 1, "seems_hung", host="node-a", rank=1, message=HOSTILE)
    for row in job.rows:
        for name in ("host", "sentence", "message", "kind", "run_id", "command", "version", "reason", "cause"):
            if name in row:
                row[name] = HOSTILE
        if row["event"] == "failed":
            row |= {"traceback": HOSTILE, "advice": HOSTILE, "exception": HOSTILE, "log_path": HOSTILE}

    shown = Tags(html(past(job), tails={0: HOSTILE}))

    # A traceback and an advice have places of their own, which a calm job lacks.
    for tag in ("script", "img", "style", "a"):
        assert shown.count(tag) == calm.count(tag), tag
    assert "alert(1)" in shown.text
    assert "{{ 7*7 }}" in shown.text
    assert not any("onerror" in attrs for _, attrs in shown.tags)
    # Nor does it turn a line around, or speak to a terminal.
    assert not set("\u202e\x1b\x00") & set(shown.text)
    assert "\\u202e" in shown.text


def test_no_rule_for_another_element_gives_a_mark_on_the_timeline_its_look() -> None:
    style = TEMPLATE.partition("<style>")[2].partition("</style>")[0]
    rules = re.findall(r"([^{}]+)\{", style)
    kinds = "|".join(kind.value for kind in MarkKind)
    assert [rule for rule in rules if ".mark." in rule], "marks have a look of their own"

    # A selector without its element is for all that have the class.
    assert [rule.strip() for rule in rules if re.search(rf"(^|[\s,])\.({kinds})\b", rule)] == []


def test_a_page_loads_nothing_from_anywhere() -> None:
    text = html(past(restarted()), StepMetrics().add_all(b'{"step": %d, "loss": 2}' % step for step in range(9)))

    addresses = [attrs.get(name) for _, attrs in Tags(text).tags for name in ("src", "href", "action", "data")]
    assert all(address is None or address.startswith("#failure-") for address in addresses)
    assert "url(" not in text
    assert "@import" not in text


def test_the_curves_data_cannot_end_its_script() -> None:
    text = html(past(restarted()), StepMetrics().add_all(b'{"step": %d, "loss": 2}' % step for step in range(9)))

    (data,) = re.findall(r'<script type="application/json" id="curves">(.*?)</script>', text, re.DOTALL)
    assert len(json.loads(data)[0]) == 9
    assert "<" not in data


def test_a_link_quotes_what_has_a_meaning_in_an_address() -> None:
    link = link_to("/logs/a b/50%#?.log", "../a b/50%#?.log")

    assert (link.name, link.href) == ("50%#?.log", "../a%20b/50%25%23%3F.log")


def test_a_rank_waits_starts_trains_loses_and_ends() -> None:
    found = past(restarted())
    first, dead = lanes_of(found, goodput(found)).shown

    assert [bar.doing for bar in dead.bars if bar.generation == 0] == [
        LaneStage.WAITS,
        LaneStage.STARTS,
        LaneStage.TRAINS,
        LaneStage.LOSES,
        LaneStage.ENDS,
    ]
    assert [mark.at_s for mark in dead.marks] == [pytest.approx(20)]
    assert not first.marks
    assert first.name == "rank 0"
    for lane in (first, dead):
        assert all(one.end_s <= other.begin_s for one, other in pairwise(lane.bars))


def test_many_ranks_share_a_lane_and_those_that_failed_keep_their_own() -> None:
    jobs = [Timeline(f"node-{n}", first_rank=40 * n, workers=40).opens(0, 0, world_size=80) for n in range(2)]
    jobs[1].dies(9, 0, 7).stops(10, 0, tuple(range(7)))
    found = past(*jobs)

    lanes = lanes_of(found, goodput(found)).shown

    assert [(lane.host, lane.name) for lane in lanes] == [
        ("node-0", "node-0 · 40 ranks"),
        ("node-1", "node-1 · 40 ranks"),
        ("node-1", "rank 47"),
    ]


def test_numbers_for_programs_are_json_and_unknown_ones_are_null() -> None:
    found = past(restarted())
    known = summary(make_page(found, goodput(found), None, {}, {}))
    silent = past(Timeline().opens(0, 0).succeeds(9, 0))
    unknown = summary(make_page(silent, goodput(silent), None, {}, {}))

    assert json.loads(json.dumps(known, allow_nan=False)) == known
    assert json.loads(json.dumps(unknown, allow_nan=False))["ettr"] is None
    assert known["steps_lost"] == 3
    (failure,) = known["failures"]  # type: ignore[misc]
    assert (failure["rank"], failure["recovery_s"]) == (1, 5.0)


def test_a_trace_has_a_process_for_each_node_a_thread_for_each_rank_and_slices_that_do_not_overlap() -> None:
    far = Timeline("node-b", 2).opens(0, 0).stops(21, 0, (0, 1)).opens(21, 1, "fail").succeeds(60, 1)
    found = past(restarted(), far)

    made = json.loads(json.dumps(trace(found, goodput(found)), allow_nan=False))

    events = made["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "node-a", 2: "node-b"}
    assert names == {
        (1, 0): "the job",
        (1, 1): "rank 0",
        (1, 2): "rank 1",
        (2, 0): "agent",
        (2, 1): "rank 2",
        (2, 2): "rank 3",
    }
    for event in events:
        assert event["ph"] in "MXiC"
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
    for place in names.keys() - {(2, 0)}:
        slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == place]
        assert slices
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in slices]
        assert all(one[1] <= other[0] for one, other in pairwise(ends))
    assert any(e["ph"] == "i" and e["name"] == "failure" and (e["pid"], e["tid"]) == (1, 2) for e in events)
    assert max(e["args"]["step"] for e in events if e["ph"] == "C") == 44
