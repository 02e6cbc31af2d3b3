"""A Keeper of one process of a job whose other processes have another role, and no part in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.trainer import Keeper

pytestmark = pytest.mark.usefixtures("memory")


class Server:
    """A parameter server's training, alone in its Keeper."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, generation: int = 0) -> None:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "ELAUNCH_GENERATION": generation}
        for name, number in places.items():
            monkeypatch.setenv(name, str(number))
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, 100.0 * rank)
        self.said: list[str] = []
        options: dict[str, Any] = {"lose_at_most": 1, "per_rank": (), "say": self.said.append, "name": "server"}
        self.keeper = Keeper(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0), **options)

    def train(self, steps: int, fails_in: int = 0) -> float:
        with self.keeper:
            for step in self.keeper.steps(steps):
                if step == fails_in:
                    raise RuntimeError("Connection reset by peer")
                with self.keeper.commit(), torch.no_grad():
                    self.model.weight += 1
        return self.model.weight.item()


def test_two_processes_of_a_node_that_are_alone_keep_their_states_apart(
    monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    for rank, fails_in in ((0, 3), (1, 5)):
        with pytest.raises(RuntimeError, match="reset by peer"):
            Server(monkeypatch, rank).train(8, fails_in)

    # Processes of their own: a program has no two Keepers of one name.
    assert [Server(monkeypatch, rank, generation=1 + rank).train(8) for rank in (0, 1)] == [8, 108]
    assert {path.name.partition(".")[0] for path in memory.iterdir()} == {"server-0", "server-1"}


def test_workers_without_a_process_group_are_refused_since_each_would_train_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    model = nn.Linear(1, 1)

    with (
        pytest.raises(
            ValueError, match=r"2 workers, and this one has no process group: .*init_process_group\(\) before"
        ),
        Keeper(model, torch.optim.SGD(model.parameters())),
    ):
        pass
