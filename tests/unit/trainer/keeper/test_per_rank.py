"""State that each rank has for itself, and what the Keeper warns of where there is none."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elaunch.trainer import Batches, Keeper, Order
from elaunch.trainer.state.rank_objects import RankObjects
from tests.unit.trainer.conftest import Fails

pytestmark = pytest.mark.usefixtures("memory")


class Packer:
    """A packing buffer: samples that wait until they fill a batch."""

    def __init__(self) -> None:
        self.waiting: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        # The live list, as many programs return it.
        return {"waiting": self.waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = state["waiting"]


class Job:
    """A training on real data, with a generator and a packing buffer of its own."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batches = Batches(DataLoader(TensorDataset(torch.arange(20.0)[:, None]), batch_size=3, shuffle=True))
        self.generator, self.packer = torch.Generator().manual_seed(4), Packer()
        self.logged: list[str] = []
        per_rank = [self.batches, self.generator, self.packer]
        defaults: dict[str, Any] = {"lose_at_most": 1, "log": self.logged.append, "per_rank": per_rank}
        self.keeper = Keeper(self.model, self.optimizer, **{**defaults, **options})
        self.seen: list[list[float]] = []

    def train(self, steps: int, fails_in: int = 0) -> list[list[float]]:
        with self.keeper:
            for step in self.keeper.steps(steps):
                (batch,) = next(self.batches)
                self.packer.waiting.append(batch[0])
                noise = torch.rand(1, generator=self.generator)
                self.model(batch + noise).sum().backward()
                if step == fails_in:
                    raise RuntimeError("Connection reset by peer")
                with self.keeper.commit():
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.seen.append([*batch.reshape(-1).tolist(), noise.item(), float(len(self.packer.waiting))])
        return self.seen


@pytest.mark.parametrize(("fails_in", "lose_at_most"), [(1, 1), (3, 1000), (7, 1), (8, 1000)])
def test_after_a_failure_every_rank_continues_at_its_own_sample(
    monkeypatch: pytest.MonkeyPatch, memory: Path, fails: Fails, fails_in: int, lose_at_most: int
) -> None:
    monkeypatch.delenv("ELAUNCH_MEMORY")
    undisturbed = Job().train(12)
    monkeypatch.setenv("ELAUNCH_MEMORY", str(memory))

    failed = Job(lose_at_most=lose_at_most)
    fails(lambda: failed.train(12, fails_in))
    resumed = Job()

    assert failed.seen + resumed.train(12) == undisturbed


def test_at_another_world_size_it_starts_over_and_the_keeper_reports_it(
    fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(lambda: Job().train(12, 4))
    resumed = Job()
    monkeypatch.setattr("elaunch.trainer.state.rank_objects._world_size", lambda: 2)

    resumed.train(5)

    assert resumed.logged[1] == (
        "the state per rank (per_rank: Batches, GeneratorState, Packer) of all ranks is that of 1 ranks, and does not "
        "fit 2 ranks: it starts over, and samples are repeated or skipped"
    )
    assert resumed.seen[0][-1] == 1


@pytest.mark.parametrize("kind", ["shuffles", "alone", "iterator"])
def test_an_ordinary_data_loader_is_named_at_entry_once(kind: str) -> None:
    job = Job(per_rank=None)
    loader = DataLoader(TensorDataset(torch.zeros(8)))
    iterator = iter(loader) if kind == "iterator" else None
    if kind != "shuffles":
        job.batches = Batches(loader)
        # The loaders of other tests, and the one before.
        del loader
        if iterator is not None:
            del job.batches
        gc.collect()

    with job.keeper:
        pass

    assert len(job.logged) == 1
    assert job.logged[0].startswith("the position of a DataLoader of this program is not kept: ")
    assert "batches = elaunch.trainer.Batches(loader)" in job.logged[0]


@pytest.mark.parametrize("per_rank", [(), None])
def test_a_loader_with_an_order_or_with_per_rank_needs_no_warning(per_rank: object) -> None:
    job = Job(per_rank=per_rank)
    if per_rank is None:
        dataset = TensorDataset(torch.zeros(8))
        sampler = Order(8, seed=0, global_batch=4, micro_batch=2).batches(0, 1)
        job.batches = Batches(DataLoader(dataset, batch_sampler=sampler))
        # The loaders of other tests, and the one before.
        gc.collect()

    with job.keeper:
        pass

    assert job.logged == []


def test_no_state_is_taken_between_a_restore_and_the_first_step() -> None:
    class Loader:
        calls = 0

        def state_dict(self) -> dict[str, Any]:
            self.calls += 1
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    per_rank = RankObjects([loader := Loader()])
    state = per_rank.state_dict()
    per_rank.load_state_dict(state)

    assert (per_rank.state_dict(), loader.calls) == (state, 1)
    per_rank.forget_loaded()
    assert per_rank.state_dict()["states"] == [{"calls": 2}]
