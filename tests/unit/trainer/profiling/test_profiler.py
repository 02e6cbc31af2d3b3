"""profiling.profiler: a loop of one process with the real torch.profiler, and two ranks with one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.trainer import profiled
from elaunch.trainer.profiling import profiler as module
from elaunch.trainer.profiling.profiler import Profiler, profile_folder
from tests.unit.trainer.ranks.test_peers import forked


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELAUNCH_MEMORY", "ELAUNCH_GENERATION", "TORCHELASTIC_ERROR_FILE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def work() -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)


def run(steps: range, which: str, folder: Path) -> tuple[list[int], list[str]]:
    """The steps that a loop makes, and what is logged."""
    logged: list[str] = []
    made = []
    for number in profiled(steps, which, folder=folder, log=logged.append):
        made.append(number)
        work()
    return made, logged


def record(folder: Path, generation: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"generation_{generation}" / "profile.json").read_text())
    return found


def test_a_loop_makes_its_steps_and_the_chosen_ones_are_profiled(tmp_path: Path) -> None:
    made, logged = run(range(1, 8), "3-4", tmp_path)

    assert made == [*range(1, 8)]
    found = record(tmp_path)
    assert [each["step"] for each in found["steps"]] == [3, 4]
    assert all(0 < each["computation_s"] <= each["seconds"] for each in found["steps"])
    assert {path.name for path in (tmp_path / "generation_0").iterdir()} == {*("rank_0.json.gz", "profile.json")}
    assert logged[0].startswith("profile: steps 3 to 4 took ")
    assert logged[-1].endswith(f"python -m elaunch.trainer.profiling {tmp_path / 'generation_0'}")
    steps = iter(range(3))
    assert profiled(steps, None) is steps


def test_a_loop_that_ends_early_gives_the_steps_that_it_made_and_a_restart_those_that_are_left(tmp_path: Path) -> None:
    run(range(1, 4), "2-9", tmp_path)
    assert [each["step"] for each in record(tmp_path)["steps"]] == [2, 3]

    _, logged = run(range(1, 6), "6-9", tmp_path / "none")
    assert logged == ["profile: no trace, since the training ended before steps 6 to 9 were profiled"]
    assert not (tmp_path / "none").exists()

    _, logged = run(range(8, 12), "6-9", tmp_path)
    assert logged[0] == "profile: this start begins with step 8; it profiles step 9 of steps 6 to 9"
    assert [each["step"] for each in record(tmp_path)["steps"]] == [9]
    _, logged = run(range(10, 12), "6-9", tmp_path)
    assert logged == ["profile: this start begins with step 10; it profiles nothing of steps 6 to 9"]


def test_a_training_that_stops_in_a_profiled_step_has_no_trace_and_the_next_profiler_works(tmp_path: Path) -> None:
    logged: list[str] = []

    def train() -> None:
        with Profiler("3-4", folder=tmp_path, log=logged.append) as profiler:
            for number in (1, 2, 3):
                profiler.begin_step(number)
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        train()

    assert logged == ["profile: no trace, since the training ended before steps 3 to 4 were profiled"]
    assert [*tmp_path.iterdir()] == []
    assert run(range(1, 6), "3-4", tmp_path)[1][0].startswith("profile: steps 3 to 4 took")


def test_what_cannot_be_written_is_logged_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    made, logged = run(range(1, 6), "3-4", tmp_path / "file" / "below")

    assert made == [*range(1, 6)]
    assert logged[0].startswith("profile: steps 3 to 4 took")
    written = [each for each in logged if "cannot be written (Not a directory)" in each]
    assert len({*written}) == len(written) == 2


def test_a_program_that_profiles_itself_goes_on_without_our_trace(tmp_path: Path) -> None:
    with torch.profiler.profile() as theirs:
        made, logged = run(range(1, 6), "3-4", tmp_path)

    assert made == [*range(1, 6)]
    assert any(event.name == "aten::matmul" for event in theirs.events())
    assert logged == ["profile: rank 0 has no trace: the program uses torch.profiler itself in these steps"]


def test_rank_0_has_the_times_of_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    def profiles_as(rank: int) -> bool:
        logged: list[str] = []
        folder = tmp_path / f"node-{rank}"
        with Profiler("2-3", folder=folder, log=logged.append) as profiler:
            profiler._place = module.RankInfo(rank, rank, 2)
            profiler._log = logged.append if rank == 0 else lambda _: None
            for number in range(1, 7):
                profiler.begin_step(number)
                work()
        if rank:
            return logged == [] and {path.name for path in folder.rglob("*.*")} == {"rank_1.json.gz"}
        found = record(folder)["steps"]
        return [(each["rank"], each["step"]) for each in found] == [(0, 2), (0, 3), (1, 2), (1, 3)]

    assert forked(tmp_path, profiles_as) == [0, 0]


def test_files_are_in_the_generations_log_folder_or_below_the_given_one(tmp_path: Path) -> None:
    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt_3" / "0" / "error.json")}
    assert profile_folder(environ, 3, tmp_path / "x") == tmp_path / "x" / "generation_3"

    (tmp_path / "timeline.jsonl").touch()

    assert profile_folder(environ, 3, tmp_path / "x") == tmp_path / "attempt_3" / "profile"
