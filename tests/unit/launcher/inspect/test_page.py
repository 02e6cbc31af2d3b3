"""inspect.page: what the reader sees, whatever the job wrote and however large it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from elaunch.launcher.inspect import page as page_module
from elaunch.launcher.inspect.history import goodput, history
from elaunch.launcher.inspect.page import POINTS, Links, Report, StepMetrics, charts, render, timeline
from elaunch.launcher.inspect.report import printed, summary
from tests.fuzzing import bounded
from tests.unit.launcher.inspect.test_history import two_nodes
from tests.unit.launcher.inspect.timelines import Timeline, restarted

TEMPLATE = Path(page_module.__file__).with_name("page.html").read_text()
HOSTILE = "</script><script>alert(1)</script>\"'>{{ 7*7 }}<img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800"
ROWS = [b'{"step": %d, "loss": 2, "seconds": 0.1}' % step for step in range(9)]


class Tags(HTMLParser):
    """The tags of a page, and its text without that of its style."""

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


def report_of(*jobs: Timeline, metrics: StepMetrics | None = None, stacks: dict[int, Links] | None = None) -> Report:
    past = history([job.log(f"/logs/{number}") for number, job in enumerate(jobs)])
    return Report(past, goodput(past), metrics, stacks=stacks or {})


def html(report: Report) -> str:
    return render(report, TEMPLATE)


def test_below_the_headline_the_jobs_first_failure_comes_first() -> None:
    first = {"generation": 0, "sentence": "rank 1 raised ValueError: loss is nan in generation 0"}
    last = {"kind": "exception", "sentence": "rank 0 raised FileExistsError in generation 2", "rank": 0, "host": "a"}
    job = Timeline().opens(0, 0).add(9, 2, "gave_up", reason="it exists", first_failure=first, failure=last)
    job.add(9, 2, "ended", outcome="failed", code=1, reason="it exists", restarts=2, max_restarts=3)

    assert report_of(job).reason == (
        "It failed first: rank 1 raised ValueError: loss is nan in generation 0."
        " Rank 0 raised FileExistsError in generation 2. The job was given up: it exists."
    )


def test_the_headline_is_one_sentence_with_the_end_the_time_the_restarts_and_the_lost_steps() -> None:
    failed = Timeline().add(7200, 0, "ended", outcome="failed", code=1, restarts=3, max_restarts=3)
    killed = Timeline().add(25, 0, "agent_died", reason="elaunch itself (pid 7) died on node-b, by kill -9")
    jobs = restarted(), Timeline().opens(0, 0).succeeds(9, 0, 0), failed, killed, Timeline().opens(0, 0)

    assert [report_of(job).headline for job in jobs] == [
        "Job night succeeded after 60 s: 1 restart, 3 steps lost.",
        "Job night succeeded after 9 s: no restart.",
        "Job night failed after 2 h 0 min: 3 of 3 restarts used.",
        "Job night ended after 25 s, since elaunch itself (pid 7) died on node-b: no restart.",
        "Job night has a log without an end, which stops 1 s after the start: no restart.",
    ]
    assert [summary(report_of(job))["state"] for job in jobs] == [*["ended"] * 4, "unknown"]


def test_a_page_has_a_lane_for_each_rank_and_a_card_for_each_cause() -> None:
    shown = Tags(html(report_of(restarted())))

    assert sum("data-lane" in attrs for _, attrs in shown.tags) == 2
    assert sum(str(attrs.get("id")).startswith("card-") for _, attrs in shown.tags) == 1
    assert "rank 1 died" in shown.text
    assert "Training resumed 5 s later; 3 steps lost." in shown.text
    assert "ETTR 80.0 %" in shown.text


def test_the_text_and_the_json_have_what_failed_and_what_was_warned_of() -> None:
    hung = two_nodes()
    hung[0].add(200, 0, "slow", rank=1, wait_percent=31, lasted_s=120, text="rank 1 is slow", causes=["nice value"])
    warned = report_of(*(job.succeeds(300, 0, 0) for job in hung), stacks={0: (("stacks.txt", "a/stacks.txt"),)})
    lines, shown = printed(warned), Tags(html(warned))
    numbers = json.loads(json.dumps(summary(report_of(restarted())), allow_nan=False))
    silent = json.loads(json.dumps(summary(report_of(Timeline().opens(0, 0).succeeds(9, 0))), allow_nan=False))

    assert printed(report_of(restarted()))[1:] == [
        "  +0:20.0  Rank 1 died. Training resumed 5 s later; 3 steps lost.",
        "  worker hours: 0.03 productive, 0.01 lost to starts and failures",
    ]
    assert lines[1].startswith("  +1:10  The job seemed to hang: rank 3 on node-b runs in wait")
    assert lines[1].endswith("for 61 s. The job resumed 20 s later.")
    assert lines[2] == ("  +3:20  Rank 1 is slow.")
    anchors = {attrs.get("id") for _, attrs in shown.tags}
    assert {"#card-0", "#card-1"} <= {attrs.get("href") for tag, attrs in shown.tags if tag == "a"}
    assert {"card-0", "card-1"} <= anchors
    assert any(attrs.get("href") == "a/stacks.txt" for _, attrs in shown.tags)
    assert [warning["kind"] for warning in summary(warned)["warnings"]] == ["hang", "slow rank"]  # type: ignore[attr-defined]
    (failure,) = numbers["failures"]
    assert (failure["rank"], failure["recovery_s"], numbers["steps_lost"]) == (1, 5.0, 3)
    assert (silent["ettr"], silent["steps_lost"]) == (None, None)
    assert numbers["worker_hours"] == {"used": round(2 * 48 / 3600, 6), "lost": round(2 * 11 / 3600, 6)}


def test_workers_hours_are_of_gpus_if_each_worker_on_each_node_has_one() -> None:
    jobs = two_nodes()
    for job, gpus in zip(jobs, (2, 2), strict=True):
        job.rows[0]["gpus"] = gpus
        job.steps(1800, 0, 9, first=1).succeeds(3600, 0, 0)
    shown = report_of(*jobs)
    jobs[1].rows[0]["gpus"] = 8

    assert shown.goodput.hours == "GPU hours: 4.00 productive, 0.00 lost to starts and failures"
    assert "GPU hours: 4.00 productive" in html(shown)
    assert report_of(*jobs).goodput.hours.startswith("worker hours: 4.00")


def test_a_rank_starts_trains_and_ends() -> None:
    first, dead = timeline(report_of(restarted())).lanes

    doings = [bar.doing for bar in dead.bars if bar.note.startswith("generation 0")]
    assert doings == ["starts", "trains", "ends"]
    assert [mark.at_s for mark in dead.marks] == [pytest.approx(20)]
    assert not first.marks
    assert first.name == "rank 0"
    for lane in (first, dead):
        assert all(one.end_s <= other.begin_s for one, other in pairwise(lane.bars))


def test_nothing_that_a_job_writes_becomes_markup() -> None:
    hung = restarted().add(30, 1, "seems_hung", host="node-a", rank=1, message="calm")
    calm = Tags(html(report_of(hung)))
    job = restarted().add(30, 1, "seems_hung", host="node-a", rank=1, message=HOSTILE)
    for row in job.rows:
        for name in ("host", "sentence", "message", "kind", "run_id", "command", "version", "reason", "cause"):
            if name in row:
                row[name] = HOSTILE
        if row["event"] == "failed":
            row |= {"traceback": HOSTILE, "advice": HOSTILE, "exception": HOSTILE, "log_path": HOSTILE}

    shown = Tags(html(report_of(job)))

    # A traceback and an advice have places of their own, which a calm job lacks.
    for tag in ("script", "img", "style", "a"):
        assert shown.count(tag) == calm.count(tag), tag
    assert "alert(1)" in shown.text
    assert "{{ 7*7 }}" in shown.text
    assert not any("onerror" in attrs for _, attrs in shown.tags)
    # Nor does it turn a line around, or speak to a terminal.
    assert not set("\u202e\x1b\x00") & set(shown.text)
    assert "\\u202e" in shown.text


def test_a_page_loads_nothing_from_anywhere() -> None:
    text = html(report_of(restarted(), metrics=StepMetrics(ROWS)))

    addresses = [attrs.get(name) for _, attrs in Tags(text).tags for name in ("src", "href", "action", "data")]
    assert all(address is None or address.startswith("#card-") for address in addresses)
    assert "url(" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert text.count('class="curve"') == 2


def crash_loop(generations: int) -> list[Timeline]:
    """Only generation 0 makes steps; all others die before their first, as does the last."""
    job = Timeline().opens(0, 0).steps(6, 0, 2, first=1).steps(15, 0, 8).dies(16, 0, 0).stops(18, 0, (1,))
    for number in range(1, generations):
        begin_s = 20.0 * number
        job.opens(begin_s, number, "fail").dies(begin_s + 5, number, number % 2)
        job.stops(begin_s + 8, number, (1 - number % 2,))
    return [job]


def many_nodes(nodes: int) -> list[Timeline]:
    """One generation, in which each rank of each node fails. Each leader's verdict names another node's rank."""
    jobs = []
    for number in range(nodes):
        job = Timeline(f"node-{number}", 2 * number).opens(0, 0, world_size=2 * nodes).dies(9, 0, 0).dies(9.1, 0, 1)
        other = {"kind": "signal", "sentence": "x", "host": f"node-{nodes - 1 - number}", "rank": 0, "pid": 1}
        jobs.append(job.add(10, 1, "restarting", kind="fail", failure=other))
    return jobs


@pytest.mark.parametrize(
    ("shape", "left_out"),
    [
        (crash_loop, ("650 generations left out", "The timeline shows the newest generations", "And 640 more")),
        (many_nodes, ("1336 more ranks have no lane here", "elaunch report --json has all")),
    ],
)
def test_the_page_of_a_large_job_is_bounded_and_shows_what_it_leaves_out(
    shape: Callable[[int], Sequence[Timeline]], left_out: Sequence[str]
) -> None:
    report = report_of(*shape(700))

    with bounded(cpu_s=10.0):
        text = html(report)

    assert len(text) < 2_000_000
    assert [phrase for phrase in left_out if phrase not in text] == []
    numbers = summary(report)
    assert len(numbers["failures"]) + len(numbers["warnings"]) >= 700  # type: ignore[arg-type]
    # The timeline's axis has room for what it shows: none of it is left of the axis.
    assert "left:-" not in text


def test_a_curve_of_any_length_has_a_bounded_number_of_points_and_keeps_its_extremes() -> None:
    rows = [b'{"step": %d, "loss": %d}' % (step, 100 if step == 7_777 else step % 10) for step in range(10_000)]

    (loss,) = charts(StepMetrics(rows))

    assert POINTS <= loss.path.count("L") <= 2 * POINTS
    assert (loss.low, loss.high, loss.last) == ("0", "100", "step 9,999")


def test_what_a_curve_does_not_show_is_a_remark() -> None:
    rows = [b'{"step": %d, "loss": NaN, "seconds": %s}' % (s, b"60" if s == 99 else b"1") for s in range(1, 301)]

    (seconds,) = charts(StepMetrics(rows))

    assert seconds.remark == "the slowest step, 99, took 60 s"
    assert (seconds.low, seconds.high, seconds.first, seconds.last) == ("0", "4", "step 1", "step 300")
