"""The Keeper in loops that it does not own: step by step, and by hooks on the optimizer."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.trainer.keeper.boundary import Stopped
from elaunch.trainer.keeper.keeper import Keeper
from tests.unit.trainer.conftest import Fails, fail

pytestmark = pytest.mark.usefixtures("memory")


class Loop:
    """A training whose loop belongs to somebody else."""

    def __init__(self, optimizers: int = 1, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        halves = [self.model[0].parameters(), self.model[2].parameters()]
        given = halves if optimizers == 2 else [self.model.parameters()]
        self.optimizers = [torch.optim.AdamW(its, lr=0.1) for its in given]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [3, 6])
        self.logged: list[str] = []
        # The loaders of other tests may still be there.
        options = {"scheduler": self.scheduler, "lose_at_most": 1, "per_rank": (), "log": self.logged.append, **options}
        self.keeper = Keeper(self.model, self.optimizers, **options)
        self.losses: dict[int, float] = {}

    def backward(self) -> None:
        loss = self.model(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        self.loss = loss.item()

    def step(self) -> None:
        """As a library that calls back."""
        self.keeper.step_begin()
        self.backward()
        self.keeper.commit_begin()
        self.update()
        self.keeper.step_end()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def called_back(loop: Loop, steps: int, fails_in: int = 0, accumulate: int = 1) -> dict[int, float]:
    """The loop of a library that calls back."""
    for _ in range(loop.keeper.restore(), steps):
        for micro in range(accumulate):
            loop.keeper.step_begin()
            loop.backward()
            if loop.keeper.step + 1 == fails_in:
                try:
                    fail()
                except RuntimeError as error:
                    loop.keeper.close(error)
                    raise
            if micro == accumulate - 1:
                loop.keeper.commit_begin()
                loop.update()
                loop.losses[loop.keeper.step + 1] = loop.loss
            assert loop.keeper.step_end() == (micro == accumulate - 1)
    loop.keeper.close()
    return loop.losses


def hooked(loop: Loop, steps: int, fails_in: int = 0, accumulate: int = 1) -> dict[int, float]:
    """A loop that knows nothing of a keeper."""
    with loop.keeper:
        loop.keeper.commit_by_hooks()
        for step in range(loop.keeper.step + 1, steps + 1):
            for _ in range(accumulate):
                loop.backward()
            if step == fails_in:
                fail()
            loop.update()
            loop.losses[step] = loop.loss
    return loop.losses


@pytest.mark.parametrize(
    ("run", "accumulate", "optimizers"), [(called_back, 2, 1), (called_back, 1, 2), (hooked, 1, 1), (hooked, 2, 2)]
)
def test_a_failure_repeats_no_step_of_a_loop_that_belongs_to_others(
    monkeypatch: pytest.MonkeyPatch,
    memory: Path,
    fails: Fails,
    run: Callable[..., dict[int, float]],
    accumulate: int,
    optimizers: int,
) -> None:
    monkeypatch.delenv("ELAUNCH_MEMORY")
    calm = Loop(optimizers)
    undisturbed = run(calm, 10, accumulate=accumulate)
    monkeypatch.setenv("ELAUNCH_MEMORY", str(memory))

    before = Loop(optimizers, lose_at_most=4)
    fails(lambda: run(before, 10, 7, accumulate=accumulate))
    torch.manual_seed(99)
    resumed = Loop(optimizers)
    after = run(resumed, 10, accumulate=accumulate)

    assert {**before.losses, **after} == undisturbed
    assert [*after] == [7, 8, 9, 10]
    assert all(map(torch.equal, resumed.model.parameters(), calm.model.parameters()))
    assert resumed.scheduler.state_dict() == calm.scheduler.state_dict()


def test_a_signal_stops_it_at_the_boundary_and_the_keeper_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, before = Loop(), signal.getsignal(signal.SIGTERM)
    loop.keeper.restore()
    loop.keeper.step_begin()
    # A library puts its own handler in place meanwhile.
    signal.signal(signal.SIGTERM, before)
    loop.step()
    loop.keeper.step_begin()
    os.kill(os.getpid(), signal.SIGTERM)
    loop.step()

    with pytest.raises(Stopped):
        loop.keeper.step_begin()

    assert loop.logged == ["stopped after step 2, on a request to leave"]
    assert signal.getsignal(signal.SIGTERM) == before
    # A second end changes nothing.
    loop.keeper.close()
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    resumed = Loop()
    assert resumed.keeper.restore() == 2
    resumed.keeper.close()


def test_a_handler_of_a_left_keeper_that_a_library_puts_back_passes_the_signal_on(handled: list[int]) -> None:
    loop = Loop()
    loop.keeper.restore()
    ours = signal.getsignal(signal.SIGTERM)
    loop.keeper.close()
    signal.signal(signal.SIGTERM, ours)

    os.kill(os.getpid(), signal.SIGTERM)

    assert handled == [signal.SIGTERM]


def test_at_the_end_of_a_program_that_has_not_closed_it_the_keeper_keeps_the_last_step(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    with monkeypatch.context() as patched:
        patched.setattr(atexit, "register", at_exit.append)
        loop = Loop(lose_at_most=1000)
        loop.keeper.restore()
    for _ in range(5):
        loop.step()

    for function in at_exit:
        function()

    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    again = Loop()
    assert again.keeper.restore() == 5
    again.keeper.close()


def entered_with_hooks(loop: Loop, work: Callable[[Loop], object]) -> None:
    with loop.keeper:
        loop.keeper.commit_by_hooks()
        work(loop)


def test_a_failure_between_optimizer_and_scheduler_is_not_taken_for_a_whole_step(fails: Fails) -> None:
    def work(loop: Loop) -> None:
        for _ in range(3):
            loop.backward()
            loop.update()
        loop.backward()
        loop.optimizers[0].step()
        fail()

    fails(lambda: entered_with_hooks(Loop(), work))
    resumed = Loop()

    # Only the snapshot is whole, and it is of the step before.
    assert resumed.keeper.restore() == 3
    assert resumed.scheduler.last_epoch == 3
    resumed.keeper.close()


def in_turn(loop: Loop) -> None:
    loop.backward()
    loop.optimizers[0].step()
    loop.backward()


@pytest.mark.parametrize(
    ("options", "work", "sentence"),
    [
        ({"scaler": torch.amp.GradScaler("cpu")}, fail, r"a GradScaler skips: put scaler\.step"),
        ({"optimizers": 2}, in_turn, "of 2 optimizers number 1 did not step before the next pass"),
        ({}, lambda loop: loop.optimizers[0].step(lambda: 0.0), r"AdamW\.step was called with a closure"),
    ],
)
def test_hooks_refuse_what_they_cannot_see(
    options: dict[str, Any], work: Callable[[Loop], object], sentence: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        entered_with_hooks(Loop(**options), work)
