"""Functions as jobs: `elaunch.launch(config, function)(*args)`, with real workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import elaunch
from elaunch.launcher.errors import UsageError
from tests.e2e import called
from tests.faults.processes import is_alive
from tests.harness import DEADLINE_S, REPOSITORY, environment, free_ports, script, slow, wait_for

pytestmark = pytest.mark.usefixtures("without_torch")
WAITS = """
import os, sys, threading, time
from pathlib import Path
from elaunch import LaunchConfig, launch

def train(folder):
    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    call = launch(LaunchConfig(1, 1, 2, max_restarts=0, shutdown_timeout=5), train)
    if sys.argv[2] == "main":
        call(sys.argv[1])
    else:
        thread = threading.Thread(target=call, args=sys.argv[1:2])
        thread.start()
        thread.join()
"""
ONE_OF_TWO_NODES = """
import os, sys
from elaunch import LaunchConfig, launch

def train():
    return os.environ["RANK"], os.environ["GROUP_RANK"], os.environ["WORLD_SIZE"]

if __name__ == "__main__":
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": sys.argv[1], "run_id": "two"}
    for rank, (own, node, size) in launch(LaunchConfig(2, 2, 1, **where), train)().items():
        print("found", rank, own, node, size)
"""


def config(workers: int = 2, **fields: Any) -> elaunch.LaunchConfig:
    # Preload a light module in place of torch: the fork server does the same, without the second of importing torch.
    light = ("--preload", "json")
    return elaunch.LaunchConfig(1, 1, workers, **{"max_restarts": 0, "run_id": "functions", "options": light, **fields})


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files of each test go to a folder, in which none is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name in [name for name in os.environ if name not in environment()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(REPOSITORY)]))
    yield
    assert list(temporary.iterdir()) == []


def finished(program: Path | str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(program), *args], capture_output=True, text=True, timeout=300, **options)


def test_each_rank_gets_the_arguments_and_what_it_returns_comes_back_by_rank() -> None:
    found = elaunch.launch(config(), called.place)("a", {"b": [1]}, lr=0.05, self=2)

    assert sorted(found) == [0, 1]
    assert [(rank, size, args) for rank, size, _, args in found.values()] == [
        (0, "2", ("a", {"b": [1]}, ("lr", 0.05), ("self", 2))),
        (1, "2", ("a", {"b": [1]}, ("lr", 0.05), ("self", 2))),
    ]
    assert len({pid for _, _, pid, _ in found.values()} | {os.getpid()}) == 3


def test_an_exception_comes_back_with_its_traceback_and_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(elaunch.ChildFailedError) as raised:
        elaunch.launch(config(), called.raise_on_rank_1)("thanks")

    error = raised.value
    rank, failure = error.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode, error.exit_code) == (1, 1, 1, 1)
    assert failure.sentence.startswith("rank 1")
    assert "raised ValueError: no thanks" in failure.sentence
    # The last frame is the function's own: ours do not stand below it.
    assert 'in raise_on_rank_1\n    raise ValueError(f"no {word}")' in failure.traceback
    assert "raise_on_rank_1 FAILED" in str(error)
    assert failure.traceback.splitlines()[-1].strip() in str(error)
    # The program shows the exception where it handles it, or where Python prints it.
    assert "Root Cause" not in capfd.readouterr().err


def test_a_killed_worker_is_restarted_and_the_values_are_those_of_the_last_generation() -> None:
    assert elaunch.launch(config(max_restarts=2), called.die_once)() == {0: "1", 1: "1"}


def test_a_command_runs_on_each_rank() -> None:
    with pytest.raises(elaunch.ChildFailedError) as raised:
        elaunch.launch(config(), "sh")("-c", "exit $((RANK * 3))")

    assert {rank: failure.exitcode for rank, failure in raised.value.failures.items()} == {1: 3}
    assert elaunch.launch(config(), "true")() == {}
    with pytest.raises(UsageError, match=r'the call names lr; give text, as in \("--lr", "…"\)'):
        elaunch.launch(config(), "sh")("-c", lr=0.05)


@contextmanager
def waiting(folder: Path, thread: str = "main") -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A program whose two workers wait, with all processes below it."""
    program = script(folder, WAITS, "program.py")
    with subprocess.Popen(
        [sys.executable, str(program), str(folder), thread], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            wait_for(lambda: len([path for path in folder.glob("pid-*") if path.read_text()]) == 2, "two workers")
            below = psutil.Process(process.pid).children(recursive=True)
            assert {int(path.read_text()) for path in folder.glob("pid-*")} <= {each.pid for each in below}
            yield process, below
        finally:
            process.kill()


def all_gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


@pytest.mark.parametrize("thread", ["main", slow("another")])
def test_ctrl_c_ends_the_job_and_is_a_keyboard_interrupt(tmp_path: Path, thread: str) -> None:
    with waiting(tmp_path, thread) as (process, below):
        # A terminal signals the whole process group.
        os.killpg(process.pid, signal.SIGINT)

        stderr = process.communicate(timeout=DEADLINE_S)[1]

        # As Python ends after a KeyboardInterrupt, and not before the workers have ended.
        assert process.returncode == -signal.SIGINT
        assert all_gone([each for each in below if each.pid in pids(tmp_path)])
        assert "KeyboardInterrupt" in stderr
        # It reached the job, not only the program, whose end the job would hear of by SIGTERM. A second one would kill
        # the workers at once.
        assert "SIGINT: stopping 2 workers" in stderr
        assert "SIGINT again" not in stderr
        wait_for(lambda: all_gone(below), "the job's processes are gone")


def test_a_killed_program_takes_the_job_with_it(tmp_path: Path) -> None:
    with waiting(tmp_path) as (process, below):
        process.kill()

        wait_for(lambda: all_gone(below), "the job's processes are gone")


def pids(folder: Path) -> set[int]:
    return {int(path.read_text()) for path in folder.glob("pid-*")}


def test_several_nodes_meet_and_each_has_the_values_of_its_own_ranks(tmp_path: Path) -> None:
    program, (port,) = script(tmp_path, ONE_OF_TWO_NODES), free_ports(1)
    command = [sys.executable, str(program), f"localhost:{port}"]
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    printed = [node.communicate(timeout=180)[0].split() for node in nodes]

    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(printed) == [["found", "0", "0", "0", "2"], ["found", "1", "1", "1", "2"]]


def test_the_program_of_the_page_prints_its_documented_output(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "functions.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]

    done = finished(script(tmp_path, program))

    assert done.stdout == program.rpartition("# ")[2], done.stderr
