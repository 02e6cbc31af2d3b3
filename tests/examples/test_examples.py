"""The examples of c10d and DDP: each shows what it says, and a kill changes nothing in the result of a training."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.harness import REPOSITORY, Job, slow, wait_for
from tests.ranks import RankForker, Ranks

EXAMPLES = REPOSITORY / "examples"


def printed(forker: RankForker, name: str, *args: str, ranks: int = 2) -> str:
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


# For each example the arguments of a short run, and what it must print.
SHOWN = {
    "c10d/collectives.py": ((), r"all_to_all_single +\[0, 10\]"),
    "c10d/stores.py": ((), r"TCPStore of rank 0 at port \d+: the same sum"),
    "c10d/own_backend.py": ((), r"backend 'store' sums to 1; DDP's weights over it are those over gloo"),
    "c10d/timeouts.py": ((), r"a new group of all 2 ranks works"),
    "ddp/uneven_inputs.py": ((), r"divided by all ranks: +weight -4\.00"),
    "ddp/batch_norm.py": ((), r"SynchronisedNorm over 2 ranks: outputs, buffers and gradients of one batch of 16"),
    "ddp/sparse_gradients.py": ((), r"sparse: 12 rows"),
    "ddp/buckets.py": ((), r"usual: +\S+ a\|b\|c a\|b\|c"),
    "ddp/two_devices.py": ((), r"rank 1: halves on cpu and cpu"),
    "ddp/own_hook.py": (("12",), r"a step sends 1,\d+ bytes from each rank, of 67,588 bytes of gradient"),
    "ddp/local_sgd.py": (("4",), r"round 2: whole gradients, .* apart 0\n"),
    "ddp/gossip.py": (("20",), r"step 20: loss .*, ranks apart by 0\.\d+"),
    "ddp/hooks.py": (("6",), r"powersgd +\d+\.\d\d ms"),
    "ddp/data_parallel.py": ((), r"no GPU: DataParallel is the module itself"),
}
TRAINING = {
    "ddp/own_hook.py": (200, r"step 40"),
    "ddp/local_sgd.py": (60, r"round 10"),
    "ddp/gossip.py": (400, r"step 50"),
}


# Two ranks of one take 0.1 s of CPU time, as they are forked.
@pytest.mark.parametrize("name", [slow(name) if "timeouts" in name else name for name in SHOWN])
def test_an_example_prints_its_documented_output(forker: RankForker, name: str) -> None:
    args, shown = SHOWN[name]

    assert re.search(shown, printed(forker, name, *args))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs_under_elaunch_with_three_workers(tmp_path: Path, name: str) -> None:
    args, _ = SHOWN[name]

    # One of c10d's shows collectives that have failed.
    failed = "failed in" if name.startswith("c10d/") else "failed"
    assert failed not in launched(tmp_path, str(EXAMPLES / name), *args, ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_a_killed_worker_changes_nothing_in_the_result(tmp_path: Path, name: str) -> None:
    steps, after = TRAINING[name]
    calm = launched(tmp_path, str(EXAMPLES / name), str(steps))

    struck = killed_once(tmp_path, name, steps, after=after)

    assert weights(struck) == weights(calm)
    # Not from the beginning: the state of before is there.
    assert re.search(r"(restored step|goes on after step) [1-9]", struck), struck
