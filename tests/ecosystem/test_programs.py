"""Each program, unmodified: it trains, survives a SIGKILL of a rank, ends with the right code, and leaves nothing."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ecosystem.registry import PROGRAMS, Program
from tests.ecosystem.runs import Place, steps, steps_of_all
from tests.harness import COMMAND, Job, wait_for

# From the first step of a generation to the end of a program.
_LIMIT_S = 180.0
# It needs only torch, and is a part of every run of the tests: DDP, with loaders that are processes of its own.
_USUAL = ("dataloader",)
# torchrun's workers often meet again only with a store for each generation.
_FRESH_STORE = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
_LAUNCHERS = {"elaunch": COMMAND, "torchrun": (*_FRESH_STORE, sys.executable, "-m", "torch.distributed.run")}
_FIRST_RESTARTS, _FIRST_RESTART_S = 5, 1.0


@pytest.fixture(
    params=[
        pytest.param(program, marks=() if program.name in _USUAL else pytest.mark.slow, id=program.name)
        for program in PROGRAMS
    ]
)
def program(request: pytest.FixtureRequest) -> Program:
    program: Program = request.param
    if importlib.util.find_spec(program.imports) is None:
        pytest.skip(f"{program.imports} is not installed; `make ecosystem` installs it")
    return program


@pytest.fixture
def place(program: Program, tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, program)
    yield place
    place.remove()


def nothing_is_left(place: Place, job: Job) -> None:
    wait_for(lambda: not job.processes(), "no process is left")
    assert place.left() == []


def test_a_program_survives_a_kill_and_leaves_nothing(place: Place) -> None:
    ranks = place.program.ranks
    rank = random.randrange(ranks)
    print(f"killed: rank {rank}")
    killed = place.folder / "killed"

    with place.job("--max-restarts", "3", env={"PROGRAM_STEPS": "60", "PROGRAM_HELD_UNTIL": str(killed)}) as job:
        job.markers()
        before = steps_of_all(job, place.program)
        os.kill(before[rank].pid, signal.SIGKILL)
        killed.touch()
        pids = [step.pid for step in before.values()]
        steps_of_all(job, place.program, pids)
        code = job.wait(_LIMIT_S)
        nothing_is_left(place, job)

    assert code == 0, job.output
    assert max(step.number for step in steps(job)) >= 60
    assert "started again" in job.stderr or "restart" in job.stderr, job.stderr


@pytest.mark.slow
def test_a_program_that_fails_ends_the_job_with_its_own_error(place: Place) -> None:
    with place.job("--max-restarts", "0", env={"PROGRAM_FAILS": "1"}) as job:
        job.markers()
        code = job.wait(_LIMIT_S + place.program.first_step_s)
        nothing_is_left(place, job)

    assert code == 1, job.output
    assert "this step fails" in job.stderr, job.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [each for each in PROGRAMS if each.name in ("with_lightning", "with_accelerate", "with_transformers")],
    ids=lambda program: program.name,
    indirect=True,
)
def test_the_first_restart_of_a_program_that_has_never_run_here(program: Program, tmp_path: Path) -> None:
    took_s: dict[str, list[float]] = {name: [] for name in _LAUNCHERS}
    for turn in range(_FIRST_RESTARTS):
        for name, command in _LAUNCHERS.items():
            # Its cache is empty.
            place = Place(tmp_path / f"{name}{turn}", program)
            with place.job("--max-restarts", "3", env={"PROGRAM_STEPS": "2000"}, launcher=command) as job:
                pids = [step.pid for step in steps_of_all(job, program).values()]
                killed_s = time.monotonic()
                os.kill(random.choice(pids), signal.SIGKILL)
                again = steps_of_all(job, program, pids)
                took_s[name].append(max(step.at_s for step in again.values()) - killed_s)
            place.remove()

    print(
        *(f"{name}: p50 {statistics.median(each):.2f} s of {sorted(each)}" for name, each in took_s.items()), sep="\n"
    )
    # Beside other tests a time shows nothing.
    assert "PYTEST_XDIST_WORKER" in os.environ or statistics.median(took_s["elaunch"]) <= _FIRST_RESTART_S
