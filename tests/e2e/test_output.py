"""The output of workers on its way to the console and to files."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import is_alive, small_disk
from tests.harness import COMMAND, DEADLINE_S, LIGHT, Job, environment, finished, script, slow, wait_for, with_limits
from tests.terminal import Terminal

pytestmark = pytest.mark.usefixtures("without_torch")


SAY_WHO = """
import os, sys

print("out", os.environ["RANK"])
print("err", os.environ["RANK"], file=sys.stderr)
"""

LINES = 10_000

# Scripts wait until the test makes a file.
WAIT = """
import os, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])


def wait(name):
    while not Path(name).exists():
        time.sleep(0.005)


def write(text):
    sys.stdout.write(text)
    sys.stdout.flush()
"""


class TestLoneWorker:
    def test_its_lines_have_no_prefix_and_stdin_reaches_it(self, tmp_path: Path) -> None:
        script(tmp_path, SAY_WHO + "print(sys.stdin.read().upper())")

        with Job(tmp_path, *LIGHT, "train.py", stdin=subprocess.PIPE) as job:
            assert job.process.stdin
            job.process.stdin.write(b"from a pipe")
            job.process.stdin.close()
            job.wait()

        assert job.stdout == "out 0\nFROM A PIPE\n"
        assert "\nerr 0\n" in job.stderr

    @pytest.mark.parametrize("start", [LIGHT, slow(("--no-preload",))], ids=["forked", "exec'd"])
    def test_it_keeps_its_terminal_and_can_ask_the_user(self, start: tuple[str, ...], tmp_path: Path) -> None:
        script(tmp_path, "import os; print('terminals', *map(os.isatty, range(3))); print('hello', input('name? '))")

        with Terminal(tmp_path, *start, "train.py") as terminal:
            terminal.read_until("name? ")
            terminal.type("Ada\n")
            terminal.read_until("hello Ada")
            code = terminal.process.wait(DEADLINE_S)

        assert code == 0, terminal.text
        assert "terminals True True True" in terminal.text


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Three workers, each of which prints its rank and what it reads."""
    folder = tmp_path_factory.mktemp("several")
    script(folder, SAY_WHO + "print('read', repr(sys.stdin.read()))")

    with Job(folder, *LIGHT, "--nproc-per-node", "3", "train.py", stdin=subprocess.PIPE) as job:
        assert job.process.stdin
        job.process.stdin.write(b"data")
        job.process.stdin.close()
        job.wait()
    return job


class TestPrefix:
    def test_the_first_rank_has_stdin_and_the_others_read_its_end(self, several: Job) -> None:
        read = re.findall(r"^.*read .*$", several.stdout, re.MULTILINE)

        assert sorted(read) == ["[0] read 'data'", "[1] read ''", "[2] read ''"]
        assert len(several.stdout.splitlines()) == 6

    @pytest.mark.parametrize("start", [LIGHT, slow(("--no-preload",))], ids=["forked", "exec'd"])
    def test_at_a_terminal_a_debugger_works_in_any_rank(self, start: tuple[str, ...], tmp_path: Path) -> None:
        script(tmp_path, WAIT + "if rank == 1:\n    breakpoint()\n    print('went on')\n")

        with Terminal(tmp_path, *start, "--nproc-per-node", "2", "train.py") as terminal:
            terminal.read_until("[1] (Pdb) ")
            terminal.type("p 1000 + 1\n")
            terminal.read_until("1001\r\n[1] (Pdb) ")
            terminal.type("c\n")
            terminal.read_until("\nwent on")
            code = terminal.process.wait(DEADLINE_S)

        assert code == 0, terminal.text


# A line is never taken for a prompt because its writer has waited for a CPU.
PATIENT = with_limits({"elaunch.agent.output.streams.PARTIAL_LINE_WAIT_S": 600.0}).command


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines of four workers that write as fast as they can. One of them writes blocks larger than a pipe."""
    folder = tmp_path_factory.mktemp("loaded")
    script(
        folder,
        WAIT
        + f"""
lines = [f"line {{i}} of rank {{rank}} {{'x' * (i * 7 % 150)}}.\\n".encode() for i in range({LINES})]
if rank == 3:
    lines = [b"".join(lines[i : i + 2000]) for i in range(0, {LINES}, 2000)]
