"""The loops over `steps`: epochs, those that are left by `break`, and what is drawn outside of a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elaunch.trainer import link
from elaunch.trainer.integrations import KeptEpochs
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state import Version

pytestmark = pytest.mark.usefixtures("memory")


class Failed(Exception):
    """A worker has failed."""


class Job:
    """A training that is built again for each generation. It notes what it has trained and drawn."""

    def __init__(self, dropout: float = 0.5, **options: Any) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.logged: list[str] = []
        self.keeper = Keeper(
            self.model, self.optimizer, **{"lose_at_most": 1, "per_rank": (), "log": self.logged.append, **options}
        )
        self.losses: dict[int, float] = {}

    def train(self, step: int) -> None:
        loss = self.model(torch.ones(8, 4)).pow(2).mean()
        loss.backward()
        with self.keeper.commit():
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses[step] = loss.item()


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), np.random.rand()


def again(monkeypatch: pytest.MonkeyPatch, run: Callable[[int], object]) -> Any:
    """What `run` returns once it has not failed; it gets the generation."""
    for generation in range(9):
        monkeypatch.setenv("ELAUNCH_GENERATION", str(generation))
        try:
            return run(generation)
        except Failed:
            pass
    raise AssertionError


def test_a_loop_whose_total_is_that_of_an_epoch_is_refused_when_it_has_nothing_to_do() -> None:
    job = Job()

    def run() -> None:
        with job.keeper:
            for _ in range(2):
                for step in job.keeper.steps(3):
                    job.train(step)

    with pytest.raises(ValueError, match=r"steps\(3\) has nothing to do.* reached step 3.*keeper\.epochs"):
        run()

    assert list(job.losses) == [1, 2, 3]


@pytest.mark.parametrize("fails_after", [3, 4, 6])
def test_epochs_continue_where_they_were_and_what_ends_an_epoch_is_done_again(
    monkeypatch: pytest.MonkeyPatch, fails_after: int
) -> None:
    def run(generation: int) -> tuple[dict[int, float], dict[int, Any]]:
        job, ends = Job(name=name), {}
        with job.keeper:
            for epoch, steps in job.keeper.epochs(2, 3):
                for step in steps:
                    job.train(step)
                    if step == fails_after % 3 and name == "failing" and not generation:
                        raise Failed
                ends[epoch] = drawn(), job.keeper.step
                if job.keeper.step == fails_after and name == "failing" and not generation:
                    raise Failed
        losses.update(job.losses)
        return losses, ends

    name, losses = "calm", dict[int, float]()
    calm = again(monkeypatch, run)
    name, losses = "failing", dict[int, float]()
    found = again(monkeypatch, run)

    assert [calm[0][step] for step in losses] == list(losses.values())
    assert [step for _, step in calm[1].values()] == [3, 6]
    assert found[1].items() <= calm[1].items()
    assert 1 in found[1]


def test_the_last_step_of_all_epochs_is_reported_with_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(link, "report", lambda *step: reported.append(step))
    job = Job()

    with job.keeper:
        for _, steps in job.keeper.epochs(2, 3):
            for step in steps:
                job.train(step)

    assert reported == [(step, 6) for step in range(1, 7)]


def test_a_loop_that_was_left_ends_at_the_same_step_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(generation: int) -> Job:
        job = Job()
        with job.keeper:
            for step in job.keeper.steps(10):
                job.train(step)
                if step == 4:
                    break
        if not generation:
            raise Failed
        return job

    job = again(monkeypatch, run)

    assert job.keeper.step == 4
    assert not job.losses
    assert job.logged[1:] == ["the loop up to step 10 ends after step 4, where it was left before"]


@pytest.mark.parametrize("fails_at", [6, 8])
def test_a_loop_that_is_left_and_entered_again_continues(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """As for an evaluation every few steps, outside of the loop."""
    found: list[tuple[int, tuple[float, ...]]] = []

    def run(generation: int) -> Job:
        job = Job()
        with job.keeper:
            while job.keeper.step < 12:
                for step in job.keeper.steps(12):
                    job.train(step)
                    if step == fails_at and not generation:
                        raise Failed
                    if step % 5 == 0:
                        break
                found.append((job.keeper.step, drawn()))
        return job

    again(monkeypatch, run)

    assert [step for step, _ in found] == [5, 10, 12]
    assert len({numbers for _, numbers in found}) == 3


@pytest.mark.parametrize("fails_in", [3, 6])
def test_what_is_drawn_between_two_steps_changes_no_step_also_if_it_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, fails_in: int
) -> None:
    def run(generation: int) -> tuple[dict[int, float], dict[int, Any]]:
        job = Job(name=name)
        with job.keeper:
            for step in job.keeper.steps(8):
                job.train(step)
                if step % 3 == 0:
                    evaluated[step] = drawn()
                    if step == fails_in and name == "failing" and not generation:
                        raise Failed
                    drawn()
        losses.update(job.losses)
        return losses, evaluated

    name, losses, evaluated = "calm", dict[int, float](), dict[int, Any]()
    calm = again(monkeypatch, run)
    name, losses, evaluated = "failing", dict[int, float](), dict[int, Any]()
    found = again(monkeypatch, run)

    assert found[1] == calm[1]
    assert list(found[0]) == list(range(fails_in + 1, 9))
    assert found[0].items() <= calm[0].items()


def test_what_is_drawn_after_a_backward_pass_comes_back_with_its_step_and_changes_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise on gradients: a rank that dies after it, while others complete the step, has lost nothing."""

    def run(generation: int) -> dict[int, Any]:
        job = Job(name=name, dropout=0.0)
        with job.keeper:
            for step in job.keeper.steps(5):
                early = drawn()
                job.model(torch.ones(8, 4)).sum().backward()
                records: Any = job.keeper._copies._records
                record = records.find(Version(generation, step))["random"]["torch"].clone()
                late = drawn()
                if step == 3 and name == "failing" and not generation:
                    raise Failed
                with job.keeper.commit():
                    late += drawn()
                    job.optimizer.zero_grad()
                assert torch.equal(records.find(Version(generation, step))["random"]["torch"], record)
                numbers[step] = early, late
        assert not any("random" in logged for logged in job.logged)
        return numbers

    name, numbers = "calm", dict[int, Any]()
    calm = again(monkeypatch, run)
    name, numbers = "failing", dict[int, Any]()

    assert again(monkeypatch, run) == calm
    assert len({number for early_and_late in calm.values() for its in early_and_late for number in its}) == 5 * 9


