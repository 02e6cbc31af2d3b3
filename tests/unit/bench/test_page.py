"""bench.page: tables from samples."""

from __future__ import annotations

from bench import scale
from bench.page import BEGIN, EMPTY, NODES_BEGIN, NODES_END, render, stage_rows, update
from bench.samples import Run, Sample

REDUCE, STEP = "first all-reduce", "first optimizer step"


def results(*samples: Sample) -> Run:
    return Run({"CPUs": "2 × something"}, {"seed": "1"}, samples)


def start(contender: str, reduced_s: float, stepped_s: float) -> Sample:
    return Sample("start", contender, 8, {REDUCE: reduced_s, STEP: stepped_s}, {"sealed": 0.25})


def many(agents: int, ranks_s: float) -> Sample:
    return Sample(scale.FIRST, scale.NAME, agents, {scale.SEALED: ranks_s / 2, scale.RANKS: ranks_s})


def row(text: str, *first: str) -> list[str]:
    """The cells of the first table row that begins with these."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if cells[: len(first)] == list(first):
            return cells
    raise AssertionError(f"no row {first} in:\n{text}")


def test_a_part_without_samples_stays_as_it_is() -> None:
    page = EMPTY.replace(BEGIN, f"{BEGIN}\nold of one node")

    fresh = update(page, results(many(64, 0.1)))

    assert "old of one node" in fresh
    several = fresh.partition(NODES_BEGIN)[2].partition(NODES_END)[0]
    assert row(several, scale.RANKS, "64")[2:] == [scale.NAME, "1", "0.100", "0.100", "0.100", "–"]


def test_a_row_has_median_percentile_and_the_ratio_to_elaunch() -> None:
    text = render(results(start("elaunch", 2.0, 2.5), start("torchrun", 8.0, 15.0), start("torchrun", 6.0, 15.0)))

    assert row(text, REDUCE, "8", "torchrun")[3:] == ["2", "7.00", "7.90", "8.00", "3.50"]
    assert row(text, STEP, "8", "torchrun")[3:] == ["2", "15.00", "15.00", "15.00", "6.00"]


def test_who_has_no_time_has_a_reason() -> None:
    text = render(results(start("elaunch", 2.0, 2.5), Sample("start", "torchrun", 8, why="hung")))

    assert "- 8 workers, torchrun: 1 × hung" in text


def test_stages_come_in_the_order_of_time_with_the_step_since_the_one_before() -> None:
    taken = [
        Sample("restart", "elaunch", 2, stages={"forked": 0.3, "detected": 0.1}),
        Sample("restart", "elaunch", 2, stages={"forked": 0.5, "detected": 0.1}),
    ]

    assert stage_rows(taken) == [
        ("detected", "0.100", "0.100", "0.100", "0.100"),
        ("forked", "0.400", "0.490", "0.300", "0.390"),
    ]
