"""`elaunch report` on runs that really happened."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import COMMAND, REPOSITORY, RUN_LIMIT_S, environment, finished, script, with_limits

pytestmark = pytest.mark.usefixtures("without_torch")

# The first generation fails after step 30, the second repeats these.
TRAINS = """
import os, sys, time
from elaunch.trainer import link

for step in range(1, 61):
    time.sleep(0.02)
    link.report(step)
    if step == 30 and os.environ["ELAUNCH_GENERATION"] == "0":
        sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(1000)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=RUN_LIMIT_S
    )


def test_the_end_of_a_job_has_the_command_for_the_page_and_it_works(tmp_path: Path) -> None:
    script(tmp_path, "raise ValueError('the loss is NaN')")
    job = finished(tmp_path, "--no-preload", "--log-dir", "my logs", "train.py")

    last = job.stderr.rstrip().splitlines()[-1]
    line = re.fullmatch("elaunch: the run as a page: elaunch (report .*)", last)
    assert line, job.output
    done = run(tmp_path, *shlex.split(line[1]))

    assert done.returncode == 0, done.stderr
    headline, failure, *_, page = done.stdout.splitlines()
    assert headline.startswith("Job ")
    assert " failed after " in headline
    assert "ValueError: the loss is NaN" in failure
    assert "ValueError: the loss is NaN" in Path(page).read_text()


@pytest.mark.parametrize("reports", [True, False])
def test_a_job_that_was_restarted_ends_with_the_hours_of_its_workers(reports: bool, tmp_path: Path) -> None:
    script(tmp_path, TRAINS if reports else TRAINS.replace("link.report(step)", "pass"))
    # Else only a job of some length has this line.
    always = with_limits({"elaunch.launcher.cli._HOURS_MIN": 0.0})

    with always(tmp_path, "--no-preload", "--nproc-per-node", "2", "--log-dir", "logs", "train.py") as job:
        job.wait()
    done = run(tmp_path, "report", "--json", "logs")

    assert job.code == 0, job.output
    how = "productive" if reports else r"in use \(the program reports no steps\)"
    assert re.search(rf"^elaunch: worker hours: 0\.0\d {how}, 0\.0\d lost to starts", job.stderr, re.MULTILINE)
    hours = json.loads(done.stdout)["worker_hours"]
    # Two workers had 60 steps, of which a failure undid 30.
    assert hours["used"] >= 2 * 60 * 0.02 / 3600
    assert hours["lost"] > 0


@pytest.mark.slow
def test_the_demo_kills_two_ranks_and_ends_equal_to_the_undisturbed_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.demo", "--steps", "36"]
    env = environment({"PYTHONPATH": str(REPOSITORY)})

    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=RUN_LIMIT_S)

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^demo: kill -9 \d+ +# rank [01]$", done.stdout, re.MULTILINE)) == 2
    assert "2 restarts, 0 steps lost." in done.stdout
    assert len(re.findall(r"was killed by SIGKILL in generation [01]; trained again \d", done.stdout)) == 2
    assert "equal to the undisturbed run, bit for bit" in done.stdout
    page = re.search("the page: file://(.*)", done.stdout)
    assert page
    assert Path(page[1]).is_file()
