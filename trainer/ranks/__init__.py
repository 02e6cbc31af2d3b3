"""Communication between the ranks of a job. Here is this process's own rank, from its launcher's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """This worker's rank among `world_size` workers, and how often the group was restarted.

    `launched` is False if no launcher set `RANK`: a single process, which needs no rendezvous.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    generation: int = 0
    restarts: int = 0
    launched: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankInfo:
        """Read torchrun's variables and `ELAUNCH_GENERATION`. Without elaunch the generation is the restart count."""
        restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        generation = int(environ.get("ELAUNCH_GENERATION", restarts))
        if "RANK" not in environ:
            return cls(generation=generation, restarts=restarts)
        return cls(
            rank=int(environ["RANK"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            world_size=int(environ["WORLD_SIZE"]),
            generation=generation,
            restarts=restarts,
            launched=True,
        )

    @property
    def leads(self) -> bool:
        """Whether this is rank 0: only that rank writes files and prints."""
        return self.rank == 0