def test_a_program_that_draws_nothing_between_steps_draws_what_it_would_without_a_keeper() -> None:
    def numbers(steps: Any) -> list[Any]:
        return [(step, drawn(), job.train(step)) for step in steps]

    job = Job()
    with job.keeper:
        kept = numbers(job.keeper.steps(4))
    losses, job = job.losses, Job(name="other")
    with job.keeper:
        job.keeper.step_begin()
        assert numbers(range(1, 5)) == kept

    assert job.losses == losses


@pytest.mark.parametrize("fails_at", [3, 6])
def test_an_evaluation_in_a_loop_with_hooks_changes_no_step_also_if_it_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """6 is the last step of an epoch, after which the order of the next one is drawn."""

    def run(generation: int) -> dict[int, float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(12.0).reshape(12, 1), batch_size=2, shuffle=True)
        kept = KeptEpochs(
            model,
            [optimizer],
            outermost=model,
            loader=loader,
            base=loader,
            accumulate=1,
            set_epoch=lambda epoch: None,
            name=name,
            lose_at_most=1,
            log=lambda logged: None,
        )
        with kept:
            for epoch in kept.epochs(2):
                for number, batch in enumerate(loader, kept.done + 1):
                    loss = model(batch).pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    step = losses[-1][0] + 1 if losses else 1
                    losses.append((6 * epoch + number, loss.item()))
                    if number % 3 == 0:
                        model.eval()
                        for evaluated in DataLoader(torch.arange(4.0).reshape(4, 1), shuffle=True):
                            model(evaluated)
                            if step == fails_at and name == "failing" and not generation:
                                raise Failed
                        model.train()
        return losses

    name, losses = "calm", list[tuple[int, float]]()
    calm = again(monkeypatch, run)
    name, losses = "failing", list[tuple[int, float]]()

    assert again(monkeypatch, run) == calm
    assert [step for step, _ in calm] == list(range(1, 13))


def test_a_commit_outside_of_steps_is_named_once() -> None:
    job = Job()

    with job.keeper:
        for step in (1, 2):
            job.train(step)

    assert [line for line in job.logged if line.startswith("keeper.commit() without keeper.steps")] == job.logged
    assert len(job.logged) == 1


@pytest.mark.parametrize("total", ["3", -1, 2.5])
def test_a_total_that_is_no_number_of_steps_is_refused(total: Any) -> None:
    job = Job()

    with job.keeper as keeper, pytest.raises(ValueError, match=r"the total must be a whole number, 0 or more"):
        next(keeper.steps(total))
