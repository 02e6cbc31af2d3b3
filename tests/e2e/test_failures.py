"""The messages for the user, and the job's behaviour, after a worker has failed or crashed."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.harness import FRESH, LIGHT, Job, finished, script, slow
from tests.ranks import RankForker, Ranks
from tests.warm import SharedStart

pytestmark = pytest.mark.usefixtures("without_torch")

# For survivors that say something when they get SIGTERM, and may have to wait for a CPU.
PATIENT = ("--failure-grace", "300")
BOTH = pytest.mark.parametrize("start", [LIGHT, slow(FRESH)], ids=["forked", "exec'd"])

# Rank 1 fails in each generation with a different error. Rank 0 dies of the agent's SIGTERM, and rank 2 raises at it.
THREE_RANKS = """
import os, signal, sys, time
from pathlib import Path

rank, generation = os.environ["RANK"], os.environ["ELAUNCH_GENERATION"]


def leave(*_):
    print("rank 2 leaves", file=sys.stderr)
    sys.exit(7)


def load(shard):
    raise (ValueError if generation == "0" else RuntimeError)(f"shard {shard} is torn")


if rank == "2":
    signal.signal(signal.SIGTERM, leave)
print("worker pid", os.getpid()) if rank == "1" else None
Path(generation + rank).touch()
if rank == "1":
    while not all(Path(generation + other).exists() for other in "02"):
        time.sleep(0.01)
    for shard in range(30):
        print("reading shard", shard, file=sys.stderr)
    load(29)
while True:
    signal.sigtimedwait([], 0.1)  # not pause(): it would miss a signal that comes just before it
"""


# Rank 1 exits with the code in its argument in the first generation, while rank 0 waits; the second succeeds.
ONE_EXITS = """
import os, signal, sys

if os.environ["ELAUNCH_GENERATION"] == "0":
    sys.exit(int(sys.argv[1])) if os.environ["RANK"] == "1" else signal.pause()
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of three ranks whose rank 1 fails twice, by different errors. Its logs and its error file are kept."""
    folder = tmp_path_factory.mktemp("failed")
    script(folder, THREE_RANKS)

    return finished(
        folder,
        *("--nproc-per-node", "3", "--max-restarts", "1", "--log-dir", "logs", *LIGHT, *PATIENT, "train.py"),
        env={"TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), "FOLDER": str(folder)},
    )


@pytest.fixture(scope="module")
def folder(failed: Job) -> Path:
    """Where `failed` ran."""
    return Path(re.findall(r'File "(.*)/train\.py"', failed.stderr)[0])


class TestReport:
    def test_it_begins_with_who_failed_first_and_how(self, failed: Job) -> None:
        first, last = (
            f"rank 1 (local rank 1 on {socket.gethostname()}, pid {pid}) raised" for pid in failed.pids("worker")
        )

        assert failed.code == 1, failed.output
        assert _report(failed).splitlines()[2:4] == [
            f"failed first in generation 0: {first} ValueError: shard 29 is torn.",
            f"{last} RuntimeError: shard 29 is torn in generation 1.",
        ]

    def test_it_has_the_traceback_of_a_script_without_decorator(self, failed: Job) -> None:
        report = _report(failed)

        assert re.search(r"    Traceback \(most recent call last\):\n.*, in load\n", report, re.DOTALL)
        assert "    RuntimeError: shard 29 is torn\n" in report

    def test_it_ends_with_the_last_lines_of_stderr_before_the_traceback(self, failed: Job) -> None:
        _, _, below = _report(failed).rpartition("  stderr    :")
        lines = re.findall(r"^    (.*)$", below, re.MULTILINE)

        assert lines == [f"reading shard {shard}" for shard in range(10, 30)]

    def test_siblings_that_were_stopped_are_not_listed(self, failed: Job) -> None:
        report = _report(failed)

        assert report.count("  rank      :") == 2, "one in each generation"
        assert "SIGTERM" not in report
        assert "rank 2 leaves" in failed.stderr.partition(report)[0]
        assert "exited with code 7" not in failed.stderr


def test_a_bug_of_two_ranks_in_each_generation_is_one_traceback(tmp_path: Path) -> None:
    # The last rank of three waits: a bug that all ranks have at their start is not tried again.
    text = "import os, time\nif os.environ['RANK'] == '2':\n    time.sleep(600)\n"
    script(tmp_path, f"{text}def step():\n    raise ValueError('bad batch')\nstep()")

    job = finished(tmp_path, *LIGHT, "--nproc-per-node", "3", "--max-restarts", "3", "--log-dir", "logs", "train.py")

    # The other one is the report's.
    assert job.stderr.count("Traceback (most recent call last):") == 2, job.output
    again = r"^\[\d\] elaunch: rank \d: the same traceback as (?:rank \d )?in generation 0$"
    assert re.search(again, job.stderr, re.MULTILINE)
    logs = sorted((tmp_path / "logs").glob("latest/attempt_0/*/stderr.log"))
    assert "ValueError: bad batch\n" in logs[0].read_text()


MEETS_IN_A_FILE = """
import os, sys
import torch.distributed as dist

