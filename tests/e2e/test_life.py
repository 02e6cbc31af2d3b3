"""A job from its start to its end: all-reduce, restart, plain launch, and every way to name the program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch import __version__
from tests.harness import COMMAND, Job, environment, finished, records, script, slow

WORLDS = (slow(1), 2, slow(4), 8)
# A light module in place of torch: the same way through the fork server, without the second that torch takes.
LIGHT = ("--preload", "json")

ALL_REDUCE = """
import json, os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
names = ("ELAUNCH_GENERATION", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
said = {name: os.environ[name] for name in names}
print("reduced", json.dumps({"rank": dist.get_rank(), "total": int(total), "pid": os.getpid(), **said}))
dist.barrier()
if "kill" in sys.argv and said["ELAUNCH_GENERATION"] == "0":
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
dist.destroy_process_group()
"""

ONE_FAILS = """
import os, signal, sys

if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    sys.exit(3)
while True:
    signal.pause()
"""

SAY_ARGUMENTS = """
import json, os, sys

print("argv", json.dumps({"argv": sys.argv, "name": __name__, "rank": os.environ["RANK"]}))
"""


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> int:
    """The number of workers."""
    return int(request.param)


@pytest.fixture(scope="module")
def reduced(world: int, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job in which nothing fails."""
    folder = tmp_path_factory.mktemp("reduced")
    script(folder, ALL_REDUCE)

    return finished(folder, "--nproc-per-node", str(world), "train.py")


@pytest.fixture(scope="module")
def restarted(world: int, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job whose last worker is killed after an all-reduce, while the others wait for it in the next one."""
    folder = tmp_path_factory.mktemp("restarted")
    script(folder, ALL_REDUCE)

    return finished(folder, "--nproc-per-node", str(world), "--max-restarts", "1", "train.py", "kill")


@pytest.fixture(scope="module")
def plain(world: int, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A plain launch whose last worker exits with 3, while the others would wait for ever."""
    folder = tmp_path_factory.mktemp("plain")
    script(folder, ONE_FAILS)

    return finished(folder, *LIGHT, "--nproc-per-node", str(world), "--max-restarts", "0", "train.py")


class TestAllReduce:
    def test_every_rank_gets_the_sum_over_all_ranks(self, reduced: Job, world: int) -> None:
        said = records(reduced, "reduced")

        assert sorted(worker["rank"] for worker in said) == list(range(world)), reduced.output
        assert {worker["total"] for worker in said} == {world * (world + 1) // 2}

    def test_a_job_whose_workers_all_exit_with_0_exits_with_0(self, reduced: Job) -> None:
        assert reduced.code == 0, reduced.output
        assert "FAILED" not in reduced.output

    def test_a_job_that_does_not_fail_has_one_generation(self, reduced: Job) -> None:
        assert {worker["ELAUNCH_GENERATION"] for worker in records(reduced, "reduced")} == {"0"}


class TestRestart:
    def test_the_job_goes_on_and_exits_with_0(self, restarted: Job) -> None:
        assert restarted.code == 0, restarted.output
        assert re.search(r"was killed by SIGKILL in generation 0", restarted.stderr)

    def test_all_ranks_come_back_as_new_processes_and_reduce_again(self, restarted: Job, world: int) -> None:
        generations = _by_generation(restarted)

        assert list(generations) == ["0", "1"]
        for workers in generations.values():
            assert sorted(worker["rank"] for worker in workers) == list(range(world))
            assert {worker["total"] for worker in workers} == {world * (world + 1) // 2}
        assert len({worker["pid"] for workers in generations.values() for worker in workers}) == 2 * world

    def test_the_ranks_of_a_generation_meet_at_one_address(self, restarted: Job) -> None:
        for workers in _by_generation(restarted).values():
            assert len({(worker["MASTER_ADDR"], worker["MASTER_PORT"]) for worker in workers}) == 1

    def test_a_new_generation_has_a_fresh_port(self, restarted: Job) -> None:
        before, after = _by_generation(restarted).values()

        assert before[0]["MASTER_PORT"] != after[0]["MASTER_PORT"]

    def test_workers_are_told_how_often_the_job_was_restarted(self, restarted: Job) -> None:
        said = records(restarted, "reduced")

        assert all(worker["TORCHELASTIC_RESTART_COUNT"] == worker["ELAUNCH_GENERATION"] for worker in said)

    def test_the_end_says_how_many_restarts_were_used(self, restarted: Job) -> None:
        assert "1 of 1 restarts used" in restarted.stderr


class TestPlainLaunch:
    def test_a_failure_ends_the_job_with_1(self, plain: Job) -> None:
        assert plain.code == 1, plain.output

    def test_there_is_one_generation(self, plain: Job) -> None:
        assert "generation 0:" in plain.stderr
        assert "generation 1" not in plain.stderr

    def test_the_report_says_why_it_was_not_restarted(self, plain: Job) -> None:
        assert re.search(r"^Why it stopped: .*max_restarts is 0", plain.stderr, re.MULTILINE)

    def test_no_process_of_the_job_is_left(self, plain: Job) -> None:
        assert plain.processes() == []


def test_a_worker_that_exits_with_0_leaves_the_others_running(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
import os, time
from pathlib import Path

if os.environ["RANK"] == "0":
    Path("first.tmp").write_text(str(os.getpid()))
    Path("first.tmp").rename("first")
else:
    while not Path("first").exists() or Path("/proc", Path("first").read_text()).exists():
        time.sleep(0.01)
    print("still here")
""",
    )

    job = finished(tmp_path, *LIGHT, "--nproc-per-node", "3", "train.py")

    assert job.code == 0, job.output
    assert job.stdout.count("still here") == 2
    assert "generation 1" not in job.stderr


@pytest.mark.parametrize(
    ("dying", "words", "exit_code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", r"-9 \(pid: \d+\)  \(SIGKILL\)"),
        ("ctypes.string_at(0)", "was killed by SIGSEGV", r"-11 \(pid: \d+\)  \(SIGSEGV\)"),
        ("raise OSError('no such shard')", "raised OSError: no such shard", r"1 \(pid: \d+\)"),
        ("sys.exit(41)", "exited with code 41", r"41 \(pid: \d+\)"),
    ],
    ids=["SIGKILL", "segfault", "exception", "exit code"],
)
def test_the_report_says_in_words_how_a_worker_ended(dying: str, words: str, exit_code: str, tmp_path: Path) -> None:
    script(
        tmp_path,
        f"""
import ctypes, os, signal, sys

if os.environ["RANK"] == "1":
    print("dying pid", os.getpid())
    {dying}
signal.pause()
""",
    )

    job = finished(tmp_path, *LIGHT, "--nproc-per-node", "2", "--max-restarts", "0", "train.py")

    (pid,) = job.pids("dying")
    assert job.code == 1, job.output
    assert re.search(rf"^rank 1 \(local rank 1 on \S+, pid {pid}\) {words} in generation 0\.$", job.stderr, re.M)
    assert re.search(rf"^  exitcode  : {exit_code}$", job.stderr, re.MULTILINE)


class TestProgram:
    """What can stand for the program on the command line."""

    def test_arguments_after_the_script_are_the_scripts_even_those_that_look_like_ours(self, tmp_path: Path) -> None:
        script(tmp_path, SAY_ARGUMENTS)

        job = finished(tmp_path, *LIGHT, "train.py", "--nproc-per-node", "2", "-m", "--", "--version")

        (said,) = records(job, "argv")
        assert said == {
            "argv": ["train.py", "--nproc-per-node", "2", "-m", "--", "--version"],
            "name": "__main__",
            "rank": "0",
        }

    @pytest.mark.parametrize("preload", [LIGHT, ("--no-preload",)], ids=["forked", "exec'd"])
    def test_a_module_runs_as_python_dash_m_runs_it(self, preload: tuple[str, ...], tmp_path: Path) -> None:
        package = tmp_path / "recipes"
        package.mkdir()
        (package / "__init__.py").touch()
        script(package, "from recipes import sizes\n" + SAY_ARGUMENTS + "print('size', sizes.SIZE)", "tune.py")
        script(package, "SIZE = 7", "sizes.py")

        job = finished(tmp_path, *preload, "-m", "recipes.tune", "--lr", "3")

        (said,) = records(job, "argv")
        assert job.code == 0, job.output
        assert said == {"argv": [str(package / "tune.py"), "--lr", "3"], "name": "__main__", "rank": "0"}
        assert "size 7" in job.stdout

    def test_a_command_runs_without_python(self, tmp_path: Path) -> None:
        job = finished(
            tmp_path, "--nproc-per-node", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0"', "word"
        )

        assert job.code == 0, job.output
        assert sorted(job.stdout.splitlines()) == ["[0] 0 of 2: word", "[1] 1 of 2: word"]

    def test_a_command_that_fails_fails_the_job_with_its_exit_code_in_the_report(self, tmp_path: Path) -> None:
        job = finished(tmp_path, "--max-restarts", "0", "--no-python", "sh", "-c", "exit 19")

        assert job.code == 1, job.output
        assert "exited with code 19" in job.stderr

    def test_run_before_the_program_is_a_word_of_the_command(self, tmp_path: Path) -> None:
        script(tmp_path, SAY_ARGUMENTS)

        job = finished(tmp_path, "run", *LIGHT, "train.py", "run")

        (said,) = records(job, "argv")
        assert job.code == 0, job.output
        assert said["argv"] == ["train.py", "run"]

    @pytest.mark.parametrize("command", [COMMAND, (str(Path(sys.executable).with_name("elaunch")),)], ids=["-m", "bin"])
    def test_the_command_and_python_dash_m_elaunch_are_the_same(self, command: tuple[str, ...], tmp_path: Path) -> None:
        script(tmp_path, SAY_ARGUMENTS)

        done = subprocess.run(
            [*command, *LIGHT, "train.py", "a"], cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        version = subprocess.run([*command, "--version"], capture_output=True, text=True)

        assert (done.returncode, done.stdout) == (
            0,
            'argv {"argv": ["train.py", "a"], "name": "__main__", "rank": "0"}\n',
        )
        assert (version.returncode, version.stdout) == (0, f"elaunch {__version__}\n")


def _by_generation(job: Job) -> dict[str, list[dict[str, object]]]:
    """The workers' records, by the generation that they belong to."""
    found: dict[str, list[dict[str, object]]] = {}
    for worker in records(job, "reduced"):
        found.setdefault(worker["ELAUNCH_GENERATION"], []).append(worker)
    return found
