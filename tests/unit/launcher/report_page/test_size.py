"""The report of a large job: its work grows with the job, and its page does not grow without end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from elaunch.launcher.report_page import command
from elaunch.launcher.report_page.goodput import goodput
from elaunch.launcher.report_page.history import NodeFolder, history
from elaunch.launcher.report_page.page import make_page, summary
from elaunch.launcher.report_page.render import render
from elaunch.launcher.report_page.trace import trace
from tests.unit.launcher.report_page.timelines import Timeline

TEMPLATE = Path(command.__file__).with_name("page.html").read_text()
# The type of a trace function is one of itself.
TraceFunction = Any
PAGE_BYTES_MAX = 2_000_000


def crash_loop(generations: int) -> list[NodeFolder]:
    """Only generation 0 makes steps; all others die before their first, as does the last."""
    job = Timeline().opens(0, 0).steps(6, 0, 2, first=1).steps(15, 0, 8, rate=1.0).dies(16, 0, 0).stops(18, 0, (1,))
    for number in range(1, generations):
        begin_s = 20.0 * number
        job.opens(begin_s, number, "fail").dies(begin_s + 5, number, number % 2)
        job.stops(begin_s + 8, number, (1 - number % 2,))
    return [job.folder()]


def many_nodes(nodes: int) -> list[NodeFolder]:
    """One generation, in which each rank of each node fails. Each leader's verdict names another node's rank."""
    jobs = []
    for number in range(nodes):
        job = Timeline(f"node-{number}", 2 * number).opens(0, 0, world_size=2 * nodes).dies(9, 0, 0).dies(9.1, 0, 1)
        other = {"kind": "signal", "sentence": "x", "host": f"node-{nodes - 1 - number}", "rank": 0, "pid": 1}
        jobs.append(job.add(10, 1, "restarting", kind="fail", failure=other))
    return [job.folder() for job in jobs]


def many_workers(workers: int) -> list[NodeFolder]:
    """One node, of whose workers each fails."""
    job = Timeline(workers=workers).opens(0, 0, world_size=workers)
    for local_rank in range(workers):
        job.dies(9, 0, local_rank)
    return [job.folder()]


def many_warnings(generations: int) -> list[NodeFolder]:
    """In each generation the job seems to hang, goes on, and a rank is slow."""
    job = Timeline()
    for number in range(generations):
        begin_s = 400.0 * number
        job.opens(begin_s, number, "join").add(begin_s + 70, number, "seems_hung", host="node-a", rank=1, message="x")
        job.add(begin_s + 90, number, "goes_on").add(begin_s + 300, number, "slow", rank=0, wait_percent=20)
    return [job.folder()]


def report_of(folders: Sequence[NodeFolder]) -> tuple[str, str, str]:
    """The page, the JSON and the trace."""
    past = history(folders, None)
    page = make_page(past, goodput(past), None, {}, {})
    return render(page, TEMPLATE), json.dumps(summary(page)), json.dumps(trace(past, page.goodput))


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python run, each round of a loop anew: a measure of time, the same on a busy machine."""
    lines = 0

    def count(_frame: FrameType, event: str, _arg: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("shape", [crash_loop, many_nodes, many_workers, many_warnings])
def test_a_job_twice_as_large_takes_twice_the_work(shape: Callable[[int], list[NodeFolder]]) -> None:
    few, many = shape(100), shape(200)

    def numbers(folders: list[NodeFolder]) -> None:
        past = history(folders, None)
        found = goodput(past)
        summary(make_page(past, found, None, {}, {}))
        trace(past, found)

    assert lines_run(lambda: numbers(many)) < 2.05 * lines_run(lambda: numbers(few))


@pytest.mark.parametrize("shape", [crash_loop, many_nodes, many_workers])
def test_the_page_of_a_large_job_is_bounded_and_says_what_it_leaves_out(
    shape: Callable[[int], list[NodeFolder]],
) -> None:
    page, numbers, _ = report_of(shape(700))

    assert len(page) < PAGE_BYTES_MAX
    assert "elaunch report --json has all" in page
    assert "elaunch report --perfetto has all" in page
    assert len(json.loads(numbers)["failures"]) >= 700
    match shape.__name__:
        case "crash_loop":
            assert "300 generations left out" in page
            assert "The timeline shows the newest 500 of 700 generations" in page
            assert page.count('class="cause"') == 60
        case "many_nodes":
            assert "600 more nodes have no lane here" in page
        case "many_workers":
            assert "600 more ranks that failed or were warned of: no lane here" in page
            assert "And 679 more; elaunch report --json has all" in page
    # The timeline's axis has room for what it shows: none of it is left of the axis.
    assert "left:-" not in page


def test_of_a_job_that_never_trained_again_nobody_says_that_it_did() -> None:
    past = history(crash_loop(5), None)

    assert goodput(past).recoveries_s == {}
    page, numbers, _ = report_of(crash_loop(5))
    assert "went on" not in page
    assert "No later generation made a step." in page
    assert all(failure["recovery_s"] is None for failure in json.loads(numbers)["failures"])
