"""Agents of one job on this host, each with a store address of its own. Their workers only count (lively.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.processes import Watched, is_alive
from tests.harness import DEADLINE_S, wait_for
from tests.standin import WITHOUT_TORCH

LIVELY = Path(__file__).with_name("lively.py")
# An agent says a trouble within seconds, and on a busy machine within this time.
SAID_S = 60.0
OPTIONS = ("--nproc-per-node", "1", "--no-preload", "--max-restarts", "1000", "--rdzv-backend", "etcd")


@dataclass(frozen=True)
class Life:
    """The newest line that a worker has written about itself."""

    generation: int
    pid: int
    step: int


class Fleet:
    """One agent for each of `endpoints`, started; use it as a context manager. `folder` is made."""

    def __init__(self, folder: Path, endpoints: Collection[str], *options: str, job: str = "job") -> None:
        folder.mkdir()
        self.folder = folder
        self.job = job
        self.agents: list[Watched] = []
        for index, endpoint in enumerate(endpoints):
            home = folder / f"node{index}"
            home.mkdir()
            words = ("--nnodes", str(len(endpoints)), "--rdzv-endpoint", endpoint, "--rdzv-id", job)
            env = {"LIVELY_NODE": str(index), **WITHOUT_TORCH}
            self.agents.append(Watched(home, *words, *OPTIONS, *options, str(LIVELY), str(folder), env=env))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.__exit__()

    def life(self, node: int) -> Life | None:
        """The newest line of that node's worker, dead or alive. None before the first line."""
        with suppress(FileNotFoundError):
            return Life(*map(int, (self.folder / f"life-{node}").read_text().split()))
        return None

    def is_alive(self, node: int) -> bool:
        life = self.life(node)
        return life is not None and is_alive(life.pid)

    def run(self, generation: int, deadline_s: float = DEADLINE_S) -> None:
        """Wait until a worker of that generation, or of a newer one, lives on each node."""

        def all_live() -> bool:
            lives = [self.life(node) for node in range(len(self.agents))]
            return all(life and life.generation >= generation and is_alive(life.pid) for life in lives)

        self.wait_for(all_live, f"generation {generation} runs on all nodes", deadline_s)

    def goes_on(self, node: int) -> None:
        """Wait until that node's worker, the same one, has done more steps."""
        first = self.life(node)
        assert first, f"node {node} has no worker"

        def stepped() -> bool:
            now = self.life(node)
            assert now
            assert now.pid == first.pid, f"node {node} has another worker than {first}: {now}\n{self.story()}"
            return now.step >= first.step + 5

        self.wait_for(stepped, f"the worker of node {node} goes on")

    def says(self, node: int, pattern: str, after: int = 0) -> None:
        """Wait until that node's agent has printed a line like `pattern`, after its first `after` characters."""
        agent = self.agents[node]
        self.wait_for(
            lambda: re.search(pattern, agent.stderr[after:], re.MULTILINE), f"node {node} says {pattern!r}", SAID_S
        )

    def wait_for(self, fact: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for a fact. The failure message has the agents' output."""
        try:
            wait_for(fact, what, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def story(self) -> str:
        return "\n".join(f"--- node{i} ({a.process.poll()}):\n{a.stderr}" for i, a in enumerate(self.agents))
