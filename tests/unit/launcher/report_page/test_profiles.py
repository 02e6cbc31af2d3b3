"""report_page.profiles: what the page shows of the trainer's profile.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elaunch.launcher.report_page import reading
from elaunch.launcher.report_page.goodput import goodput
from elaunch.launcher.report_page.history import history
from elaunch.launcher.report_page.page import link_to, make_page, summary
from elaunch.launcher.report_page.profiles import BARS_MAX, SCHEMA_KNOWN, read_profile
from elaunch.launcher.report_page.render import render
from elaunch.trainer.profiling.summary import summarize
from elaunch.trainer.profiling.words import BUCKETS_MAX, SCHEMA, record
from tests.fuzzing import NESTED, VALUES, bounded, json_texts
from tests.unit.launcher.report_page.test_page import HOSTILE, TEMPLATE, Tags
from tests.unit.launcher.report_page.timelines import restarted
from tests.unit.trainer.profiling.test_summary import SAME, two_ranks


def made() -> dict[str, Any]:
    """What the trainer writes of two steps of 20 ms on two ranks."""
    return record(summarize(two_ranks(), SAME), generation=1, ranks=[], trace="trace.json.gz")


def text(of: dict[str, Any]) -> bytes:
    return json.dumps(of).encode()


def html(content: bytes) -> str:
    past = history([restarted().folder()], None)
    shown = read_profile(content)
    page = make_page(past, goodput(past), None, {}, {}, profiles=[(shown, ())] if shown else [])
    json.dumps(summary(page), allow_nan=False)
    return render(page, TEMPLATE)


def test_the_page_knows_the_schema_that_the_trainer_writes() -> None:
    assert SCHEMA_KNOWN == SCHEMA


def test_steps_are_the_mean_over_the_ranks_and_the_longest_one_is_drawn() -> None:
    of = made()
    of["steps"][1]["seconds"] = of["steps"][3]["seconds"] = 0.025

    shown = read_profile(text(of))

    assert shown is not None
    assert [(row.step, row.seconds, row.exposed_s) for row in shown.steps] == [
        (10, pytest.approx(0.02), pytest.approx(0.005)),
        (11, pytest.approx(0.025), pytest.approx(0.005)),
    ]
    # 10 ms on rank 0 and 7 ms on rank 1.
    assert shown.steps[0].communication_s == pytest.approx(0.0085)
    assert shown.steps[0].overlap == pytest.approx(7 / 17)
    assert (shown.drawn, shown.drawn_s) == (11, 0.025)
    assert [lane.name for lane in shown.lanes] == ["rank 0", "rank 1"]
    first, second = shown.lanes[1].bars
    assert (first.begin, first.width) == (pytest.approx(8 / 25), pytest.approx(4 / 25))
    assert first.note == "all_reduce of 20.0 kB: 4.00 ms, from 8.00 ms on"
    assert second.note.startswith("all_reduce of 4.0 kB")
    assert [(each.rank, each.times, each.late_s) for each in shown.last] == [(1, 4, 0.008)]


def test_the_page_and_its_numbers_have_the_profile() -> None:
    past = history([restarted().folder()], None)
    shown = read_profile(text(made()))
    assert shown is not None
    page = make_page(past, goodput(past), None, {}, {}, profiles=[(shown, (link_to("/a/trace.json.gz", "t.gz"),))])

    words = Tags(render(page, TEMPLATE))

    assert "Computation and communication" in words.text
    assert "rank 1 came 3.0 ms late to all-reduce 1 of step 10; the others waited" in words.text
    assert "The collectives of step 10, 20 ms" in words.text
    assert sum((attrs.get("data-tip") or "").startswith("all_reduce of") for _, attrs in words.tags) == 4
    assert [attrs["href"] for name, attrs in words.tags if name == "a" and attrs.get("href") == "t.gz"] == ["t.gz"]
    (numbers,) = summary(page)["profiles"]  # type: ignore[misc]
    assert (numbers["first_step"], numbers["steps"][1]["exposed_s"], numbers["mfu"]) == (10, 0.005, None)


def test_a_profile_of_another_schema_is_not_shown() -> None:
    assert read_profile(text({**made(), "schema": 2})) is None
    assert read_profile(b"") is None
    assert read_profile(b"[]") is None


def test_what_a_file_says_is_text_on_the_page() -> None:
    of = made()
    of["sentences"] = [HOSTILE.replace("\ud800", "")]
    of["buckets"][0]["kind"] = HOSTILE
    of["ranks"] = HOSTILE

    hostile, calm = Tags(html(text(of))), Tags(html(text(made())))

    assert [hostile.count(tag) for tag in ("script", "img")] == [calm.count(tag) for tag in ("script", "img")]
    assert "alert(1)" in hostile.text


def test_a_large_profile_makes_a_page_of_bounded_size() -> None:
    of = made()
    of["buckets"] = [of["buckets"][0]] * BUCKETS_MAX
    of["steps"] = [{**of["steps"][0], "step": n, "seconds": 0.03 if n == 10 else 0.02} for n in range(1000)]

    shown = read_profile(text(of))

    assert shown is not None
    assert len(shown.lanes[0].bars) <= BARS_MAX
    assert shown.steps_left_out == 1000 - len(shown.steps)
    assert len(html(text(of))) < 1_000_000


@given(st.sampled_from(sorted(made())), VALUES, json_texts(json.dumps(made())))
@example("steps", [{"step": 1, "seconds": 1e308}, {"step": 1, "seconds": 1e-320}], NESTED)
@example("buckets", [{"step": 10, "begins_s": {"٣": 1, "-1": 2, "9" * 30: 1}, "lengths_s": {}}], "")
def test_any_file_gives_a_page(field: str, value: Any, other: str) -> None:
    of = made()
    of[field] = value

    with bounded(cpu_s=4.0):
        assert html(json.dumps(of).encode(errors="surrogatepass"))
        assert html(other.encode(errors="surrogatepass"))


def test_records_are_read_below_the_runs_folder_and_through_no_link(tmp_path: Path) -> None:
    for generation in (0, 2):
        folder = tmp_path / f"attempt_{generation}" / "profile"
        folder.mkdir(parents=True)
        (folder / "profile.json").write_bytes(text({**made(), "generation": generation}))
    (tmp_path / "attempt_2" / "profile" / "trace.json.gz").write_bytes(b"x")
    (tmp_path / "attempt_1").mkdir()
    (tmp_path / "attempt_1" / "profile").symlink_to(tmp_path / "attempt_0" / "profile")

    found = reading.profiles(tmp_path)

    assert [json.loads(content)["generation"] for content, _ in found] == [0, 2]
    assert [[Path(path).name for path in paths] for _, paths in found] == [
        ["profile.json"],
        ["trace.json.gz", "profile.json"],
    ]
