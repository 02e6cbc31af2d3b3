"""`--tune-comm` and `tune(model)`: all ranks choose alike, no bit of the training changes, and a restart remembers."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.trainings import CalmTrainings, Forked
from tests.harness import Job, preloading, script
from tests.ranks import Ended, RankForker, Ranks

# A measurement and a training, beside whatever else the machine does.
GENERATION_S = 300.0
PROGRAM = Path(__file__).with_name("tuning_trainer.py")
# 3 MiB of gradients: buckets of 1 MiB are others than those of 25.
STEPS = 20
SHORT = ("--steps", str(STEPS), "--width", "256", "--lr", "3e-4")
FASTER_SMALL = {"1": 0.5, "25": 1.0, "alone": 0.2}
FASTER_LARGE = {"1": 1.0, "25": 0.5, "alone": 0.2}
SMALL, OWN = 1.0, 25.0


class Tuned(Forked):
    """A run of the bundled trainer with `--tune-comm`, whose user's cache folder is its own."""

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
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        words = self.words(*SHORT, "--tune-comm", *options)[1:]
        with Ranks(self._forker, workers, PROGRAM, *words, env=env) as ranks:
            return [ranks.end_of(rank, GENERATION_S) for rank in range(workers)]

    def choices(self, generation: int) -> list[tuple[float, int]]:
        """The bucket sizes that its ranks have chosen, and in how many passes."""
        return [(each["settings"]["bucket_mb"], each["passes"]) for each in self.of("tuned", generation=generation)]


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


@pytest.mark.slow
def test_a_worker_killed_while_tuning_costs_nothing_and_the_restart_tunes_anew(
    tmp_path: Path, forker: RankForker, calm_training: CalmTrainings
) -> None:
    with Tuned(tmp_path / "run", forker, ("tuning-0-0-1",)) as run:
        killed = run.generation(0, 2)
        again = run.generation(1, 2)

    assert run.struck() == ["tuning-0-0-1"]
    assert killed[1].code == -signal.SIGKILL
    assert killed[0].code != 0
    assert run.choices(0) == []
    assert [size for size, _ in run.choices(1)] == [SMALL, SMALL]
    assert [rank.code for rank in again] == [0, 0]
    assert "no choice of an earlier generation is left" in again[0].err
    run.assert_same(calm_training(2, *SHORT, steps=STEPS))


@pytest.mark.slow
def test_with_three_workers_a_killed_run_has_the_bits_of_an_unkilled_one_with_the_same_choice(
    tmp_path: Path, forker: RankForker
) -> None:
    with Tuned(tmp_path / "calm", forker) as calm:
        calm.generation(0, 3)
    with Tuned(tmp_path / "run", forker, ("loss-0-14-1",)) as run:
        run.generation(0, 3)
        run.generation(1, 3)

    assert run.struck() == ["loss-0-14-1"]
    assert [size for size, _ in run.choices(1)] == [SMALL] * 3
    run.assert_complete(lost=0, steps=STEPS)
    run.assert_same(calm)


@pytest.mark.slow
def test_at_another_number_of_workers_a_restart_keeps_the_choice_of_the_run_and_says_so(
    tmp_path: Path, forker: RankForker
) -> None:
    with Tuned(tmp_path / "run", forker, ("loss-0-14-2",)) as run:
        run.generation(0, 3)
        fewer = run.generation(1, 2)

    assert run.choices(1) == [(SMALL, 0), (SMALL, 0)]
    assert "as this run measured with 3 workers; for 2 the next start of the job measures" in fewer[0].err
    assert [rank.code for rank in fewer] == [0, 0]


@pytest.mark.slow
def test_another_run_finds_the_choice_in_the_users_cache_and_a_damaged_file_is_measured_anew(
    tmp_path: Path, forker: RankForker
) -> None:
    with Tuned(tmp_path / "first", forker) as first:
        first.generation(0, 2)
    with Tuned(tmp_path / "second", forker, times=FASTER_LARGE) as second:
        (tmp_path / "first" / "cache").rename(tmp_path / "second" / "cache")
        found = second.generation(0, 2)
        (file,) = (tmp_path / "second" / "cache" / "elaunch" / "tuning").iterdir()
    assert second.choices(0) == [(SMALL, 0), (SMALL, 0)]
    assert str(file) in found[0].err

    # Rank 0 alone would choose small ones, and rank 1 is the slowest with them.
    with Tuned(tmp_path / "third", forker, times={"1": [0.5, 2.0], "alone": 0.2}) as third:
        (tmp_path / "second" / "cache").rename(tmp_path / "third" / "cache")
        (file,) = (tmp_path / "third" / "cache" / "elaunch" / "tuning").iterdir()
        file.write_bytes(file.read_bytes()[:100])
        ended = third.generation(0, 2)
    assert [size for size, _ in third.choices(0)] == [OWN, OWN]
    assert "cannot be used" in ended[0].err
    assert [rank.code for rank in ended] == [0, 0]


