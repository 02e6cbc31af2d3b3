"""Runs of the bundled trainer on the nodes of a cluster."""

from __future__ import annotations

from pathlib import Path

from tests.faults.cluster import Cluster
from tests.faults.trainings import DEADLINE_S, Training
from tests.harness import wait_for


class OnNodes(Training):
    """A run on the nodes of a cluster."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster

    def start(self, *indices: int, nnodes: str, options: tuple[str, ...] = (), workers: int = 1) -> None:
        launch = ["--nnodes", nnodes, "--nproc-per-node", str(workers), "--rdzv-endpoint", self.cluster.endpoints]
        for index in indices:
            words = [*launch, "--rdzv-id", "job", "--max-restarts", "9", *self.words(*options)]
            self.cluster.type(index, *words, env={"OMP_NUM_THREADS": "1"})

    def wait_for(self, event: str, *, deadline_s: float = DEADLINE_S, **fields: object) -> None:
        try:
            super().wait_for(event, deadline_s=deadline_s, **fields)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.records[-20:]}\n{self.output}") from None

    def lose(self, index: int) -> None:
        """The node's power is cut."""
        self.cluster.nodes[index].power_off()
        lost = self.cluster.agents.pop(index)
        wait_for(lambda: lost.process.poll() is not None, "the agent's end")

    def ended(self, *indices: int) -> None:
        """Wait for the end of the agents on these nodes. They must end well, and leave nothing."""
        for index in indices:
            self.cluster.agents[index].wait(DEADLINE_S)
        self.cluster.ended(dict.fromkeys(indices, 0))

    @property
    def output(self) -> str:
        return "".join(agent.output for agent in self.cluster.agents.values())
