"""The last messages between the ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil

from tests.harness import COMMAND, RUN_LIMIT_S, Job, environment, script, wait_for
from tests.warm import SharedStart

# The ranks meet, which uses what the agent gave them. Generation 0 fails then.
GIVEN = """
import os, pathlib, time
import torch.distributed as dist
from elaunch.trainer.ranks.peers import Peers

generation, rank = os.environ["ELAUNCH_GENERATION"], os.environ["RANK"]
dist.init_process_group("gloo")
peers = Peers()
assert peers.all_gather(rank) == ["0", "1"]
with open("." + rank, "w") as file:
    file.write(os.environ["ELAUNCH_GENERATION_SECRET"])
os.rename("." + rank, generation + rank)
if generation == "0" and rank == "1":
    raise ValueError("again")
while not peers.broadcast(pathlib.Path("end").exists()):
    time.sleep(0.02)
"""


def test_a_generations_secret_is_in_no_log_no_event_and_no_command_line(
    tmp_path: Path, torch_start: SharedStart
) -> None:
    events = tmp_path / "events"
    options = ("--nproc-per-node", "2", "--log-dir", "logs", "--run-id", "given", "--on-event", f"cat >> {events}")
    with Job(tmp_path, *torch_start.options, *options, str(script(tmp_path, GIVEN)), env=torch_start.env) as job:
        wait_for(lambda: (tmp_path / "10").exists() and (tmp_path / "11").exists(), "generation 1 has met")
        asked = [
            subprocess.run(
                [*COMMAND, what, "given"], env=environment(torch_start.env), capture_output=True, timeout=RUN_LIMIT_S
            )
            for what in ("status", "stacks")
        ]
        lines = [" ".join(each.info["cmdline"] or ()).encode() for each in psutil.process_iter(["cmdline"])]
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.output

    secrets = {name: (tmp_path / name).read_bytes() for name in ("00", "01", "10", "11")}
    assert len(secrets["00"]) == 32
    assert (secrets["00"], secrets["10"]) == (secrets["01"], secrets["11"])
    assert secrets["00"] != secrets["10"]
    files = [path.read_bytes() for path in [events, *(tmp_path / "logs").rglob("*")] if path.is_file()]
    shown = [job.output.encode(), *files, *lines, *(each.stdout + each.stderr for each in asked)]
    assert (asked[0].returncode, asked[1].returncode, len(files) > 2) == (0, 0, True)
    assert [text for text in shown for secret in secrets.values() if secret in text] == []
