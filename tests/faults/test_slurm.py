"""Jobs without a rendezvous flag under a real Slurm, and the ways in which the scheduler ends or restarts them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.processes import described
from tests.faults.trainings import Training
from tests.harness import COMMAND, REPOSITORY, slow, wait_for
from tests.slurm import Batch, Slurm, needs_slurm

pytestmark = needs_slurm

SBATCH = REPOSITORY / "deploy" / "slurm" / "train.sbatch"
# A worker without torch that prints its ranks and its host.
PLACE = 'echo "place $RANK $WORLD_SIZE $LOCAL_RANK $(hostname)"\n'
PLAIN = ("-v", "--no-python", "sh", "place.sh")
# A worker that has a handler for one signal, and waits.
NOTICED = """\
import os, signal, sys, time
def noticed(signum, frame):
    print("noticed by", signal.Signals(signum).name, flush=True)
    open(f"noticed.{os.environ['RANK']}", "w").close()
    # The first to end would have the other one stopped, perhaps before Slurm has notified its node.
    while not all(os.path.exists(f"noticed.{rank}") for rank in "01"):
        time.sleep(0.01)
    sys.exit(7)
signal.signal(getattr(signal, sys.argv[1]), noticed)
open(f"here.{os.environ['RANK']}", "w").close()
while True:
    signal.sigtimedwait([], 0.1)  # not pause(): it would miss a signal that comes just before it
