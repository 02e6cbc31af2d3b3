"""`python -m bench --only told,watching` with real jobs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import told, watching
from bench.contenders import ELAUNCH, TORCHRUN


@pytest.mark.slow
def test_a_run_of_what_is_told_and_what_watching_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "STEPS", 20)
    page, out = tmp_path / "page.md", tmp_path / "samples.json"

    code = command.main(
        ["--only", "told,watching", "--samples", "1", "--contenders", "elaunch", "--page", str(page), "--out", str(out)]
    )

    assert code == 0
    text = page.read_text()
    assert all(f"| {how} " in text for how in told.HOWS)
    assert text.count("1 of 1") == len(told.HOWS), text
    assert "everything on" in text
    assert "Samples that failed" not in text


@pytest.mark.slow
def test_torchrun_names_another_rank_where_one_ended_with_0() -> None:
    (sample,) = told.told(TORCHRUN, told.EXIT_0, 60.0, random.Random(1))

    assert sample.values[f"{told.EXIT_0}: {told.RIGHT}"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("how", [told.KILLED, told.EXCEPTION, told.EXIT_0])
def test_the_rank_that_failed_is_named_right(how: str) -> None:
    (sample,) = told.told(ELAUNCH, how, 60.0, random.Random(1))

    assert not sample.why
    assert sample.values[f"{how}: {told.RIGHT}"] == 1.0
    assert sample.values[how] > 0


def test_a_line_about_a_lost_peer_names_no_cause() -> None:
    lost = "elaunch: rank 2 (local rank 2 on a, pid 7) lost a peer in all_reduce (RuntimeError: closed) in generation 0"
    raised = "elaunch: the cause: rank 1 (local rank 1 on a, pid 6) raised ValueError: bad in generation 0"

    found = told.OURS.search(f"{lost}; stopping 3 workers\n{raised}\n")

    assert found
    assert found["rank"] == "1"
