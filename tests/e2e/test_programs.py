"""Habits of real scripts that a launcher may fail on."""

from __future__ import annotations

import py_compile
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import is_alive
from tests.harness import (
    COMMAND,
    DEADLINE_S,
    RUN_LIMIT_S,
    Job,
    environment,
    finished,
    free_ports,
    script,
    slow,
    wait_for,
)
from tests.standin import WITH_TORCH

pytestmark = pytest.mark.usefixtures("without_torch")

LIGHT = ("--preload", "json", "--max-restarts", "0")


# Rank 0 leaves files open and a thread that writes; rank 1 forks a child that raises.
LATE = """
import os, threading, time
if os.environ["RANK"] == "0":
    keep = [open(f"file{i}", "w") for i in range(40)]
    for file in keep: file.write("x" * 10)
    late = open("late", "w")
    def write():
        threading.main_thread().join()
        late.write("late"); late.flush()
    threading.Thread(target=write).start()
else:
    pid = os.fork()
    if pid == 0: raise ValueError("the child only")
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """A job that ends well, and its folder."""
    folder = tmp_path_factory.mktemp("late")
    script(folder, LATE)
    return finished(folder, *LIGHT, "--nproc-per-node", "2", "--log-dir", "logs", "train.py"), folder


def test_files_left_open_are_flushed_and_threads_may_write_after_the_last_line(late: tuple[Job, Path]) -> None:
    job, folder = late

    assert job.code == 0, job.output
    assert {(folder / f"file{i}").read_text() for i in range(40)} == {"x" * 10}
    assert (folder / "late").read_text() == "late"


def test_the_exception_of_a_child_that_the_program_forked_is_the_childs_alone(late: tuple[Job, Path]) -> None:
    job, folder = late

    assert job.code == 0, job.output
    assert "child ended with 1" in job.output
    assert not list(folder.glob("logs/*/*/*/error.json"))


# An exception whose str() fails, and an exception whose message is not valid Unicode.
ODD = """
import os
class Odd(Exception):
    def __str__(self): raise RuntimeError("no text")
raise Odd if os.environ["ELAUNCH_GENERATION"] == "0" else ValueError("bad \\udcff name")
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("odd")
    script(folder, ODD)
    return finished(folder, "--preload", "json", "--max-restarts", "1", "train.py")


def test_a_message_that_is_no_text_is_reported_all_the_same(odd: Job) -> None:
    assert odd.code == 1
    assert r"raised ValueError: bad \udcff name in generation 1" in odd.stderr


def test_an_exception_whose_text_cannot_be_had_shows_no_frame_of_ours(odd: Job) -> None:
    assert "raised Odd" in odd.stderr
    assert "elaunch/agent" not in odd.output


def test_a_late_import_error_of_one_rank_is_a_start_up_failure_though_another_waits_at_the_store(
    tmp_path: Path,
) -> None:
    script(
        tmp_path,
        "import os, time\n"
        "import torch.distributed as dist\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('at the store', flush=True)\n"
        "    dist.init_process_group('gloo')\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "import nosuchmodule\n",
    )

    with Job(tmp_path, "--preload", "torch", "--nproc-per-node", "2", "train.py", env=WITH_TORCH) as job:
        job.wait_for_output("at the store")
        # The group's leader has connected by the time that its socket is there.
        store = job.child("elaunch: worker store")
        wait_for(lambda: len([c for c in store.net_connections() if c.status == "ESTABLISHED"]) >= 3, "a client")
        (tmp_path / "go").touch()
        code = job.wait()

    assert code == 1
    assert "it never got past its start" in job.stderr
    assert "generation 1" not in job.stderr


def test_a_hundred_short_workers_are_no_sign_of_a_dead_fork_server(tmp_path: Path) -> None:
    script(tmp_path, "print('hello')\n")

    job = finished(tmp_path, *LIGHT, "--nproc-per-node", "130", "train.py")

    assert job.code == 0, job.stderr
    assert job.stdout.count("hello") == 130


def test_a_preloaded_module_may_have_started_a_process(tmp_path: Path) -> None:
    script(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '0.5'], stdout=-3, stderr=-3)\n", "helper.py")
    script(tmp_path, "import time\ntime.sleep(1)\nprint('done')\n")

    job = finished(
        tmp_path, "--preload", "helper", "--max-restarts", "0", "train.py", env={"PYTHONPATH": str(tmp_path)}
    )

    assert job.code == 0, job.stderr


def test_a_compiled_script_runs(tmp_path: Path) -> None:
    py_compile.compile(str(script(tmp_path, "print('compiled', __name__)\n")), cfile=str(tmp_path / "train.pyc"))

    job = finished(tmp_path, *LIGHT, "train.pyc")

    assert job.stdout == "compiled __main__\n"


def test_a_port_that_was_asked_for_is_the_jobs_between_generations_too(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    script(
        tmp_path,
        "import os, time\n"
        "print('port', os.environ['MASTER_PORT'], flush=True)\n"
        "if os.environ['ELAUNCH_GENERATION'] == '0': raise SystemExit(3)\n"
        "time.sleep(1000)\n",
    )

    with Job(tmp_path, "--preload", "json", "--master-port", str(port), "train.py") as job:
        job.wait_for_output("^elaunch: generation 1:")
        wait_for(lambda: job.stdout.count("\n") == 2, "a line of each generation")
        agent = psutil.Process(job.process.pid)
        held = [c.laddr.port for c in agent.net_connections() if c.status == psutil.CONN_LISTEN]

    assert job.stdout.split() == ["port", str(port)] * 2
    assert held == [port]


@pytest.mark.parametrize("signums", [[signal.SIGTERM], slow([signal.SIGINT, signal.SIGINT])])
def test_a_reader_that_has_stopped_reading_does_not_keep_a_job_from_being_stopped(
    tmp_path: Path, signums: list[signal.Signals]
) -> None:
    script(tmp_path, "import os\nopen(f'up{os.environ[\"RANK\"]}', 'w')\nwhile True: print('x' * 100)\n")
    options = [*LIGHT, "--nproc-per-node", "2", "--stop-grace", "1", "train.py"]
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["/dev/stdin"], "is not a regular file, so a restart could not read it again"),
        (
            ["--log-dir", "/proc/nope", "train.py"],
            "elaunch: --log-dir /proc/nope: no folder can be made in it (No such file or directory); choose another:"
            " --log-dir DIR\n",
        ),
    ],
)
def test_what_cannot_work_to_the_end_is_refused_at_the_start(tmp_path: Path, options: list[str], said: str) -> None:
    script(tmp_path, "print('ran')\n")

    job = finished(tmp_path, *LIGHT, *options, stdin=subprocess.PIPE)

    assert job.code == 2
    assert said in job.stderr
    assert job.stderr.count("\n") == 1
    assert job.stdout == ""


# The other forms are those of tests/e2e/fidelity/test_start.py.
@pytest.mark.parametrize("form", [slow("./train.py"), "./pkg"])
def test_a_programs_paths_are_those_that_python_gives_it(tmp_path: Path, form: str) -> None:
    said = "import sys\nprint([sys.argv[0], sys.path[0], __file__, __spec__ and __spec__.name])\n"
    script(tmp_path, said)
    (tmp_path / "pkg").mkdir()
    script(tmp_path / "pkg", said, "__main__.py")
    fresh = subprocess.run(
        [sys.executable, "-u", form],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )

    job = finished(tmp_path, *LIGHT, form)

    assert job.stdout == fresh.stdout
    assert fresh.stdout
