"""Time from a failure of a job on two nodes until all ranks reduce again: a worker is killed, or a node is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

from bench.contenders import Contender
from bench.fleet import NODES, RANKS, WORKERS_PER_NODE, Fleet
from bench.job import Trouble
from bench.launches import ALL_REDUCE, STEP
from bench.samples import Sample
from bench.stamps import Stamp, birth_stages, last_s, node_stages

SECTION = "restart on two nodes"
LOSS_SECTION = "loss of a node"
# The time in which a launcher must notice that a node is gone. torchrun never does.
LOSS_LIMIT_S = 30.0
# A kill comes a random time after the start of training, up to this. It must not keep step with a launcher's polling.
_DELAY_S_MAX = 0.3
# The second node is lost: torchrun's store is on the first.
_LOST = 1


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
    killed_s = time.monotonic()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        raise Trouble(f"rank {rank} ended before it was killed") from None
    trained = fleet.train_again(killed_s, RANKS, limit_s)
    # Node A is the one whose agent's stamps name the killed process.
    of_nodes = sorted((job.timeline() for job in fleet.jobs), key=lambda stamps: all(s.pid != pid for s in stamps))
    sample = _sample(SECTION, fleet.contender, dict(zip("AB", of_nodes, strict=True)), trained, killed_s)
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
    return _sample(LOSS_SECTION, fleet.contender, {"A": left[0].timeline()}, trained, lost_s)


def _sample(
    section: str, contender: Contender, of_nodes: dict[str, list[Stamp]], trained: list[Stamp], since_s: float
) -> Sample:
    values = {ALL_REDUCE: last_s(trained, "all_reduce") - since_s, STEP: last_s(trained, "step") - since_s}
    stages = {}
    if contender.ours:
        generation = max(stamp.generation for stamp in trained)
        agents = [stamp for stamps in of_nodes.values() for stamp in stamps]
        ranks = len({stamp.rank for stamp in trained})
        stages = {
            **node_stages(of_nodes, generation, since_s),
            **birth_stages(agents, trained, generation, ranks, since_s),
        }
    return Sample(section, contender.name, RANKS, values, stages)
