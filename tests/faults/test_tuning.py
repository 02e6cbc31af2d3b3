"""`--tune-comm` and `tune(model, warm_up)`: ranks choose alike, no bit of the training changes, restarts remember."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.trainings import CalmTrainings, Forked
from tests.harness import script
from tests.ranks import Ended, RankForker, Ranks

# A measurement and a training, beside whatever else the machine does.
GENERATION_S = 300.0
PROGRAM = Path(__file__).with_name("tuning_trainer.py")
# 3 MiB of gradients: buckets of 1 MiB are others than those of 25.
STEPS = 20
SHORT = ("--steps", str(STEPS), "--width", "256", "--lr", "3e-4")
FASTER_SMALL = {"1": 0.5, "25": 1.0}
FASTER_LARGE = {"1": 1.0, "25": 0.5}
SMALL = 1.0


class Tuned(Forked):
    """A run of the bundled trainer with `--tune-comm`."""

    def __init__(
        self, folder: Path, forker: RankForker, asks: tuple[str, ...] = (), times: dict[str, Any] | None = None
    ) -> None:
        super().__init__(folder, forker, asks)
        self.set_times(times or FASTER_SMALL)

    def set_times(self, times: dict[str, Any]) -> None:
        (self.folder / "times").write_text(json.dumps(times))

    def generation(self, number: int, workers: int, *options: str) -> list[Ended]:
        env = {
            "ELAUNCH_GENERATION": str(number),
            "ELAUNCH_MEMORY": self._memory.name,
        }
        words = self.words(*SHORT, "--tune-comm", *options)[1:]
        with Ranks(self._forker, workers, PROGRAM, *words, env=env) as ranks:
            return [ranks.end_of(rank, GENERATION_S) for rank in range(workers)]

    def choices(self, generation: int) -> list[tuple[float, int]]:
        """The bucket sizes that its ranks have chosen, and in how many passes."""
        return [(each["size"], each["passes"]) for each in self.of("tuned", generation=generation)]


@pytest.mark.slow
def test_all_ranks_choose_alike_a_kill_costs_no_step_and_the_restart_uses_the_choice(
    tmp_path: Path, forker: RankForker, calm_training: CalmTrainings
) -> None:
    with Tuned(tmp_path / "run", forker, ("loss-0-14-1",)) as run:
        first = run.generation(0, 2)
        # If the second generation measured, it would choose otherwise.
        run.set_times(FASTER_LARGE)
        second = run.generation(1, 2)

    assert run.struck() == ["loss-0-14-1"]
    assert first[1].code == -signal.SIGKILL
    assert [rank.code for rank in second] == [0, 0]
    assert [size for size, _ in run.choices(0)] == [SMALL, SMALL]
    assert all(passes > 20 for _, passes in run.choices(0))
    assert run.choices(1) == [(SMALL, 0), (SMALL, 0)]
    assert "2.00 times as fast" in first[0].err
    assert "tuned" not in first[1].err
    run.assert_complete(lost=0, steps=STEPS)
    # Two summands have one order: with any buckets the result is that of a run without tuning, bit for bit.
    run.assert_same(calm_training(2, *SHORT, steps=STEPS))


# A model of 1.5 MiB, trained in one process group: as it is, tuned, and with the choice remembered.
SCRIPT = """
import hashlib, json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from elaunch.trainer import tune

dist.init_process_group("gloo")
rank = dist.get_rank()


def train(folder=None):
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Dropout(0.1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logged, size = [], None
    torch.manual_seed(rank)
    if folder:
        warm_up = lambda: model(torch.randn(4, 256)).square().mean().backward()
        size = tune(model, warm_up, folder=Path(folder), say=logged.append).bucket_mb
    for step in range(4):
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return {"digest": digest, "logged": logged, "size": size}


print(json.dumps([train(), train(sys.argv[1]), train(sys.argv[1])]))
"""


def test_a_script_is_tuned_before_its_first_step_and_trains_the_same_bits(tmp_path: Path, forker: RankForker) -> None:
    program = script(tmp_path, SCRIPT)
    with Ranks(forker, 2, program, str(tmp_path / "tuning")) as ranks:
        one, other = ranks.answers()

    plain, tuned, remembered = one
    assert plain["digest"] == tuned["digest"] == remembered["digest"]
    assert tuned["size"] == remembered["size"]
    assert "communication tuned in" in tuned["logged"][-1]
    assert "as measured before" in remembered["logged"][-1]
    agreed: list[dict[str, Any]] = other
    assert [each["size"] for each in agreed] == [each["size"] for each in one]
    assert [each["logged"] for each in agreed] == [[], [], []]