rank, generation = int(os.environ["RANK"]), os.environ["ELAUNCH_GENERATION"]
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=2)
dist.barrier()
print(f"met in {generation}", flush=True)
# Both have printed it.
dist.barrier()
if generation == "0" and rank == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
"""


def test_ranks_that_meet_in_a_file_meet_again_after_a_restart(tmp_path: Path, torch_start: SharedStart) -> None:
    """The file still has the addresses of the first generation's ranks."""
    script(tmp_path, MEETS_IN_A_FILE)

    job = finished(
        tmp_path, *torch_start.options, "--nproc-per-node", "2", "--max-restarts", "1", "train.py", env=torch_start.env
    )

    assert (job.code, job.stdout.count("met in 0"), job.stdout.count("met in 1")) == (0, 2, 2), job.output


READS_ERROR_FILE = """
import json, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=sys.argv[1])
message = ChildFailedError("elaunch", {0: read}).format_msg()
print(json.dumps({"message": message, "timestamp": read.timestamp}))
"""


class TestErrorFileOfTheAgent:
    def test_it_is_the_first_failures_record_with_the_exit_code(self, failed: Job, folder: Path) -> None:
        message = json.loads((folder / "error.json").read_text())["message"]

        assert message["message"] == "RuntimeError: shard 29 is torn"
        assert "in load" in message["extraInfo"]["py_callstack"]
        assert message["errorCode"] == 1

    def test_torch_reads_it(self, failed: Job, folder: Path, forker: RankForker) -> None:
        with Ranks(forker, 1, script(folder, READS_ERROR_FILE, "reads.py"), str(folder / "error.json")) as ranks:
            (read,) = ranks.answers()

        assert "in load" in read["message"]
        assert "RuntimeError: shard 29 is torn" in read["message"]
        assert read["timestamp"] > 1_700_000_000


class TestStartUp:
    """A program that can never run is not started again."""

    # Which exceptions are of this kind is tests/unit/agent/diagnosis/test_exit_status.py's matter.
    @pytest.mark.parametrize(
        ("start", "text", "error"),
        [
            (LIGHT, "import torch_geometrics_x", "ModuleNotFoundError: No module named 'torch_geometrics_x'"),
            (LIGHT, "def train(:\n    pass", "SyntaxError: invalid syntax"),
            slow(FRESH, "from os import no_such_name", "ImportError: cannot import name 'no_such_name'"),
            slow(FRESH, "def train(:\n    pass", "SyntaxError: invalid syntax"),
        ],
        ids=["no module-forked", "syntax-forked", "no name-exec'd", "syntax-exec'd"],
    )
    def test_a_script_that_python_cannot_load_is_not_restarted(
        self, start: tuple[str, ...], text: str, error: str, tmp_path: Path
    ) -> None:
        script(tmp_path, text)

        job = finished(tmp_path, *start, "--nproc-per-node", "2", "--max-restarts", "3", "train.py")

        assert job.code == 1, job.output
        assert f"raised {error}" in _report(job)
        assert error in job.stderr
        assert "generation 1" not in job.stderr
        assert "0 of 3 restarts used" in job.stderr

    @BOTH
    def test_a_module_that_does_not_exist_is_not_restarted(self, start: tuple[str, ...], tmp_path: Path) -> None:
        nowhere = finished(tmp_path, *start, "--max-restarts", "3", "-m", "no_such_recipe")
        (tmp_path / "recipes").mkdir()
        (tmp_path / "recipes" / "__init__.py").touch()
        below = finished(tmp_path, *start, "--nproc-per-node", "2", "--max-restarts", "3", "-m", "recipes.nothing")

        assert nowhere.code == 1, nowhere.output
        assert below.code == 1, below.output
        assert "raised ModuleNotFoundError: No module named recipes.nothing" in _report(below)
        assert "generation 1" not in nowhere.stderr + below.stderr