Path(f"ready {{rank}}").touch()
for other in range(4):
    wait(f"ready {{other}}")
for line in lines:
    for fd in 1, 2:
        rest = line
        while rest:
            rest = rest[os.write(fd, rest) :]
""",
    )

    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        command = [*PATIENT, *LIGHT, "--nproc-per-node", "4", "train.py"]
        subprocess.run(command, cwd=folder, env=environment(), stdout=out, stderr=err, check=True, timeout=DEADLINE_S)

    return {name: (folder / name).read_text().splitlines() for name in ("stdout", "stderr")}


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_under_load_every_line_arrives_once_whole_and_in_its_ranks_order(
    name: str, loaded: dict[str, list[str]]
) -> None:
    lines = [line for line in loaded[name] if not line.startswith("elaunch: ")]

    by_rank = {rank: [line for line in lines if line.startswith(f"[{rank}] ")] for rank in range(4)}
    for rank, mine in by_rank.items():
        assert mine == [f"[{rank}] line {i} of rank {rank} {'x' * (i * 7 % 150)}." for i in range(LINES)]
    assert len(lines) == 4 * LINES
    turns = sum(one[:3] != other[:3] for one, other in itertools.pairwise(lines))
    assert turns > 20, "the ranks wrote one after the other: this proves nothing"


class TestLogDir:
    def test_each_generation_and_rank_keeps_its_files_through_restarts(self, tmp_path: Path) -> None:
        script(
            tmp_path,
            WAIT
            + """
generation = os.environ["ELAUNCH_GENERATION"]
print("generation", generation, "rank", rank)
print("error of generation", generation, "rank", rank, file=sys.stderr)
Path(f"{generation} {rank}").touch()
if generation != "2":
    wait(f"{generation} {1 - rank}")
    os.kill(os.getpid(), 9) if rank else time.sleep(60)