@pytest.mark.slow
def test_a_killed_run_with_powersgd_goes_on_with_the_hooks_state_bit_for_bit(
    tmp_path: Path, forker: RankForker
) -> None:
    times = {"powersgd": 0.3, "alone": 0.2}
    options = ("lossy", "--lose-at-most", "4")
    with Tuned(tmp_path / "calm", forker, times=times) as calm:
        calm.generation(0, 2, *options)
    with Tuned(tmp_path / "run", forker, ("loss-0-18-1",), times=times) as run:
        run.generation(0, 2, *options)
        second = run.generation(1, 2, *options)

    assert run.struck() == ["loss-0-18-1"]
    for one, generation in ((calm, 0), (run, 0), (run, 1)):
        assert [each["settings"]["hook"] for each in one.of("tuned", generation=generation)] == ["powersgd"] * 2
    # A dead rank's error feedback is that of the last copy in memory; checkpoints have none.
    assert re.search(r"restored step \d+ from memory", second[0].err)
    assert run.began(1) >= 16
    run.assert_complete(lost=17 - run.began(1), steps=STEPS)
    run.assert_same(calm)


# A model of 1.5 MiB, trained in one process group: as it is, while it is tuned, and with the choice remembered.
SCRIPT = """
import hashlib, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from elaunch.trainer import tune

dist.init_process_group("gloo")
rank = dist.get_rank()


def train(steps, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Dropout(0.1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    said = []
    tuned = tune(model, say=said.append, **options) if options else None
    torch.manual_seed(rank)
    done_at = None
    for step in range(steps):
        for micro in range(1 + rank):
            # Ranks accumulate over different numbers of micro-batches.
            with model.no_sync() if micro < rank else torch.enable_grad():
                model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            # These passes are no steps: one rank alone makes them.
            model.eval()
            model.module(torch.zeros(1, 256))
            model.train()
        if tuned and tuned.is_done and done_at is None:
            done_at = step
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return {"digest": digest, "done_at": done_at, "said": said, "settings": tuned and repr(tuned.settings)}


def join_uneven_inputs():
    model, said = DistributedDataParallel(nn.Linear(256, 256)), []
    tuned = tune(model, say=said.append, about="uneven")
    with model.join():
        for _ in range(3 + rank):
            model(torch.randn(4, 256)).square().mean().backward()
    return {"said": said, "is_done": tuned.is_done, "digest": None, "settings": None, "done_at": None}


steps = int(sys.argv[1])
print(json.dumps([train(steps), train(steps, about="x"), train(steps, about="x"), join_uneven_inputs()]))
"""


def test_a_script_is_tuned_in_its_first_steps_and_trains_the_same_bits(tmp_path: Path, forker: RankForker) -> None:
    program = script(tmp_path, SCRIPT)
    with Ranks(forker, 2, program, "50", env={"XDG_CACHE_HOME": str(tmp_path)}) as ranks:
        one, other = ranks.answers()

    plain, tuned, remembered, joined = one
    assert plain["digest"] == tuned["digest"] == remembered["digest"]
    assert 10 < tuned["done_at"] < 50
    assert remembered["done_at"] == 0
    assert tuned["settings"] == remembered["settings"]
    assert "communication tuned in" in tuned["said"][-1]
    assert "as measured on" in remembered["said"][-1]
    assert joined["is_done"]
    assert joined["said"] == ["the communication is not tuned: the model is used within join()"]
    agreed: list[dict[str, Any]] = other
    assert [each["settings"] for each in agreed] == [each["settings"] for each in one]
    assert [each["done_at"] for each in agreed] == [each["done_at"] for each in one]
    assert [each["said"] for each in agreed] == [[], [], [], []]


# The two lines in a script with a Keeper, under an agent. Rank 1 kills itself once, while the steps are measured.
KEPT = """
import hashlib, os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from elaunch.trainer import Keeper, tune

killed_at, tuned = int(sys.argv[1]), len(sys.argv) > 2
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
if tuned:
    tune(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with Keeper(model, optimizer, per_rank=()) as keeper:
    for step in keeper.steps(90):
        model(torch.randn(4, 256)).square().mean().backward()
        with keeper.commit():
            optimizer.step()
            optimizer.zero_grad()
        if step == killed_at and dist.get_rank() == 1 and os.environ["ELAUNCH_GENERATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"rank {dist.get_rank()} ended with {digest}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_with_a_keeper_loses_no_step_if_a_worker_is_killed_while_its_steps_are_measured(
    tmp_path: Path,
) -> None:
    program = script(tmp_path, KEPT)

    def digests(*words: str) -> tuple[set[str], str]:
        launch = (*preloading("elaunch.trainer.keeper.keeper"), "--nproc-per-node", "2", str(program), *words)
        with Job(tmp_path, *launch, env={"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}) as job:
            assert job.wait() == 0, job.output
        return set(re.findall(r"ended with (\w+)", job.output)), job.output

    calm, _ = digests("0")
    killed, output = digests("12", "tuned")

    assert len(calm) == 1
    assert killed == calm
    assert "was killed by SIGKILL" in output
    assert "restored step 12 from memory" in output
    assert "no choice of an earlier generation is left" in output
    # The second generation had 78 steps left, more than it needs.
    assert "communication tuned in" in output
