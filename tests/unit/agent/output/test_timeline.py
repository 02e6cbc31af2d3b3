"""agent.output.run_dir: when each stage happened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from elaunch.agent.output.run_dir import TIMELINE, Timeline


def at_once(work: Callable[[], None]) -> None:
    work()


def test_a_stage_is_a_line_with_both_clocks_and_its_fields(tmp_path: Path) -> None:
    warnings: list[str] = []
    timeline = Timeline(tmp_path, warnings.append, at_once)
    before = time.monotonic()

    timeline.stamp(2, "forked", rank=3, pid=4711)
    timeline.stamp(2, "cleared")

    first, second = [json.loads(line) for line in (tmp_path / TIMELINE).read_text().splitlines()]
    assert (first["generation"], first["event"], first["rank"], first["pid"]) == (2, "forked", 3, 4711)
    assert before <= first["monotonic_s"] <= second["monotonic_s"] <= time.monotonic()
    assert abs(first["at"] - time.time()) < 60
    assert warnings == []


def test_a_disk_error_costs_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / TIMELINE).symlink_to("/dev/full")
    timeline = Timeline(tmp_path, warnings.append, at_once)

    timeline.stamp(0, "sealed")
    timeline.stamp(0, "forked")

    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