# The peers catch the error of their collective and print nothing; they are gone before the rank that left.
CATCHES = """
import atexit, os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 0.2)
    print("ERROR: shard 17 not found", file=sys.stderr)
    dist.destroy_process_group()
    sys.exit(7)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    os._exit(1)
"""


class TestFirstCause:
    """A survivor's "connection reset by peer" is never reported as the cause of the job's failure."""

    def test_a_peer_that_catches_the_error_and_exits_is_not_the_cause(
        self, tmp_path: Path, torch_start: SharedStart
    ) -> None:
        script(tmp_path, CATCHES)

        options = (*torch_start.options, "--nproc-per-node", "3", "--max-restarts", "0")
        job = finished(tmp_path, *options, "train.py", env=torch_start.env)

        logged = r"^rank 1 .* exited with code 7, while ranks 0 and 2 waited in all_reduce, in generation 0\.$"
        assert re.search(logged, _report(job), re.MULTILINE), job.output


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            ([], "no program to run"),
            (["--no-such-flag", "train.py"], "No such option"),
            (["trian.py"], "trian.py does not exist"),
            (["--max-restarts", "-1", "train.py"], "--max-restarts -1 is out of range"),
            (["--nnodes", "2:1", "train.py"], "--nnodes 2:1 is neither a number of nodes nor a range"),
            (["--preload", "json", "--no-preload", "train.py"], "contradicts --no-preload"),
            (["--log-dir", "train.py", "train.py"], "--log-dir train.py is a file"),
            (["--no-python", "no-such-command"], "no-such-command is not an executable file"),
            (["doctor", "--nnodes", "2"], "elaunch: --nnodes 2 needs the address of a store"),
            (["/dev/stdin"], "is not a regular file, so a restart could not read it again"),
            (
                ["--log-dir", "/proc/nope", "train.py"],
                "--log-dir /proc/nope: no folder can be made in it (No such file or directory); choose another:",
            ),
        ],
    )
    def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(
        self, words: list[str], sentence: str, tmp_path: Path
    ) -> None:
        script(tmp_path, "print('ran')")

        job = finished(tmp_path, *words)

        assert job.code == 2, job.output
        assert job.stdout == ""
        assert re.fullmatch(r"elaunch: .*\n", job.stderr)
        assert sentence in job.stderr


@BOTH
def test_a_worker_that_exits_with_one_of_no_restart_codes_ends_the_job_with_that_code(
    start: tuple[str, ...], tmp_path: Path
) -> None:
    script(tmp_path, ONE_EXITS)

    job = finished(tmp_path, *start, "--nproc-per-node", "2", "--no-restart-codes", "92,93", "train.py", "93")

    assert job.code == 93, job.output
    (line,) = re.findall("^Why it stopped: .*$", job.stderr, re.MULTILINE)
    assert line == (
        "Why it stopped: exit code 93 is in --no-restart-codes, so the job ends with it; 0 of 3 restarts used."
    )
    assert "rank 1 (local rank 1" in _report(job).splitlines()[2]


def test_any_other_exit_code_is_worth_a_restart_beside_no_restart_codes(tmp_path: Path) -> None:
    script(tmp_path, ONE_EXITS)

    job = finished(tmp_path, *LIGHT, "--nproc-per-node", "2", "--no-restart-codes", "93", "train.py", "94")

    assert job.code == 0, job.output
    assert "succeeded, 1 of 3 restarts used" in job.stderr


def _report(job: Job) -> str:
    """The text between the two heavy lines."""
    found = re.search(r"^={40,}\n.*^={40,}\n", job.stderr, re.MULTILINE | re.DOTALL)
    assert found, job.output
    return found[0]


CRASHES = """
import ctypes, os, sys


def forward():
    print("before the crash", file=sys.stderr)
    ctypes.string_at(0)

forward()
"""


@BOTH
def test_the_report_has_the_stack_and_the_users_innermost_line(start: tuple[str, ...], tmp_path: Path) -> None:
    script(tmp_path, CRASHES)

    job = finished(tmp_path, *start, "--max-restarts", "0", "train.py")

    before, line, report = job.stderr.partition("=" * 72)
    assert line, job.output
    assert re.search(r"was killed by SIGSEGV \(crashed in \S+/train\.py:7 in forward\) in generation 0\.", report), (
        job.output
    )
    assert re.search(
        r'  traceback :\n    Fatal Python error: Segmentation fault\n.*train\.py", line 7 in forward', report, re.S
    )
    assert "exitcode  : -11" in report
    assert "before the crash\n" in before
    assert "Fatal Python error" not in before, "a fresh interpreter would not have written it"
