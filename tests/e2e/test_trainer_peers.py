"""The last messages between the ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness import COMMAND, RUN_LIMIT_S, Job, environment, script, wait_for
from tests.warm import SharedStart

# With this switch interval, a thread gets the interpreter only when the main thread waits for something. On a busy
# machine that happens once in thousands of runs. Gloo's threads may still hold a program's last operations when Python
# ends, and then abort it (pytorch #190489): one in ten of these processes, if `largest` were gloo's.
PAIRS = """
import os, socket, sys
import torch.distributed as dist
from elaunch.trainer.ranks.peers import Peers

def train(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    sys.setswitchinterval(1000)
    peers = Peers()
    for number in range(6):
        assert peers.largest([number, rank]) == [number, 1]
    peers.close()

codes = []
for _ in range(8):
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.getsockname()[1]))
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            train(rank)
            sys.exit(0)
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(*codes)
"""


@pytest.mark.slow
def test_who_ends_right_after_the_last_word_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, str(script(tmp_path, PAIRS))]

    ended = subprocess.run(
        command, env=environment({"OMP_NUM_THREADS": "1"}), capture_output=True, text=True, timeout=RUN_LIMIT_S
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["0"] * 16, ended.stderr


# The ranks meet, which uses what the agent gave them. Generation 0 fails then.
GIVEN = """
import os, pathlib
import torch.distributed as dist
from elaunch.trainer.ranks.peers import Peers

generation, rank = os.environ["ELAUNCH_GENERATION"], os.environ["RANK"]
dist.init_process_group("gloo")
peers = Peers()
assert peers.from_all(rank) == ["0", "1"]
with open("." + rank, "w") as file:
    file.write(os.environ["ELAUNCH_GENERATION_SECRET"])
os.rename("." + rank, generation + rank)
if generation == "0" and rank == "1":
    raise ValueError("again")
while not peers.from_rank_0(pathlib.Path("end").exists()):
    pass
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
