"""The bundled trainer as whole processes: alone, by hand, and under torchrun (under elaunch: tests/faults)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaunch.trainer.checkpoint.checkpoints import marks
from tests.harness import slow, wait_for

SHAPE = ["--steps", "40", "--global-batch", "6", "--checkpoint-every", "1", "--layers", "2", "--width", "32"]
SHAPE += ["--heads", "2", "--context", "16", "--dropout", "0.1", "--seed", "5", "--micro-batch", "1"]
SHORT = [*SHAPE, "--steps", "6"]
TRAINER = ["-m", "elaunch.trainer"]
TORCHRUN = ["-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.1", "--nproc-per-node"]
# Without the switch torchrun 2.13 reads the last group's keys again after a restart, and hangs.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Only a hang lasts so long.
DEADLINE_S = 240

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Python in an empty folder; what is left of it and its children at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*argv: str, **env: str) -> subprocess.Popen[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ELAUNCH_", "TORCHELASTIC_", "PET_"))}
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=tmp_path,
            env={**inherited, **ENVIRONMENT, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            for child in (*psutil.Process(process.pid).children(recursive=True), process):
                child.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def result(out: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((out / "result.json").read_text())
    return answer


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]


def steps_done(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def losses(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(out)]


def worker(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return next(child for child in children if child.environ().get("RANK") == str(rank))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "victim"), [(2, 1), (3, 0)])
def test_a_run_with_a_killed_worker_ends_bit_for_bit_like_the_unfailed_one(
    start: Start, tmp_path: Path, workers: int, victim: int
) -> None:
    shape = [*SHAPE, "--steps", "16"]
    calm = start(*TORCHRUN, str(workers), *TRAINER, "--out", "calm", *shape)
    assert finish(calm)[0] == 0

    stormy = start(*TORCHRUN, str(workers), *TRAINER, "--out", "stormy", *shape)
    wait_for(lambda: steps_done(tmp_path / "stormy") >= 5, "five steps")
    worker(stormy, victim).send_signal(signal.SIGKILL)
    code, _, errors = finish(stormy)

    assert code == 0, errors
    assert "resuming after step" in errors
    a, b = result(tmp_path / "calm"), result(tmp_path / "stormy")
    assert (a["restarts"], b["restarts"]) == (0, 1)
    assert b["params_sha256"] == a["params_sha256"]
    assert losses(tmp_path / "stormy") == losses(tmp_path / "calm")
    assert [line["step"] for line in lines(tmp_path / "stormy")] == list(range(1, 17))
    assert {line["generation"] for line in lines(tmp_path / "stormy")} == {0, 1}


def test_a_process_that_nobody_launched_trains_alone_and_says_little(start: Start, tmp_path: Path) -> None:
    code, out, errors = finish(start(*TRAINER, "--out", "run", *SHAPE))

    assert code == 0, errors
    assert "a sample of what it writes" in out
    assert "\r" not in errors
    said = errors.splitlines()
    assert said[0].startswith("training for 40 steps")
    assert sum(line.startswith("step ") for line in said) == 11
    assert "held-out loss" in said[-1]
    assert len(said) == 13
    answer = result(tmp_path / "run")
    assert (answer["steps"], answer["restarts"], answer["world_size"]) == (40, 0, 1)
    assert answer["loss"] == lines(tmp_path / "run")[-1]["loss"] < lines(tmp_path / "run")[0]["loss"]
    keys = {"step", "loss", "tokens", "seconds", "world_size", "generation", "steps_lost"}
    assert set(lines(tmp_path / "run")[0]) == keys
    assert lines(tmp_path / "run")[0]["tokens"] == 6 * 16
    assert [mark.step for mark in marks(tmp_path / "run" / "checkpoints")] == [38, 39, 40]

    before = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    code, out, errors = finish(start(*TRAINER, "--out", "run", *SHAPE))

    assert (code, out) == (0, "")
    assert errors == "run is complete: 40 steps; remove it or give another --out to train again\n"
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == before


def test_no_thread_of_the_process_group_outlives_the_training(start: Start) -> None:
    # Such a thread aborts, or hangs, the interpreter that ends under it (pytorch #190489).
    code = (
        "import sys; from pathlib import Path; from elaunch.trainer.__main__ import main; main(sys.argv[1:]); "
        "print('threads:', [t for p in Path('/proc/self/task').iterdir() if 'gloo' in (t := (p / 'comm').read_text())])"
    )

    _, out, errors = finish(start("-c", code, "--out", "run", *SHORT))

    assert out.endswith("threads: []\n"), errors


@pytest.mark.slow
def test_a_run_without_out_is_found_again_by_the_same_command(start: Start, tmp_path: Path) -> None:
    assert finish(start(*TRAINER, *SHORT))[0] == 0

    again = finish(start(*TRAINER, *SHORT))

    (run,) = (tmp_path / "runs").iterdir()
    assert again[2].startswith(f"runs/{run.name} is complete")


def test_the_trainer_does_without_numpy(start: Start, tmp_path: Path) -> None:
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "numpy.py").write_text("raise ModuleNotFoundError('no numpy', name='numpy')")

    code, _, errors = finish(start(*TRAINER, "--out", "run", *SHORT, PYTHONPATH=str(tmp_path / "absent")))

    assert code == 0, errors
    assert "umPy" not in errors


@pytest.mark.parametrize(
    "options",
    [
        ["--global-batch", "7", "--micro-batch", "3", "--width", "33"],
        ["--data", "nowhere"],
        ["--data", "empty"],
        ["--lr", "fast"],
    ],
)
def test_a_wrong_request_is_one_sentence_and_exit_code_2(start: Start, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "empty").mkdir()

    code, out, errors = finish(start(*TRAINER, *options))

    assert (code, out) == (2, "")
    assert errors.count("\n") == 1
    assert options[-1] in errors
    assert not (tmp_path / "runs").exists()


def test_of_several_workers_only_rank_0_refuses_and_exits_first(start: Start) -> None:
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    wrong = ("--global-batch", "7", "--micro-batch", "3")
    second = start(*TRAINER, *wrong, **environ, RANK="1")
    first = start(*TRAINER, *wrong, **environ, RANK="0")

    said = finish(first)

    assert second.poll() is None
    assert said[0] == 2
    assert said[2].startswith("--global-batch (7) is not divisible by --micro-batch (3)")
    assert finish(second) == (2, "", "")


@pytest.mark.parametrize(("signum", "told"), [(signal.SIGTERM, 1), slow(signal.SIGINT, 0)])
def test_a_signal_to_one_worker_stops_all_at_the_same_step_with_a_checkpoint(
    start: Start, tmp_path: Path, signum: signal.Signals, told: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    endless = [*SHAPE, "--steps", "1000000", "--checkpoint-every", "1000000"]
    ranks = [start(*TRAINER, "--out", "run", *endless, **environ, RANK=str(rank)) for rank in range(2)]
    wait_for(lambda: steps_done(tmp_path / "run") >= 3, "three steps")

    ranks[told].send_signal(signum)
    ended = [finish(process) for process in ranks]

    assert [code for code, _, _ in ended] == [128 + signum, 128 + signum]
    stopped_at = lines(tmp_path / "run")[-1]["step"]
    assert marks(tmp_path / "run" / "checkpoints")[-1].step == stopped_at >= 3
    why = "interrupted" if signum == signal.SIGINT else "told to leave"
    assert f"stopped after step {stopped_at}, as it was {why}; the same command goes on from there" in ended[0][2]
    assert "Traceback" not in ended[0][2] + ended[1][2]
    assert ended[1][2] == ""
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_a_corrupt_newest_checkpoint_costs_one_step_and_not_the_result(start: Start, tmp_path: Path) -> None:
    assert finish(start(*TRAINER, "--out", "calm", *SHORT))[0] == 0
    assert finish(start(*TRAINER, "--out", "run", *SHORT))[0] == 0
    (tmp_path / "run" / "result.json").unlink()
    newest = tmp_path / "run" / "checkpoints" / marks(tmp_path / "run" / "checkpoints")[-1].folder_name
    os.truncate(newest / "__0_0.distcp", 1000)

    code, _, errors = finish(start(*TRAINER, "--out", "run", *SHORT))

    assert code == 0
    assert f"skipping run/checkpoints/{newest.name}: it is torn or corrupt" in errors
    assert "resuming after step 5 of 6" in errors
    assert result(tmp_path / "run") == {**result(tmp_path / "calm"), "steps_lost": 1, "steps_repeated": 1}
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")