""",
        )

        job = finished(tmp_path, *LIGHT, "--nproc-per-node", "2", "--log-dir", "kept/here", "train.py")

        run = (tmp_path / "kept/here/latest").resolve()
        assert job.code == 0, job.output
        assert _tree(run) == {
            f"attempt_{generation}/{rank}/{name}.log": f"{words}generation {generation} rank {rank}\n"
            for generation in range(3)
            for rank in range(2)
            for name, words in (("stdout", ""), ("stderr", "error of "))
        }
        assert all(f"[{rank}] generation {g} rank {rank}\n" in job.stdout for g in range(3) for rank in range(2))
        assert str(run) in job.stderr

    def test_a_log_of_the_largest_size_has_the_newest_lines_and_the_number_of_bytes_before_them(
        self, tmp_path: Path
    ) -> None:
        script(tmp_path, "for number in range(60_000):\n    print(number, 'x' * 50)\nprint('end')")

        options = ("--nproc-per-node", "2", "-r", "1", "--log-dir", "logs", "--log-max-size", "1M")
        job = finished(tmp_path, *LIGHT, *options, "train.py")

        assert job.code == 0, job.output
        written = "".join(f"{number} {'x' * 50}\n" for number in range(60_000)) + "end\n"
        for rank in range(2):
            folder = tmp_path / f"logs/latest/attempt_0/{rank}"
            older, newer = ((folder / name).read_text() for name in ("stdout.log.1", "stdout.log"))
            notice, _, rest = newer.partition("\n")
            dropped = int(
                re.findall(r"in stdout.log.1; ([\d,]+) bytes before that were dropped", notice)[0].replace(",", "")
            )
            assert 1 << 19 < len(older) + len(newer) <= 1 << 20
            assert older.partition("\n")[2] + rest == written[dropped:]

    def test_output_that_is_to_go_to_files_goes_to_a_private_folder_if_none_is_named(self, tmp_path: Path) -> None:
        script(tmp_path, SAY_WHO)

        job = finished(
            tmp_path,
            *LIGHT,
            "--nproc-per-node",
            "2",
            "-r",
            "1",
            "-t",
            "2",
            "train.py",
        )

        (kept,) = tmp_path.glob("elaunch_*")
        run = (kept / "latest").resolve()
        assert (job.code, job.stdout) == (0, ""), job.output
        assert f"(the job starts); output in {run}\n" in job.stderr
        assert "[default1]:err 1\n" in job.stderr
        assert (kept.stat().st_mode & 0o777, kept.name[:13]) == (0o700, "elaunch_logs_")
        names = {"stdout": "out", "stderr": "err"}
        assert _tree(run) == {
            f"attempt_0/{rank}/{name}.log": f"{word} {rank}\n" for rank in (0, 1) for name, word in names.items()
        }

    def test_a_filter_of_global_ranks_limits_the_console_and_not_the_files(self, tmp_path: Path) -> None:
        script(tmp_path, SAY_WHO)

        job = finished(
            tmp_path, *LIGHT, "--nproc-per-node", "2", "--log-dir", "logs", "--ranks-filter", "1,7", "train.py"
        )

        run = (tmp_path / "logs" / "latest").resolve()
        assert job.stdout == "[1] out 1\n"
        assert re.findall(r"^\[(\d)\] err", job.stderr, re.MULTILINE) == ["1"]
        assert [_tree(run)[f"attempt_0/{rank}/stdout.log"] for rank in range(2)] == ["out 0\n", "out 1\n"]

    def test_a_filter_of_a_stream_that_is_not_teed_leaves_an_empty_file(self, tmp_path: Path) -> None:
        script(tmp_path, 'print("loss 3.5")\n')

        finished(tmp_path, *(*LIGHT, "-r", "3", "--log-dir", "logs", "--duplicate-stdout-filters", "loss", "train.py"))

        files = _tree((tmp_path / "logs" / "latest").resolve())
        assert (files["attempt_0/filtered_stdout.log"], files["attempt_0/0/stdout.log"]) == ("", "loss 3.5\n")


class TestNothingIsLeft:
    # How each generation ends.
    @pytest.mark.parametrize("ends", ["raise ValueError; os.kill(os.getpid(), 9); sys.exit(0)", "raise ValueError"])
    def test_without_a_log_dir_no_file_stays(self, ends: str, tmp_path: Path) -> None:
        names = ("TORCHELASTIC_ERROR_FILE", "ELAUNCH_MEMORY")
        script(
            tmp_path,
            f"import os, sys\nfor name in {names}:\n    print(name, os.environ[name], flush=True)\n"
            f"exec({ends.split('; ')}[int(os.environ['ELAUNCH_GENERATION'])])\n",
        )
        temporary = tmp_path / "temporary"
        temporary.mkdir()

        restarts = ("--max-restarts", str(ends.count(";")))
        job = finished(tmp_path, *LIGHT, *restarts, "train.py", env={"TMPDIR": str(temporary)})

        assert job.code == ("exit" not in ends), job.output
        used = {Path(path).parents[2].parent for path in re.findall(r"FILE (.*)", job.stdout)}
        (memory,) = {Path(path) for path in re.findall(r"MEMORY (.*)", job.stdout)}
        assert used == {temporary}
        assert list(temporary.iterdir()) == []
        assert memory.parent == Path("/dev/shm")
        assert not memory.exists()


class TestFullDisk:
    @pytest.mark.parametrize("size", ["size=64k", slow("nr_inodes=4")], ids=["no space", "no inode"])
    def test_training_goes_on_with_one_warning(self, size: str, tmp_path: Path) -> None:
        script(
            tmp_path,
            WAIT
            + """
for stream in sys.stdout, sys.stderr:
    for i in range(2000):
        stream.write(f"line {i} {'x' * 50}\\n")
write(f"the end of {rank}\\n")
""",
        )

        with small_disk(tmp_path / "disk", size) as disk:
            job = finished(tmp_path, *LIGHT, "--nproc-per-node", "2", "--log-dir", str(disk / "logs"), "train.py")

        assert job.code == 0, job.output
        assert job.stdout.count("line 1999 ") == job.stderr.count("line 1999 ") == 2
        assert all(f"[{rank}] the end of {rank}\n" in job.stdout for rank in range(2))
        assert len(re.findall(r"No space left on device", job.stderr)) == 1, job.stderr


ENDLESS = """
import os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]


def save(*_):
    Path(f"saved {rank}").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
Path(f"ready {rank}").touch()
while not all(Path(f"ready {other}").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.005)
while True:
    print("line", flush=True)
    time.sleep(0.001)
