"""Timelines of made-up jobs, with round times, as the agents of real jobs write them."""

from __future__ import annotations

import json
from typing import Any

from elaunch.launcher.inspect.node_log import NodeLog, node_log

# The wall clock, and the host's monotonic clock, at the start of a job.
BEGAN_AT, BEGAN_MONOTONIC_S = 1_800_000_000.0, 500.0


class Timeline:
    """One node's timeline. `at` are seconds of the job."""

    def __init__(
        self,
        host: str = "node-a",
        first_rank: int = 0,
        workers: int = 2,
        *,
        started_s: float = 0.0,
        node_id: str = "",
        seats: tuple[str, ...] = (),
    ) -> None:
        self.host, self.first_rank, self.workers = host, first_rank, workers
        # Its own name in the job, and those in the tables.
        self.node_id, self.seats = node_id, seats
        self.rows: list[dict[str, Any]] = []
        run = {"run_id": "night", "host": host, "command": "train.py", "max_restarts": 3, "workers": workers}
        self.add(started_s, -1, "started", schema=1, version="0.1.0", **run)

    def add(self, at: float, generation: int, event: str, **fields: Any) -> Timeline:
        times = {"at": BEGAN_AT + at, "monotonic_s": BEGAN_MONOTONIC_S + at}
        self.rows.append({"generation": generation, "event": event, **times, **fields})
        return self

    def _rank(self, local_rank: int) -> dict[str, int]:
        return {"rank": self.first_rank + local_rank, "local_rank": local_rank}

    def opens(self, at: float, generation: int, kind: str = "start", world_size: int = 2) -> Timeline:
        """Opened at `at`, sealed 0.5 s later, workers forked 1 s later."""
        self.add(at, generation, "opened", kind=kind, cause="because")
        self.add(at, generation, "joined", **({"node_id": self.node_id} if self.node_id else {}))
        nodes = [{"host": self.host, "node_id": node_id} for node_id in self.seats]
        table = {"world_size": world_size, "reason": f"reason {generation}", "restarts": generation, "nodes": nodes}
        self.add(at + 0.5, generation, "sealed", **table)
        for local_rank in range(self.workers):
            self.add(at + 1, generation, "forked", pid=100 * generation + local_rank, **self._rank(local_rank))
        return self

    def restores(self, begin: float, end: float, generation: int) -> Timeline:
        """The Keeper's marks, which the agent reads a little later."""
        return self.says("restoring", begin, generation).says("restored", end, generation)

    def says(self, name: str, at: float, generation: int) -> Timeline:
        """The mark of a moment by each worker, which the agent reads a little later."""
        for local_rank in range(self.workers):
            self.add(at + 0.3, generation, "marked", name=name, said_s=BEGAN_MONOTONIC_S + at, **self._rank(local_rank))
        return self

    def steps(self, at: float, generation: int, step: int, first: int | None = None) -> Timeline:
        fields: dict[str, Any] = {"first_rank": self.first_rank, "steps": [step] * self.workers}
        if first is not None:
            fields["first_steps"] = [first] * self.workers
        return self.add(at, generation, "progress", **fields)

    def dies(self, at: float, generation: int, local_rank: int, code: int = -9, **failure: Any) -> Timeline:
        """A worker dies, and the agent knows of it 0.25 s later."""
        rank, pid = self.first_rank + local_rank, 100 * generation + local_rank
        who = {**self._rank(local_rank), "pid": pid}
        self.add(at + 0.25, generation, "exited", code=code, **who)
        known = {"kind": "signal", "sentence": f"rank {rank} died", "message": "died", "host": self.host, **who}
        return self.add(at + 0.25, generation, "failed", **known, failed_at=BEGAN_AT + at, **failure)

    def stops(self, at: float, generation: int, local_ranks: tuple[int, ...]) -> Timeline:
        """The others are killed; all is cleared at `at`."""
        self.add(at - 0.1, generation, "killing", signal="SIGKILL", workers=len(local_ranks))
        for local_rank in local_ranks:
            self.add(at, generation, "exited", pid=100 * generation + local_rank, code=-9, **self._rank(local_rank))
        return self.add(at, generation, "cleared")

    def succeeds(self, at: float, generation: int, restarts: int = 1) -> Timeline:
        for local_rank in range(self.workers):
            self.add(at - 1, generation, "exited", pid=100 * generation + local_rank, code=0, **self._rank(local_rank))
        end = {"outcome": "succeeded", "code": 0, "reason": "", "restarts": restarts, "max_restarts": 3}
        return self.add(at, generation, "ended", **end)

    @property
    def text(self) -> bytes:
        return b"".join(json.dumps(row).encode() + b"\n" for row in self.rows)

    def log(self, path: str = "") -> NodeLog:
        return node_log(path or f"/logs/{self.host}", self.text.splitlines(keepends=True))


def restarted() -> Timeline:
    """One node, two workers: rank 1 dies at 20 s, after step 17; generation 1 resumes after step 14, and ends at 60 s.

    Generation 0 makes a step a second from 3 s on, generation 1 from 25 s on.
    """
    job = Timeline().opens(0, 0).says("stepped", 4, 0).steps(4.5, 0, 1, first=1).steps(19, 0, 16).steps(20, 0, 17)
    job.dies(20, 0, 1).stops(21, 0, (0,))
    job.opens(21, 1, "fail").restores(24, 25, 1).says("stepped", 26, 1).steps(26.2, 1, 15, first=15).steps(55, 1, 44)
    return job.succeeds(60, 1)
