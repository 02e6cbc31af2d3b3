"""elaunch as the first process of a container: process 1 of a pid namespace."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import SAY, Watched, described, is_alive
from tests.faults.test_signals import SAVES
from tests.harness import LIGHT, RUN_LIMIT_S, script, wait_for

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _why() -> str:
    if not shutil.which("unshare"):
        return "there is no unshare"
    return subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, timeout=RUN_LIMIT_S).stderr.strip()


pytestmark = pytest.mark.skipif(bool(_why()), reason=f"pid namespaces: {_why()}")

# An orphan that ends. The process that inherits it must reap it, or it stays in the process table as a zombie.
ORPHAN = f"""{SAY}
from pathlib import Path

reading, writing = os.pipe()
if os.fork() == 0:
    orphan = os.fork()
    if orphan:
        os.write(writing, str(orphan).encode())
        os._exit(0)
    while os.getppid() != 1:
        time.sleep(0.001)
    os._exit(0)
os.wait()
orphan = int(os.read(reading, 20))
end_s = time.monotonic() + 50
while Path(f"/proc/{{orphan}}").exists():
    assert time.monotonic() < end_s, Path(f"/proc/{{orphan}}/stat").read_text()
    time.sleep(0.001)
print("reaped", flush=True)
"""


def container(folder: Path, *args: str, **popen: object) -> Watched:
    """The command as process 1; the job's own process is `unshare`, which ends with the exit code of what it runs."""
    return Watched(folder, *LIGHT, *args, prefix=CONTAINER, **popen)


def process_1(job: Watched) -> psutil.Process:
    """Process 1 once it has an agent, seen from outside."""

    def found() -> psutil.Process | None:
        children = psutil.Process(job.process.pid).children()
        return next((each for each in children if described(each).startswith("elaunch: init")), None)

    return wait_for(found, "an init")


def agent_of(job: Watched) -> psutil.Process:
    """The agent, which is process 1's child; its orphans have other names."""
    (agent,) = [each for each in process_1(job).children() if "-m elaunch" in described(each)]
    return agent


def test_orphans_are_reaped_and_the_jobs_failure_is_the_containers_exit_code(tmp_path: Path) -> None:
    script(tmp_path, f"{ORPHAN}raise SystemExit(7)")
    with container(tmp_path, "--max-restarts", "0", "train.py") as job:
        assert job.wait() == 1, job.output
        assert "reaped" in job.stdout
        assert "exited with code 7" in job.stderr
        job.assert_nothing_is_left()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_reaches_the_agent_once_and_its_exit_code_is_kept(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    script(tmp_path, SAVES)
    with container(tmp_path, "--nproc-per-node", "2", "train.py") as job:
        wait_for(lambda: len(job.pids("worker")) == 2, "2 workers")

        process_1(job).send_signal(signum)

        assert job.wait() == code
        assert job.stdout.count(f"saved on {signum.name}") == 2
        assert job.stderr.count(f"{signum.name}: stopping 2 workers") == 1
        job.assert_nothing_is_left()


def test_a_killed_agent_leaves_nothing_and_the_container_ends(tmp_path: Path) -> None:
    script(tmp_path, SAVES)
    with container(tmp_path, "train.py") as job:
        wait_for(lambda: job.pids("worker"), "a worker")
        inside = [p for p in psutil.Process(job.process.pid).children(recursive=True) if is_alive(p)]
        assert job.run_dirs()

        agent_of(job).kill()

        assert job.wait() == 137
        assert not any(is_alive(each) for each in inside)
        job.assert_nothing_is_left()