"""
SECRET = re.compile(r"\b[0-9a-f]{32}\b")
# Two nodes have enough CPUs for both jobs of an array.
TWO = ("--nodes=2", "--ntasks-per-node=1", "--open-mode=append")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm"), 3) as started:
        (started.home / "place.sh").write_text(PLACE)
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left(slurm: Slurm) -> Iterator[None]:
    """After each test all nodes are idle, and run only their daemons."""
    yield
    slurm.call("scancel", "--user=root")
    slurm.wait_idle()
    try:
        wait_for(lambda: not leftovers(slurm), "no process of a job")
    except AssertionError as error:
        raise AssertionError(f"{error}: {leftovers(slurm)}") from None
    assert {path.name for path in slurm.home.glob(".elaunch/*")} <= {"key"}


def leftovers(slurm: Slurm) -> list[str]:
    daemons = ("slurmd ", "slurmctld", "slurmscriptd", "munged ")
    lines = [described(process) for process in slurm.nodes.processes()]
    # A process that has ended meanwhile has no words.
    return [line for line in lines if line and not line.strip(" :").startswith(daemons)]


def places(output: str) -> list[tuple[int, int, int, str]]:
    """Rank, world size, local rank and host of each worker, by rank."""
    found = re.findall(r"place (\d+) (\d+) (\d+) (\S+)", output)
    return sorted((int(rank), int(size), int(local), host) for rank, size, local, host in found)


def batch_of(slurm: Slurm, *command: str) -> Batch:
    """A job whose script starts the command with srun."""
    script = slurm.home / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit=0 {' '.join(command)}\n")
    return slurm.sbatch(*TWO, "--output=%x-%j.out", str(script))


def test_srun_elaunch_needs_no_flag_and_ranks_follow_the_nodes(slurm: Slurm) -> None:
    output = slurm.call("srun", "-N3", *COMMAND, *PLAIN)

    # The two nodes below one switch are neighbours.
    assert places(output) == [(0, 3, 0, "node0"), (1, 3, 0, "node2"), (2, 3, 0, "node1")]
    found = re.findall(
        r"Slurm: job test-\d+\.0, 3 nodes, this is node (\d), the head is node0, topology (\S+) ", output
    )
    assert sorted(found) == [("0", "top.s0"), ("1", "top.s1"), ("2", "top.s0")]
    assert not SECRET.search(output)


def test_tasks_beside_the_agent_wait_and_the_secret_comes_from_the_shared_home(slurm: Slurm) -> None:
    output = slurm.call("srun", "-N2", "-wnode0,node1", "--ntasks-per-node=2", *COMMAND, *PLAIN)

    assert places(output) == [(0, 4, 0, "node0"), (1, 4, 1, "node0"), (2, 4, 0, "node1"), (3, 4, 1, "node1")]
    assert len(re.findall("Slurm: job", output)) == 2
    assert not SECRET.search(output)
    assert (slurm.home / ".elaunch").stat().st_mode & 0o777 == 0o700


def test_without_a_shared_home_the_job_ends_with_the_line_to_add(slurm: Slurm) -> None:
    output = slurm.call("srun", "-N2", *COMMAND, *PLAIN, env={"HOME": "/proc"}, code=2)

    assert "before srun: export ELAUNCH_TOKEN=$(openssl rand -hex 16)" in output


def test_submit_writes_and_submits_what_runs(slurm: Slurm) -> None:
    words = ("--nodes", "2:3", "--gpus", "1", "--cpus", "2", "--time", "5", "--sbatch=--comment=test", *PLAIN)
    submit = (*COMMAND, "submit", "slurm")

    shown = slurm.call(*submit, "--dry-run", *words)
    printed = slurm.call(*submit, *words)

    number = re.findall(r"^submitted as job (\d+)", printed, re.MULTILINE)[0]
    output = Batch(slurm, number).wait()
    assert shown.startswith("#!/bin/bash\n#SBATCH --job-name=sh\n#SBATCH --nodes=2-3\n")
    assert [rank for rank, *_ in places(output)] in ([0, 1], [0, 1, 2])
    assert slurm.call(*submit, "--partition", "none", *PLAIN, code=3).startswith("elaunch: sbatch refused the job: ")


def test_arguments_arrive_unchanged_through_sbatch_and_srun(slurm: Slurm) -> None:
    program = "./show\n#SBATCH --nodes=9\ntouch pwned\n'$(touch pwned)\".sh"
    (slurm.home / program).write_text("#!/bin/sh\nprintf '%s\\0' \"$@\" > shown\n")
    (slurm.home / program).chmod(0o755)
    words = [
        "a\nb",
        "\r\n",
        "#SBATCH --nodes=9",
        "$(touch pwned)",
        "`touch pwned`",
        "'",
        '"',
        "\\",
        " ",
        "",
        "-",
        "\udcff",
        "é",
    ]
    options = ("--name", 'a "b" $(touch pwned) #c \\d \'e', '--sbatch=--comment=`touch pwned` "x"', "--no-python")

    printed = slurm.call(*COMMAND, "submit", "slurm", *options, program, *words)
    number = re.findall(r"^submitted as job (\d+)", printed, re.MULTILINE)[0]
    job = Batch(slurm, number)
    output = job.wait()

    shown = [os.fsdecode(word) for word in (slurm.home / "shown").read_bytes().split(b"\0")[:-1]]
    assert shown == words, output
    assert not (slurm.home / "pwned").exists()
    fields = slurm.call("scontrol", "-o", "show", "job", number)
    assert 'JobName=a "b" $(touch pwned) #c \\d \'e ' in fields
    assert "NumNodes=1 " in fields


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "signum"),
    [(("--signal=USR1",), signal.SIGUSR1), (("--signal=USR2",), signal.SIGUSR2), ((), signal.SIGTERM)],
)
def test_a_job_that_is_notified_of_its_end_saves_and_leaves(slurm: Slurm, how: tuple[str, ...], signum: int) -> None:
    run = Training(slurm.home / f"notified-{signum}", asks=["hold:forward-0-3-0"])
    job = batch_of(slurm, "--output=notified.out", *COMMAND, *run.words())
    run.wait_for("held", step=3)

    slurm.call("scancel", *how, job.number)
    run.wait_for("requested", rank=1, reason="leave")
    # A rank is notified of the first node's leave. Slurm may signal the other node seconds later, and the head's store
    # would end with the head before.
    logged_line = f"{signal.Signals(signum).name}: leaving the job, stopping"
    output = slurm.home / "notified.out"
    wait_for(lambda: output.read_text().count(logged_line) == 2, "both nodes have the signal")
    run.release("forward-0-3-0")

    job.wait("FAILED" if how else "CANCELLED")
    logged = output.read_text()
    assert "stopped after step 3, on a request to leave; the same command continues from there" in logged
    assert logged.count(f"{signal.Signals(signum).name} was received by ") >= 2, logged
    assert logged.count(f"exit code {128 + signum}") == 2, logged


@pytest.mark.parametrize(
    ("notice", "name"),
    [(signal.SIGUSR1, "SIGUSR1"), slow(signal.SIGUSR2, "SIGUSR2"), slow(signal.SIGUSR1, "SIGTERM")],
)
def test_a_program_that_knows_no_elaunch_gets_the_notice_that_it_has_a_handler_for(
    slurm: Slurm, notice: signal.Signals, name: str
) -> None:
    (slurm.home / "notice.py").write_text(NOTICED)
    here = [slurm.home / f"here.{rank}" for rank in range(2)]
    for path in (*here, *(slurm.home / f"noticed.{rank}" for rank in range(2))):
        path.unlink(missing_ok=True)
    job = batch_of(slurm, *COMMAND, "--no-preload", "notice.py", name)
    wait_for(lambda: all(path.exists() for path in here), "both workers wait")

    slurm.call("scancel", f"--signal={notice.name}", job.number)

    output = job.wait("FAILED")
    assert output.count(f"noticed by {name}") == 2, output
    codes = dict(re.findall(r"task (\d): Exited with exit code (\d+)", output))
    # The head's store ends with the head, sometimes before Slurm has signalled the other node.
    notified = str(128 + notice)
    assert codes in ({"0": notified, "1": notified}, {"0": notified, "1": "3"}), output


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scontrol requeue", "--signal=USR1@20"])
def test_a_job_that_is_queued_again_goes_on_from_where_it_was(slurm: Slurm, how: str) -> None:
    run = Training(slurm.home / how.split()[-1], asks=["hold:forward-0-3-0"])
    program = slurm.home / "train.py"
    path, *args = run.words()
    lines = ("import runpy, sys", f"sys.path.insert(0, {str(Path(path).parent)!r})", f"sys.argv[1:] = {args!r}")
    program.write_text("\n".join((*lines, f"runpy.run_path({path!r}, run_name='__main__')\n")))
    by_time = ("--time=2", how) if how.startswith("--signal") else ()
    job = slurm.sbatch("--nodes=2", "--gpus-per-node=1", *by_time, str(SBATCH))
    run.wait_for("held", step=3)

    if not by_time:
        slurm.call("scontrol", "requeue", job.number)
    # Slurm checks the time limit only now and then, and may be a minute early.
    run.wait_for("requested", rank=1, reason="leave", deadline_s=400)
    run.release("forward-0-3-0")
    job.wait("PENDING")
    # Slurm waits for two minutes. A start within the second of the requeue fails: "Job 1 already killed" (slurmd).
    slurm.call("scontrol", "update", f"job={job.number}", "StartTime=now+3")

    output = job.wait()
    assert "stopped after step 3" in output
    run.assert_complete()
