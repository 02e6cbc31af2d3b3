"""The launchers that are measured: command lines and variables. All run the same scripts with as many threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Each generation gets a new store. Otherwise torchrun's workers may read what the generation before had written.
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
FORK_MODE = ("--run-path", "--start-method", "fork")
LIMIT_TORCH = "limit: import torch"
LIMIT_PRELOAD = "limit: import of what is preloaded"


@dataclass(frozen=True)
class Contender:
    """`program` is elaunch or torchrun; `options` come before the script; `variables` are set in its environment."""

    name: str
    program: str
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.program == "elaunch"

    def with_fresh_store(self) -> Contender:
        """The same contender, but each generation has a store of its own."""
        name, value = FRESH_STORE.split("=")
        return Contender(f"{self.name}, {FRESH_STORE}", self.program, self.options, {**self.variables, name: value})

    def command(self, workers: int, max_restarts: int) -> tuple[str, ...]:
        """The command line up to the script."""
        counts = ("--nproc-per-node", str(workers), "--max-restarts", str(max_restarts))
        return (self.program, *self.options, *counts)


ELAUNCH = Contender("elaunch", "elaunch")
FRESH = Contender("elaunch --no-preload", "elaunch", ("--no-preload",))
TORCHRUN = Contender("torchrun", "torchrun")
TORCHRUN_FORK = Contender("torchrun --run-path --start-method fork", "torchrun", FORK_MODE)
# Keys are the names on the bench's command line.
ALL = {"elaunch": ELAUNCH, "no-preload": FRESH, "torchrun": TORCHRUN, "torchrun-fork": TORCHRUN_FORK}


def environment(inherited: Mapping[str, str], contender: Contender, extra: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment: `inherited` without the variables of a launcher above it; one thread per worker.

    Python may keep compiled code: pip compiles what it installs, but not the working tree that is measured.
    """
    left_out = ("ELAUNCH_", "PET_", "TORCHELASTIC_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in inherited.items() if not name.startswith(left_out)}
    return {**kept, "OMP_NUM_THREADS": "1", **contender.variables, **extra}
