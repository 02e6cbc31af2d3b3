"""Time from a failure of a job on two nodes until all ranks reduce again: a worker is killed, or a node is lost."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.job import SCRIPTS, Contender, Job, Trouble, kill_rank, wait_for
from bench.launches import ALL_REDUCE, STEP
from bench.samples import Sample
from bench.stamps import Stamp, again, last_s
from tests.etcd import Etcd
from tests.nodes import Nodes

NODES = 2
WORKERS_PER_NODE = 2
RANKS = NODES * WORKERS_PER_NODE
_ETCD_PORT = 2379
_TORCHRUN_PORT = 29400
_START_LIMIT_S = 120.0
# The pause between two steps, as if an accelerator were at work.
_STEP_S = 0.02
SECTION = "restart on two nodes"
LOSS_SECTION = "loss of a node"
# The time in which a launcher must notice that a node is gone. torchrun never does.
LOSS_LIMIT_S = 30.0
# A kill comes a random time after the start of training, up to this. It must not keep step with a launcher's polling.
_DELAY_S_MAX = 0.3
# The second node is lost: torchrun's store is on the first.
_LOST = 1


class Fleet:
    """A contender's launchers on both nodes. They train until the context manager ends them.

    `nnodes` is torchrun's MIN:MAX. elaunch's store is a real etcd, torchrun's the c10d store that its first node hosts.
    """

    def __init__(self, contender: Contender, nnodes: str, max_restarts: int) -> None:
        self.contender = contender
        self._folder = Path(tempfile.mkdtemp(prefix="bench_nodes_"))
        self._stamps = self._folder / "stamps.jsonl"
        self.jobs: list[Job] = []
        self._etcd: Etcd | None = None
        self.nodes = Nodes(NODES + 1)
        try:
            self._start(nnodes, max_restarts)
        except BaseException:
            self.close()
            raise

    def _start(self, nnodes: str, max_restarts: int) -> None:
        if self.contender.ours:
            ports = (_ETCD_PORT, _ETCD_PORT + 1)
            last = self.nodes[NODES]
            self._etcd = Etcd("3.5", hosts=[last.ipv4], ports=ports, prefix=lambda _: last.prefix)
            store = ("--rdzv-backend", "etcd", "--rdzv-endpoint", self._etcd.endpoints)
        else:
            store = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.nodes[0].name}:{_TORCHRUN_PORT}")
        options = (*self.contender.options, "--nnodes", nnodes, *store, "--rdzv-id", "bench")
        here = replace(self.contender, options=options)
        env = {"BENCH_STEPS": "0", "BENCH_STEP_S": str(_STEP_S)}
        program = (str(SCRIPTS / "train.py"),)
        for node in list(self.nodes)[:NODES]:
            job = Job(
                here,
                WORKERS_PER_NODE,
                program,
                max_restarts=max_restarts,
                env=env,
                timeline=True,
                prefix=node.prefix,
                stamps=self._stamps,
            )
            self.jobs.append(job)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train(self) -> list[Stamp]:
        """Wait until all ranks train for the first time. Returns their stamps. Raises Trouble."""
        return self._train(0.0, RANKS, _START_LIMIT_S, self.jobs, "all were training")

    def train_again(self, since_s: float, ranks: int, limit_s: float, jobs: Sequence[Job] | None = None) -> list[Stamp]:
        """Wait until `ranks` processes that were born after `since_s` train. Returns their stamps.

        Raises Trouble, also if one of `jobs` ends (without `jobs`: any job of the fleet).
        """
        return self._train(since_s, ranks, limit_s, self.jobs if jobs is None else jobs, "all were training again")

    def _train(self, since_s: float, ranks: int, limit_s: float, jobs: Sequence[Job], what: str) -> list[Stamp]:
        return wait_for(jobs, lambda: again(self.jobs[0].stamps(), since_s, ranks), what, limit_s)

    def close(self) -> None:
        """End all jobs, the etcd and the nodes, and remove the folder."""
        for job in self.jobs:
            job.close()
        if self._etcd:
            self._etcd.close()
        self.nodes.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def restarts(contender: Contender, ranks: int, count: int, limit_s: float, rng: random.Random) -> Iterator[Sample]:
    """One job in which a random rank is killed `count` times. Yields a sample for each kill.

    If a restart takes longer than `limit_s`, or the job dies, that is the last sample.
    """
    with Fleet(contender, str(NODES), max_restarts=count + 5) as fleet:
        try:
            trained = fleet.train()
            for _ in range(count):
                time.sleep(rng.uniform(0, _DELAY_S_MAX))
                sample, trained = _restart(fleet, trained, rng.randrange(ranks), limit_s)
                yield sample
        except Trouble as trouble:
            yield Sample(SECTION, contender.name, ranks, why=str(trouble))


def _restart(fleet: Fleet, trained: list[Stamp], rank: int, limit_s: float) -> tuple[Sample, list[Stamp]]:
    pid = next(stamp.pid for stamp in trained if stamp.rank == rank)
    killed_s = kill_rank(rank, pid)
    trained = fleet.train_again(killed_s, RANKS, limit_s)
    sample = _sample(SECTION, fleet.contender, trained, killed_s)
    return sample, trained


def losses(contender: Contender, count: int, rng: random.Random) -> Iterator[Sample]:
    """`count` jobs that may go on with one node. In each, the other node loses its power once."""
    for _ in range(count):
        with Fleet(contender, f"1:{NODES}", max_restarts=5) as fleet:
            try:
                fleet.train()
                time.sleep(rng.uniform(0, _DELAY_S_MAX))
                yield _loss(fleet)
            except Trouble as trouble:
                yield Sample(LOSS_SECTION, contender.name, RANKS, why=str(trouble))


def _loss(fleet: Fleet) -> Sample:
    left = [job for node, job in zip(fleet.nodes, fleet.jobs, strict=False) if node.index != _LOST]
    lost_s = time.monotonic()
    fleet.nodes[_LOST].power_off()
    trained = fleet.train_again(lost_s, RANKS - WORKERS_PER_NODE, LOSS_LIMIT_S, left)
    return _sample(LOSS_SECTION, fleet.contender, trained, lost_s)


def _sample(section: str, contender: Contender, trained: list[Stamp], since_s: float) -> Sample:
    values = {ALL_REDUCE: last_s(trained, "all_reduce") - since_s, STEP: last_s(trained, "step") - since_s}
    return Sample(section, contender.name, RANKS, values)
