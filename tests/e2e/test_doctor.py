"""`elaunch doctor` on this machine, and the site's own check before a job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import COMMAND, Job, environment, finished, free_ports, script, wait_for, with_limits

TOKEN = "0123456789abcdef0123456789abcdef"
# A program that is a command: torch is not checked, so that these take a tenth of a second.
LIGHT = ("--no-python", "true")


def doctor(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "doctor", *words],
        cwd=folder,
        env=environment({"HOME": str(folder), **(env or {})}),
        capture_output=True,
        text=True,
        timeout=180,
    )


def examined(folder: Path, *words: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """The exit code, and the checks by name."""
    ended = doctor(folder, "--json", *words, **more)
    found = json.loads(ended.stdout)
    assert found["schema"] == 1
    return ended.returncode, {check["check"]: check for check in found["checks"]}


def worst(check: Mapping[str, Any]) -> str:
    return " ".join(f["found"] for f in check["findings"] if f["grade"] == check["grade"])


@pytest.mark.slow
def test_this_node_can_train(tmp_path: Path) -> None:
    ended = doctor(tmp_path)

    assert ended.returncode == 0, ended.stdout
    assert ended.stderr == ""
    # On a busy host the import may take so long that it is a warning.
    assert re.search(r": (ok|warn) +torch +torch \S+ \(.*\), imported in ", ended.stdout)
    assert "one node needs no store" in ended.stdout
    assert "can train" in ended.stdout.splitlines()[-1]
    hosts = {line.partition(": ")[0] for line in ended.stdout.splitlines()}
    assert hosts == {os.uname().nodename}


def test_a_store_is_timed_and_refuses_a_wrong_token(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    for name, token in (("right", TOKEN), ("wrong", TOKEN[::-1])):
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    job = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--token-file")
    serve = [*COMMAND, "store", "--listen", f"localhost:{port}", "--token-file", "right"]
    with subprocess.Popen(serve, cwd=tmp_path, stderr=subprocess.PIPE, env=environment()) as store:
        try:
            assert store.stderr
            assert b"serving a store" in store.stderr.readline()

            right = examined(tmp_path, *job, "right", *LIGHT)
            wrong = examined(tmp_path, *job, "wrong", *LIGHT)
        finally:
            store.terminate()

    assert right[0] == 0
    assert "of 20 requests" in right[1]["store"]["findings"][0]["found"]
    assert wrong[0] == 1
    assert "not that of the store" in worst(wrong[1]["store"])
    assert TOKEN not in json.dumps([right, wrong])


def checked(folder: Path, check: str, command: type[Job] = Job) -> Job:
    """A job of one worker after the site's check, a shell script."""
    script(folder, f"#!/bin/sh\n{check}\n", "check.sh").chmod(0o755)
    words = ("--health-command", "./check.sh 8", "--no-python", "echo", "trained")
    with command(folder, *words, env={"ELAUNCH_TOKEN": TOKEN}) as job:
        job.wait()
    return job


@pytest.mark.parametrize(
    ("check", "how"),
    [
        ("echo GPU $1 has Xid 79 >&2; echo see dmesg; exit 4", "exited with code 4: GPU 8 has Xid 79"),
        ("kill -KILL $$", "was killed by signal 9"),
    ],
)
def test_a_node_that_fails_the_sites_check_does_not_join_and_the_checks_first_line_is_why(
    check: str, how: str, tmp_path: Path
) -> None:
    job = checked(tmp_path, check)

    assert job.code == 3
    assert job.output == f"elaunch: {os.uname().nodename} does not join the job: --health-command ./check.sh {how}\n"


def test_a_node_that_passes_the_sites_check_joins_and_shows_none_of_its_output(tmp_path: Path) -> None:
    job = checked(tmp_path, "echo all is well; env | grep -q ^ELAUNCH_TOKEN || touch checked")

    assert job.code == 0
    assert (job.stdout, (tmp_path / "checked").exists()) == ("trained\n", True)
    assert "well" not in job.output


def test_a_check_that_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    hasty = with_limits({"elaunch.launcher.doctor.host.SITE_S": 1.0})

    job = checked(tmp_path, "echo waiting for the driver\nsleep 1000 & echo $! > pid\nwait", hasty)

    assert job.code == 3
    assert job.output.endswith("./check.sh did not end within 1 s and was killed: waiting for the driver\n")
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid), "the process that the check started ends")


def test_a_check_ends_with_its_elaunch(tmp_path: Path) -> None:
    script(tmp_path, "#!/bin/sh\necho $$ > pid.new; mv pid.new pid; exec sleep 1000\n", "check.sh").chmod(0o755)
    with Job(tmp_path, "--health-command", "./check.sh", "--no-python", "echo", "trained") as job:
        pid = wait_for(lambda: (tmp_path / "pid").exists() and int((tmp_path / "pid").read_text()), "the check runs")
        job.wait_for_output("^elaunch: waiting for --health-command ./check.sh, 60 s at most$")

        job.signal(signal.SIGTERM)
        job.wait()
        wait_for(lambda: not psutil.pid_exists(pid), "the check ends")
    assert "trained" not in job.output


def test_a_check_that_cannot_be_run_is_refused_at_the_start(tmp_path: Path) -> None:
    job = finished(tmp_path, "--health-command", "./no-check.sh", "--no-python", "echo", "trained")

    assert job.code == 2
    assert job.output.startswith("elaunch: --health-command ./no-check.sh is not an executable file in ")
