"""The link with real workers: a worker that listens saves before its end, and all ranks stop after the same step."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import SAY, Light, Watched
from tests.harness import script, slow, wait_for
from tests.warm import SharedStart

# Rank 0 waits for rank 1 in a collective that rank 1 never enters. None of their connections ends.
# In generation 0 the ranks listen for failures of others, in generation 1 for stops only.
STUCK = f"""{SAY}
import torch
import torch.distributed as dist
from elaunch.trainer import link

def save(generation):
    print(f"rank {{RANK}} saves after {{generation}}", flush=True)
    link.saved(41)

dist.init_process_group("gloo")
two = dist.new_group([0, 1])
if GENERATION < 2:
    if GENERATION == 0:
        link.listen(on_peer_failed=save)
    else:
        link.listen(on_stop=print)
    dist.barrier()
    if RANK == 0:
        open(f"waits {{GENERATION}}", "w").close()
        dist.all_reduce(torch.ones(1), group=two)
    while RANK == 2 and not os.path.exists(f"waits {{GENERATION}}"):
        time.sleep(0.01)
    if RANK == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
groups = len(dist.distributed_c10d._world.pg_map)
assert not link.should_stop()
print("goes on with", len(dist.distributed_c10d._world.pg_map) - groups, "new groups", flush=True)
"""


def timeline(logs: Path) -> list[dict[str, Any]]:
    (path,) = logs.glob("*_*/timeline.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory, torch_start: SharedStart) -> tuple[Watched, list[dict[str, Any]]]:
    """The job of STUCK after its end, and its timeline."""
    folder = tmp_path_factory.mktemp("stuck")
    script(folder, STUCK)
    options = ("--log-dir", "logs", "--failure-grace", "50", "--nproc-per-node", "3")
    with Watched(folder, *torch_start.options, *options, "train.py", env=torch_start.env) as job:
        assert job.wait() == 0, job.output
    return job, timeline(folder / "logs")


def test_a_survivor_that_is_stuck_in_a_collective_saves_and_is_killed_at_once(
    stuck: tuple[Watched, list[dict[str, Any]]],
) -> None:
    job, events = stuck

    assert "rank 0 saves after 0" in job.stdout
    assert "rank 1 saves after 0" in job.stdout
    # To agree on a stop takes no group.
    assert job.stdout.count("goes on with 0 new groups") == 3
    first = [e for e in events if e["generation"] == 0]
    for rank in (0, 1):
        told, saved, exited = (
            next(i for i, e in enumerate(first) if e["event"] == name and e.get("rank", rank) == rank)
            for name in ("told", "saved", "exited")
        )
        killing = next(i for i, e in enumerate(first) if e["event"] == "killing" and i > saved)
        assert told < saved < killing < exited, first
        assert first[saved]["step"] == 41
        assert first[exited]["code"] == -signal.SIGKILL
    # A SIGTERM would have ended the workers before they saved.
    assert not [e for e in first if e["event"] == "stopping"]
    assert "still ran after" not in job.stderr
    assert re.search(r"rank 2 .* was killed by SIGKILL in generation 0; stopping 2 others", job.stderr)
    assert "2 of 3 restarts used" in job.stderr


def test_a_worker_that_listens_for_stops_only_gets_sigterm_after_a_failure(
    stuck: tuple[Watched, list[dict[str, Any]]],
) -> None:
    _, events = stuck

    second = [e for e in events if e["generation"] == 1]
    codes = {e["rank"]: e["code"] for e in second if e["event"] == "exited"}
    assert codes == {0: -signal.SIGTERM, 1: -signal.SIGTERM, 2: -signal.SIGKILL}
    assert not [e for e in second if e["event"] == "told"]


# With arguments, all ranks are one group, and each step is a collective.
STEPS = f"""{SAY}
import sys
from elaunch.trainer import link

for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, lambda signum, _: print(signal.Signals(signum).name, "came", flush=True))
if sys.argv[1:]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
step = 0
while True:
    if sys.argv[1:]:
        dist.all_reduce(torch.tensor([1]))
    step += 1
    link.report(step)
    if link.should_stop(every=3):
        print(f"rank {{RANK}} stops after {{step}}", flush=True)
        sys.exit(143)
    if step == 5:
        print("trains", flush=True)
    time.sleep(0.01 * (1 + RANK))
"""


def stopped_after(job: Watched, signum: signal.Signals) -> list[tuple[str, str]]:
    """The ranks, and the steps that they stopped after, once the signal has ended the job; none of them got one."""
    job.signal(signum)
    assert job.wait() == 128 + signum, job.output
    assert "came" not in job.stdout
    stops = sorted(re.findall(r"rank (\d) stops after (\d+)", job.stdout))
    assert all(int(step) % 3 == 0 for _, step in stops)
    return stops


@pytest.mark.parametrize("signum", [signal.SIGTERM, slow(signal.SIGINT)], ids=["TERM", "INT"])
def test_all_ranks_stop_after_the_same_step_and_get_no_signal(tmp_path: Path, signum: signal.Signals) -> None:
    script(tmp_path, STEPS)
    with Light(tmp_path, "--nproc-per-node", "3", "train.py", "as one") as job:
        wait_for(lambda: job.stdout.count("trains") == 3, "three ranks that train")

        stops = stopped_after(job, signum)

    assert [rank for rank, _ in stops] == ["0", "1", "2"]
    assert len({step for _, step in stops}) == 1


def test_a_worker_that_comes_to_no_end_of_its_step_is_killed_after_the_stop_grace(tmp_path: Path) -> None:
    script(
        tmp_path, f"{SAY}\nfrom elaunch.trainer import link\nlink.listen(on_stop=print)\nprint('up')\ntime.sleep(600)"
    )
    with Light(tmp_path, "--stop-grace", "1", "train.py") as job:
        job.wait_for_output("^up")

        job.signal(signal.SIGTERM)

        assert job.wait() == 143
    assert "leave" in job.stdout
    assert "local rank 0 still ran after 1 s; SIGKILL" in job.stderr
