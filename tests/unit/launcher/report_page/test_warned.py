"""report_page.warned: hangs that were only warned of, and slow ranks; and where the page shows them."""

from __future__ import annotations

import json

import pytest

from elaunch.launcher.report_page.ending import Look
from elaunch.launcher.report_page.goodput import goodput
from elaunch.launcher.report_page.history import History, history
from elaunch.launcher.report_page.lanes import MarkKind, lanes_of
from elaunch.launcher.report_page.page import LogLink, Page, make_page, printed, summary
from elaunch.launcher.report_page.render import render
from tests.unit.launcher.report_page.test_page import TEMPLATE, Tags
from tests.unit.launcher.report_page.timelines import BEGAN_AT, Timeline

SAID = "it runs in wait (train.py:12), while ranks 0, 2, 3 wait in all_reduce, for 61 s"
HANG = {"host": "node-b", "rank": 3, "message": SAID}


def two_nodes(*, goes_on: bool = True) -> list[Timeline]:
    """Both nodes tell of the hang of rank 3, on node-b, which may end by itself."""
    jobs = [Timeline("node-a").opens(0, 0, world_size=4), Timeline("node-b", 2).opens(0, 0, world_size=4)]
    for number, job in enumerate(jobs):
        job.add(70 + number / 10, 0, "seems_hung", **HANG)
        if goes_on:
            job.add(90 + number / 10, 0, "goes_on")
    return jobs


def past(jobs: list[Timeline], look: Look | None = None) -> History:
    return history([job.folder() for job in jobs], None, look)


def page_of(of: History, stacks: dict[int, tuple[LogLink, ...]] | None = None) -> Page:
    return make_page(of, goodput(of), None, {}, {}, stacks=stacks)


def test_a_hang_is_told_once_with_its_rank_and_host_and_when_the_job_went_on() -> None:
    (hang,) = past([job.succeeds(99, 0, 0) for job in two_nodes()]).warned

    assert (hang.rank, hang.local_rank, hang.host, hang.folder) == (3, 1, "node-b", "/logs/node-b")
    assert (hang.at_s, hang.until_s, hang.is_failure) == (pytest.approx(70), pytest.approx(90), False)
    assert hang.sentence == f"the job seemed to hang: rank 3 on node-b {SAID.removeprefix('it ')}"


def test_a_second_hang_of_a_generation_is_another_even_with_the_same_words() -> None:
    jobs = two_nodes()
    for job in jobs:
        job.add(290, 0, "seems_hung", **HANG)

    first, second = past(jobs).warned

    assert (first.until_s, second.at_s) == (pytest.approx(90), pytest.approx(290))
    assert second.until_s != second.until_s


def test_a_hang_of_no_rank_is_of_the_whole_job() -> None:
    said = "all 2 ranks wait in all_reduce, for 60 s"
    (hang,) = past([Timeline().opens(0, 0).add(70, 0, "seems_hung", host="node-a", message=said)]).warned

    assert (hang.rank, hang.sentence) == (-1, f"the job seemed to hang: {said}")


def test_a_hang_that_became_a_failure_is_among_the_failures_and_no_warning_of_the_page() -> None:
    jobs = two_nodes(goes_on=False)
    failure = {"kind": "hang", "sentence": "rank 3 hangs", "host": "node-b", "rank": 3, "local_rank": 1, "pid": 1}
    jobs[1].add(71, 0, "failed", **failure, failed_at=BEGAN_AT + 71).stops(72, 0, (0, 1))
    found = past(jobs)

    assert [warned.is_failure for warned in found.warned] == [True]
    assert page_of(found).warnings == ()
    assert len(printed(page_of(found))) == 1
    assert [warning["became_failure"] for warning in summary(page_of(found))["warnings"]] == [True]  # type: ignore[attr-defined]


def test_a_slow_rank_is_told_with_its_host_since_when_and_how_much_the_others_waited() -> None:
    job = Timeline().opens(0, 0).add(200, 0, "slow", rank=1, wait_percent=31).succeeds(300, 0, 0)

    (slow,) = past([job]).warned

    # It has been so for the two minutes before.
    assert (slow.rank, slow.local_rank, slow.host, slow.at_s, slow.since_s) == (1, 1, "node-a", 200, 80)
    assert slow.sentence == "rank 1 was slower than the other ranks of node-a: they waited for it 31 % of the time"


