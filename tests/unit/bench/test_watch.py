"""bench.watchtables: what is told after a failure, and what watching costs."""

from __future__ import annotations

from bench import told, watching
from bench.page import WATCH_BEGIN, WATCH_END, render, update
from bench.samples import Results, Run, Sample, combined
from tests.unit.bench.test_page import row


def results(*samples: Sample) -> Results:
    return combined([Run({}, {}, samples)])


def said(contender: str, how: str, told_s: float, right: float) -> Sample:
    return Sample(told.SECTION, contender, told.WORKERS, {how: told_s, f"{how}: {told.RIGHT}": right})


def test_each_kind_of_failure_has_a_row_for_each_launcher_that_tells_of_it() -> None:
    ours = [said("elaunch", "exit 0", s, 1.0) for s in (0.1, 0.2, 0.3)]
    theirs = [said("torchrun", "exit 0", 1.0, 0.0), Sample(told.SECTION, "torchrun", told.WORKERS, why="killed: none")]

    text = render(results(*ours, *theirs))

    assert row(text, "exit 0", "elaunch")[2:] == ["3", "0.200", "0.290", "3 of 3"]
    assert row(text, "exit 0", "torchrun")[2:] == ["1", "1.00", "1.00", "0 of 1"]
    assert "torchrun: 1 × killed: none" in text
    assert "| killed" not in text


def test_the_cost_is_the_ratio_of_the_medians() -> None:
    def step(contender: str, step_s: float) -> Sample:
        values = {watching.MEDIAN: step_s, watching.MEAN: 2 * step_s}
        return Sample(watching.SECTION, contender, watching.WORKERS, values)

    on, off = watching.WATCHED.name, watching.PLAIN.name

    text = render(results(*(step(on, s) for s in (0.01005, 0.02)), *(step(off, s) for s in (0.010, 0.0200))))

    assert row(text, watching.MEDIAN)[1:] == ["2", "15.025", "15.000", "+0.17 %"]


def test_the_cost_is_also_counted_as_a_share_of_the_workers_time() -> None:
    def counted(contender: str, share: float) -> Sample:
        return Sample(watching.SECTION, contender, watching.WORKERS, {watching.IN_ALL: share})

    on, off = watching.WATCHED.name, watching.PLAIN.name

    text = render(results(*(counted(on, s) for s in (0.2, 0.3, 0.4)), counted(off, 0.1)))

    assert row(text, watching.IN_ALL)[1:] == ["1", "0.300 %", "0.390 %", "0.100 %", "0.100 %"]


def test_the_part_has_markers_of_its_own() -> None:
    page = f"above\n{WATCH_BEGIN}\nold\n{WATCH_END}\nbelow\n"

    fresh = update(page, results(said("elaunch", "killed", 0.1, 1.0)))

    assert fresh.startswith(f"above\n{WATCH_BEGIN}\n")
    assert "\nold\n" not in fresh
    assert "1 of 1" in fresh
