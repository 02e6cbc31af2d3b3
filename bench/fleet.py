"""A job on two nodes. The nodes are network namespaces; a third namespace has the etcd."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.contenders import Contender
from bench.job import SCRIPTS, Job, wait_for
from bench.stamps import Stamp, again, parse
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

    def stamps(self) -> list[Stamp]:
        """What the workers of both nodes have stamped so far."""
        return parse(self._stamps.read_text()) if self._stamps.exists() else []

    def train(self) -> list[Stamp]:
        """Wait until all ranks train for the first time. Returns their stamps. Raises Trouble."""
        return self._train(0.0, RANKS, _START_LIMIT_S, self.jobs, "all were training")

    def train_again(self, since_s: float, ranks: int, limit_s: float, jobs: Sequence[Job] | None = None) -> list[Stamp]:
        """Wait until `ranks` processes that were born after `since_s` train. Returns their stamps.

        Raises Trouble, also if one of `jobs` ends (without `jobs`: any job of the fleet).
        """
        return self._train(since_s, ranks, limit_s, self.jobs if jobs is None else jobs, "all were training again")

    def _train(self, since_s: float, ranks: int, limit_s: float, jobs: Sequence[Job], what: str) -> list[Stamp]:
        return wait_for(jobs, lambda: again(self.stamps(), since_s, ranks), what, limit_s)

    def close(self) -> None:
        """End all jobs, the etcd and the nodes, and remove the folder."""
        for job in self.jobs:
            job.close()
        if self._etcd:
            self._etcd.close()
        self.nodes.close()
        shutil.rmtree(self._folder, ignore_errors=True)