def test_a_slow_rank_is_told_in_the_words_of_the_log_and_with_its_causes() -> None:
    said = "rank 1 on node-a is slower than the ranks of the other nodes: those wait; its nice value is 10"
    more = {"lasted_s": 150, "text": said, "causes": ["nice value", "host"]}
    job = Timeline().opens(0, 0).add(200, 0, "slow", rank=1, wait_percent=31, **more).succeeds(300, 0, 0)

    page = page_of(past([job]))

    (slow,) = page.history.warned
    assert (slow.since_s, slow.sentence, slow.causes) == (50, said, ("nice value", "host"))
    assert "The cause may be: nice value, host." in Tags(render(page, TEMPLATE)).text
    (told,) = summary(page)["warnings"]  # type: ignore[attr-defined]
    assert told["causes"] == ["nice value", "host"]


def test_the_page_the_printed_lines_and_the_json_show_what_was_warned_of() -> None:
    jobs = two_nodes()
    jobs[0].add(200, 0, "slow", rank=1, wait_percent=31)
    found = past([job.succeeds(300, 0, 0) for job in jobs])
    page = page_of(found, {0: (LogLink("stacks.txt of node-b", "logs/b/attempt_0/stacks.txt"),)})

    shown = Tags(render(page, TEMPLATE))
    lines = printed(page)
    told = json.loads(json.dumps(summary(page), allow_nan=False))["warnings"]

    assert "The job went on by itself 20.0 s later." in shown.text
    assert "The rank had been slow since +1:20 at least." in shown.text
    assert any(dict(attrs).get("href") == "logs/b/attempt_0/stacks.txt" for _, attrs in shown.tags)
    anchors = {attrs.get("id") for _, attrs in shown.tags}
    assert {"#warning-0", "#warning-1"} <= {attrs.get("href") for tag, attrs in shown.tags if tag == "a"}
    assert {"warning-0", "warning-1"} <= anchors
    assert lines[1].startswith("  +1:10  The job seemed to hang: rank 3 on node-b runs in wait")
    assert lines[1].endswith("for 61 s. The job went on by itself 20.0 s later.")
    assert lines[2] == (
        "  +3:20  Rank 1 was slower than the other ranks of node-a: they waited for it 31 % of the time."
    )
    assert [(one["kind"], one["host"], one["rank"], one["since_s"], one["until_s"]) for one in told] == [
        ("hang", "node-b", 3, None, 90.0),
        ("slow rank", "node-a", 1, 80.0, None),
    ]


def test_the_rank_that_was_warned_of_has_a_mark_and_a_lane_in_a_large_job_too() -> None:
    jobs = [Timeline(f"node-{n}", 20 * n, 20).opens(0, 0, world_size=40) for n in range(2)]
    found = past([jobs[0], jobs[1].add(200, 0, "slow", rank=27, wait_percent=31).succeeds(300, 0, 0)])

    lane = lanes_of(found, goodput(found)).shown[-1]

    assert (lane.host, lane.name) == ("node-1", "rank 27")
    assert [(mark.kind, mark.at_s) for mark in lane.marks] == [(MarkKind.WARNING, 200)]


def test_many_warnings_are_counted_and_not_all_shown() -> None:
    job = Timeline().opens(0, 0)
    for number in range(100):
        job.add(70 + 20 * number, 0, "slow", rank=0, wait_percent=number)
    page = page_of(past([job]))

    text = render(page, TEMPLATE)

    assert text.count('class="cause warning"') == 60
    assert "And 40 more; elaunch report --json has all" in text
    assert printed(page)[-1] == "  And 95 more warnings."
    assert len(printed(page)) == 7


def test_a_hang_of_a_job_that_runs_says_for_how_long_by_now() -> None:
    look = Look(BEGAN_AT + 100, "node-a", frozenset({("night", 7)}))
    jobs = two_nodes(goes_on=False)
    jobs[0].rows[0]["pid"] = 7

    (shown,) = page_of(past(jobs, look)).warnings

    assert shown.after == "The job has not gone on since: 30.0 s."
