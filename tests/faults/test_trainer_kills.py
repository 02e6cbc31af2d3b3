"""The bundled trainer under a random killer ends where the run that never failed ends, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaunch.trainer.ledger.ledger import audit_folder
from tests.harness import Job, wait_for

SHAPE = ["--steps", "60", "--global-batch", "6", "--checkpoint-every", "1", "--layers", "1", "--width", "16"]
SHAPE += ["--heads", "2", "--context", "16", "--dropout", "0.1", "--seed", "5", "--micro-batch", "1", "--ledger"]


def train(folder: Path, out: str, workers: int, *options: str) -> Job:
    return Job(folder, *options, "--nproc-per-node", str(workers), "-m", "elaunch.trainer", "--out", out, *SHAPE)


def result(out: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((out / "result.json").read_text())
    return answer


def steps(out: Path) -> int:
    """The number of steps in metrics.jsonl now. A torn last line does not count."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def workers_of(job: Job) -> list[psutil.Process]:
    """The trainer's processes of the running generation. A fork server that just starts looks like one of them."""
    found = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        try:
            is_trainer = "elaunch.trainer" in process.cmdline() and process.ppid() != job.process.pid
            if is_trainer and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kills"), [(2, 20), (3, 5)])
def test_random_kills_end_with_the_parameters_and_losses_of_the_unfailed_run(
    tmp_path: Path, workers: int, kills: int
) -> None:
    seed = int(os.environ.get("ELAUNCH_TEST_SEED", random.randrange(1 << 30)))
    print(f"ELAUNCH_TEST_SEED={seed}")
    dice = random.Random(seed)
    with train(tmp_path, "calm", workers) as job:
        assert job.wait() == 0, job.output

    with train(tmp_path, "stormy", workers, "--max-restarts", str(kills)) as job:
        for generation in range(kills):
            job.wait_for_output(rf"^elaunch: generation {generation}:")
            # Some kills come right at the start, while the group forms or restores. Most come during the training.
            goal = steps(tmp_path / "stormy") + dice.choice([0, 0, 1, 2, 3])
            goal = min(goal, 58)
            wait_for(lambda goal=goal: steps(tmp_path / "stormy") >= goal, f"step {goal}")  # type: ignore[misc]
            victim = dice.choice(wait_for(lambda: workers_of(job), "a worker to kill"))
            os.kill(victim.pid, signal.SIGKILL)
            job.wait_for_output(rf"pid {victim.pid}\) was killed by SIGKILL in generation {generation}")
        assert job.wait() == 0, job.output

    calm, stormy = result(tmp_path / "calm"), result(tmp_path / "stormy")
    assert stormy["restarts"] == kills
    assert calm["restarts"] == 0
    # Each time the one or two surviving workers had the whole state.
    assert (stormy["steps_lost"], stormy["steps_repeated"], stormy["samples_seen"]) == (0, 0, 60 * 6)
    assert stormy["params_sha256"] == calm["params_sha256"]
    assert losses(tmp_path / "stormy") == losses(tmp_path / "calm")
    assert audit_folder(tmp_path / "stormy" / "ledger", steps=60).text == stormy["ledger"]
    assert stormy["ledger"].startswith("exactly once: steps 1 to 60 in ")


def losses(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]