"""


class TestReaderGone:
    """`elaunch train.py | head`: decision 048."""

    @pytest.mark.parametrize(
        ("together", "workers"), [(False, "2"), (True, "1"), slow(False, "1"), slow(True, "2")], ids=str
    )
    def test_a_pipe_whose_reader_leaves_ends_the_job_quietly(
        self, workers: str, together: bool, tmp_path: Path
    ) -> None:
        script(tmp_path, ENDLESS)

        with (
            subprocess.Popen(
                [*COMMAND, "--no-preload", "--nproc-per-node", workers, "train.py"],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if together else subprocess.PIPE,
            ) as process,
            killed_at_deadline(process),
        ):
            assert process.stdout
            while not process.stdout.readline().endswith(b"line\n"):
                pass
            process.stdout.close()
            errors = process.stderr.read().decode() if process.stderr else ""
            code = process.wait(DEADLINE_S)

        assert code == 141, errors
        assert all((tmp_path / f"saved {rank}").exists() for rank in range(int(workers))), "they get SIGTERM"
        if not together:
            after = errors.partition("(the job starts)\n")[2]
            assert after == "elaunch: stopped, since no process reads its stdout any more; exit code 141\n"


@contextmanager
def killed_at_deadline(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the process at the deadline: if something is broken, it and the test may wait for each other."""
    timer = threading.Timer(DEADLINE_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()


@pytest.mark.parametrize("signums", [[signal.SIGTERM], slow([signal.SIGINT, signal.SIGINT])])
def test_a_reader_that_has_stopped_reading_does_not_keep_a_job_from_being_stopped(
    tmp_path: Path, signums: list[signal.Signals]
) -> None:
    script(tmp_path, "import os\nopen(f'up{os.environ[\"RANK\"]}', 'w')\nwhile True: print('x' * 100)\n")
    options = [*LIGHT, "--max-restarts", "0", "--nproc-per-node", "2", "--stop-grace", "1", "train.py"]
    agent = subprocess.Popen(
        [*COMMAND, *options],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)), "two workers")
        children = psutil.Process(agent.pid).children(recursive=True)
        for signum in signums:
            agent.send_signal(signum)

        assert agent.wait(DEADLINE_S) == 128 + signums[0]
        wait_for(lambda: not any(map(is_alive, children)), "all gone")
    finally:
        agent.kill()
        agent.communicate(timeout=DEADLINE_S)


def _tree(folder: Path) -> dict[str, str]:
    """All files of the workers below a run's `folder`, by their path in it."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "timeline.jsonl")
    return {str(path.relative_to(folder)): path.read_text() for path in files}


SPEAKS = """
import os, sys, time
print("out", os.environ["RANK"])
print("err", os.environ["RANK"], file=sys.stderr)
if os.environ["RANK"] == "0":
    sys.exit(open("logged", "w").close())
while not os.path.exists("logged"):
    time.sleep(0.01)
sys.exit(5)
"""
JOB = ("--no-preload", "--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", "logs", "train.py")


def test_a_collector_gets_objects_only_and_the_files_stay_as_they_were(tmp_path: Path) -> None:
    script(tmp_path, SPEAKS)

    job = finished(tmp_path, "--log-format", "json", *JOB)

    assert job.code == 1, job.output
    lines = [json.loads(line) for line in job.stderr.splitlines()]
    workers = [json.loads(line) for line in job.stdout.splitlines()] + [line for line in lines if "rank" in line]
    logged = sorted((line["rank"], line["stream"], line["text"]) for line in workers)
    assert logged == [(rank, f"std{way}", f"{way} {rank}") for rank in range(2) for way in ("err", "out")]
    failed = [line for line in lines if line["text"].startswith("rank 1 (")]
    assert [line["level"] for line in failed] == ["error"]
    assert {line["level"] for line in lines if line["text"].startswith("generation 0")} == {"info"}
    report = lines[-1]["report"]
    assert (report["outcome"], report["exit_code"], report["failure"]["rank"]) == ("failed", 1, 1)
    assert "train.py FAILED" in lines[-1]["text"]
    assert (tmp_path / "logs" / "latest" / "attempt_0" / "1" / "stderr.log").read_text() == "err 1\n"
