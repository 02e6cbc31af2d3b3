"""The bundled trainer as whole processes: alone, and started by hand (under elaunch: tests/faults)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaunch.trainer.checkpoint.storage import marks
from tests.harness import free_ports, wait_for

SHAPE = ["--steps", "40", "--global-batch", "6", "--checkpoint-every", "1", "--layers", "2", "--width", "32"]
SHAPE += ["--heads", "2", "--context", "16", "--dropout", "0.1", "--seed", "5", "--micro-batch", "1"]
TRAINER = ["-m", "elaunch.trainer"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# Only a hang lasts so long.
DEADLINE_S = 240

Start = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Start a Python in a folder. Kill what is left of it and its children at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*argv: str, **env: str) -> subprocess.Popen[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ELAUNCH_", "TORCHELASTIC_", "PET_"))}
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=folder,
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
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Python in an empty folder."""
    with starting(tmp_path) as begin:
        yield begin


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


# Runs `python -m elaunch.trainer` twice in one process. After each run it prints gloo's threads and the exit code, and
# marks the end of the run on stderr.
ALONE = """
import runpy, sys
from pathlib import Path

for turn in range(2):
    try:
        runpy.run_module("elaunch.trainer", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        threads = [(path / "comm").read_text() for path in Path("/proc/self/task").iterdir()]
        print("gloo's threads:", [name for name in threads if "gloo" in name])
        print("exit code:", end.code, flush=True)
        print("---", file=sys.stderr, flush=True)
        Path(f"result-{turn}").write_text(str(Path("run/result.json").stat().st_mtime_ns))
"""


@dataclass(frozen=True)
class Alone:
    """The output of a process without a launcher and without numpy. It trained `steps` steps in `folder`, and then was
    asked for the same again."""

    folder: Path
    steps: int
    out: str
    errors: str
    errors_again: str


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder, steps = tmp_path_factory.mktemp("alone"), 20
    (folder / "absent").mkdir()
    (folder / "absent" / "numpy.py").write_text("raise ModuleNotFoundError('no numpy', name='numpy')")
    with starting(folder) as start:
        words = ("--out", "run", *SHAPE, "--steps", str(steps))
        code, out, errors = finish(start("-c", ALONE, *words, PYTHONPATH=str(folder / "absent")))
    assert code == 0, errors
    first, again, _ = errors.split("---\n")
    return Alone(folder, steps, out, first, again)


@pytest.mark.slow
def test_a_process_without_a_launcher_trains_alone_and_logs_little(alone: Alone) -> None:
    run = alone.folder / "run"

    assert "exit code: 0\n" in alone.out
    assert "\r" not in alone.errors
    logged = alone.errors.splitlines()
    assert logged[0].startswith(f"training for {alone.steps} steps")
    assert sum(line.startswith("step ") for line in logged) == 11
    assert "held-out loss" in logged[-1]
    # A disk that is slow at that moment may cost one sentence more.
    assert len([line for line in logged if "checkpoint" not in line]) == 13, logged
    answer = result(run)
    assert (answer["steps"], answer["restarts"], answer["world_size"]) == (alone.steps, 0, 1)
    assert answer["loss"] == lines(run)[-1]["loss"] < lines(run)[0]["loss"]
    keys = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "seconds", "world_size"}
    keys |= {"generation", "at", "steps_lost"}
    assert set(lines(run)[0]) == keys
    assert lines(run)[0]["tokens"] == 6 * 16
    assert [mark.step for mark in marks(run / "checkpoints")] == [alone.steps - 2, alone.steps - 1, alone.steps]


@pytest.mark.slow
def test_a_run_that_is_complete_is_not_trained_again(alone: Alone) -> None:
    logged = f"run is complete: {alone.steps} steps; remove it or give another --out to train again\n"

    assert alone.errors_again == logged
    assert alone.out.endswith("exit code: 0\ngloo's threads: []\nexit code: 0\n")
    assert (alone.folder / "result-0").read_text() == (alone.folder / "result-1").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "signalled"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_signal_to_one_worker_stops_all_at_the_same_step_with_a_checkpoint(
    start: Start, tmp_path: Path, signum: signal.Signals, signalled: int
) -> None:
    port = str(free_ports(1)[0])
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    endless = [*SHAPE, "--steps", "1000000", "--checkpoint-every", "1000000"]
    ranks = [start(*TRAINER, "--out", "run", *endless, **environ, RANK=str(rank)) for rank in range(2)]
    wait_for(lambda: steps_done(tmp_path / "run") >= 3, "three steps")

    ranks[signalled].send_signal(signum)
    ended = [finish(process) for process in ranks]

    assert [code for code, _, _ in ended] == [128 + signum, 128 + signum]
    stopped_at = lines(tmp_path / "run")[-1]["step"]
    assert marks(tmp_path / "run" / "checkpoints")[-1].step == stopped_at >= 3
    why = "because it was interrupted" if signum == signal.SIGINT else "on a request to leave"
    assert f"stopped after step {stopped_at}, {why}; the same command continues from there" in ended[0][2]
    assert "Traceback" not in ended[0][2] + ended[1][2]
    assert ended[1][2] == ""
    assert not (tmp_path / "run" / "result.json").exists()
