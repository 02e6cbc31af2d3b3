"""Runs an example: as forked ranks, or under elaunch, also with a worker that is killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.harness import REPOSITORY, Job, wait_for
from tests.ranks import RankForker, Ranks

EXAMPLES = REPOSITORY / "examples"


def told(forker: RankForker, name: str, *args: str, ranks: int = 2) -> str:
    """What the ranks of an example print, without a launcher. Each must end well."""
    with Ranks(forker, ranks, EXAMPLES / name, *args, env={"LOCAL_WORLD_SIZE": str(ranks)}) as running:
        ended = running.end()
    assert [rank.code for rank in ended] == [0] * ranks, "\n".join(rank.err for rank in ended)
    return "".join(rank.out for rank in ended)


def launched(folder: Path, *words: str, ranks: int = 2, env: dict[str, str] | None = None) -> str:
    """What `elaunch --nproc-per-node RANKS EXAMPLE …` prints. It must end well."""
    with started(folder, *words, ranks=ranks, env=env) as job:
        assert job.wait() == 0, job.output
    return job.output


def started(folder: Path, *words: str, ranks: int = 2, env: dict[str, str] | None = None) -> Job:
    variables = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **(env or {})}
    return Job(folder, "--nproc-per-node", str(ranks), "--max-restarts", "3", *words, env=variables)


def killed_once(folder: Path, name: str, steps: int, *, after: str, rank: int = 1) -> str:
    """What an example prints of which `rank` is killed when it has printed `after`."""
    with started(folder, str(EXAMPLES / name), str(steps)) as job:
        pid = int(job.wait_for_output(rf"rank {rank} has pid (\d+)")[1])
        job.wait_for_output(after)
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == 0, job.output
    assert re.search(rf"rank {rank} .* was killed by SIGKILL in generation 0", job.output), job.output
    wait_for(lambda: not job.processes(), "the job's processes to be gone")
    return job.output


def weights(output: str, ranks: int = 2) -> dict[str, str]:
    """The digest of each rank's weights at the end."""
    found = dict(re.findall(r"rank (\d+) ends with weights (\w+)", output))
    assert len(found) == ranks, output
    return found
