"""The Keeper in loops of other libraries, with the real ones: killed, and compared bit by bit with a run left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Job, require

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs"
RANKS = 2
# In the middle of an epoch, in a commit at an epoch's end, and in a commit that a survivor completes.
PLAIN: list[list[Any]] = [[1, 13, "forward"], [0, 20, "commit"], [1, 21, "forward"], [1, 25, "commit"]]
# 10 batches make 4 steps of 3, or 5 of 2: the last may have one batch.
THREES: list[list[Any]] = [[1, 6, "forward"], [0, 10, "commit"], [1, 11, "forward"]]
TWOS: list[list[Any]] = [[1, 6, "forward"], [0, 9, "commit"], [1, 12, "forward"]]


each_library = pytest.mark.parametrize("library", ["lightning", "transformers", "accelerate", "fabric"])


def ran(library: str, folder: Path, kills: list[list[Any]], options: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank ended with."""
    require("lightning" if library == "fabric" else library)
    folder.mkdir()
    program = PROGRAMS / f"with_{library}.py"
    arguments = ["--nproc-per-node", str(RANKS), "--max-restarts", "9"]
    arguments += [str(program), str(folder), json.dumps(kills), json.dumps(options)]
    with Job(folder, *arguments, env={"OMP_NUM_THREADS": "1"}) as job:
        assert job.wait(600) == 0, job.output
    assert job.output.count("was killed by SIGKILL") == len(kills), job.output
    assert job.output.count("0 steps are repeated") == len(kills), job.output
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def assert_kills_change_no_bit(library: str, folder: Path, kills: list[list[Any]], options: dict[str, Any]) -> None:
    calm = ran(library, folder / "calm", [], options)
    killed = ran(library, folder / "killed", kills, options)

    for undisturbed, other in zip(calm, killed, strict=True):
        assert other["step"] == undisturbed["step"]
        # transformers logs the difference of two sums, which have begun elsewhere.
        assert other["losses"] == {
            step: pytest.approx(undisturbed["losses"][step], rel=1e-12) for step in other["losses"]
        }
        assert other["losses"]
        assert other["digest"] == undisturbed["digest"]


@each_library
@pytest.mark.parametrize("accumulates", [False, True])
def test_kills_change_no_bit(tmp_path: Path, library: str, accumulates: bool) -> None:
    options, kills = {}, PLAIN
    if accumulates:
        # transformers needs a number that divides the batches of an epoch.
        each, kills = (2, TWOS) if library == "transformers" else (3, THREES)
        if library == "lightning":
            # Its loops are also restored between an evaluation at the end of an epoch and the next epoch.
            kills = [*THREES[:1], [1, 9, "forward"], *THREES[1:]]
        options = {"accumulate": each, "evaluates": True, "workers": 1}

    assert_kills_change_no_bit(library, tmp_path, kills, options)


@each_library
def test_a_kill_in_an_evaluation_changes_no_bit(tmp_path: Path, library: str) -> None:
    """They are at the end of an epoch of 10 steps, in transformers after each 4 steps."""
    first = 4 if library == "transformers" else 10

    kills = [[1, first, "evaluation"], [0, 20, "evaluation"]]
    assert_kills_change_no_bit(library, tmp_path, kills, {"evaluates": True})


@each_library
def test_workers_that_stay_draw_as_they_would_have(tmp_path: Path, library: str) -> None:
    assert_kills_change_no_bit(library, tmp_path, PLAIN, {"workers": 1, "persistent": True})


@each_library
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_and_noise_do_not_depend_on_what_the_training_draws(tmp_path: Path, library: str, workers: int) -> None:
    """Two kills within one epoch; the libraries load batches ahead of the steps."""
    options = {"mixed": True, "workers": workers, "persistent": bool(workers)}

    kills = [[1, 1, "forward"], [1, 13, "forward"], [0, 17, "commit"], [1, 21, "forward"]]
    assert_kills_change_no_bit(library, tmp_path, kills, options)


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_comes_back_at_the_right_sample(tmp_path: Path, stateful: bool, workers: int) -> None:
    assert_kills_change_no_bit("torchdata", tmp_path, PLAIN, {"stateful": stateful, "workers": workers})


def test_lightning_accumulates_as_its_callback_has_set_it_at_the_beginning_of_the_epoch(tmp_path: Path) -> None:
    # Steps of 1 batch in the first epoch, then of 2.
    kills = [[1, 13, "forward"], [0, 14, "commit"], [1, 17, "forward"]]
    assert_kills_change_no_bit("lightning", tmp_path, kills, {"callback": "accumulation"})


@pytest.mark.parametrize("kills", [[[1, 11, "forward"]], [[1, 10, "evaluation"], [0, 10, "validated"]]])
def test_lightnings_early_stopping_counts_each_evaluation_once(tmp_path: Path, kills: list[list[Any]]) -> None:
    """One that was before the failure, one that was cut off, and one whose count was not kept yet."""
    assert_kills_change_no_bit("lightning", tmp_path, kills, {"evaluates": True, "callback": "stopping"})


def test_buffers_that_each_rank_has_for_itself_with_lightnings_manual_optimization_stay_its_own(tmp_path: Path) -> None:
    # BatchNorm's.
    assert_kills_change_no_bit("lightning", tmp_path, PLAIN, {"manual": True})


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({"callback": "swa"}, "StochasticWeightAveraging keeps averaged weights"),
        ({"callback": "average"}, "WeightAveraging has a state in on_load_checkpoint"),
        ({"callback": "finetuning"}, "BackboneFinetuning adds parameter groups"),
        ({"callback": "rate"}, "LearningRateFinder trains for a trial"),
        ({"reload": 1}, "Trainer(reload_dataloaders_every_n_epochs=1) makes loaders at other epochs"),
        ({"cycle": True}, "one of the training's loaders has 5 batches, and an epoch 10"),
        ({"clock": True}, "DistributedSamplerWrapper draws its order from something that no restart can restore"),
    ],
)
def test_what_no_restart_of_lightning_restores_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], logged: str
) -> None:
    require("lightning")
    program = str(PROGRAMS / "with_lightning.py")
    words = ["--nproc-per-node", "2", program, str(tmp_path), "[]", json.dumps(options)]
    with Job(tmp_path, *words, env={"OMP_NUM_THREADS": "1"}) as job:
        assert job.wait(600) == 1, job.output

    assert f"ValueError: {logged}" in job.output
