"""Kills workers of a training run at random moments, and checks that each kill struck."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.faults.census import Census, children, command
from tests.faults.processes import Watched, is_alive
from tests.harness import wait_for

# A job ends after ten generations in a row without progress (protocol, rule 9), and that is right.
BARREN_MAX = 5
# From the group's start to its first step it takes about half a second.
START_UP_S = 0.35
# Stopping a group after a kill takes some tens of milliseconds.
STOP_S = 0.04
SECOND_KILL_SHARE = 0.3


class Moment(Enum):
    """When a worker is killed."""

    FORKING = "while the workers are forked"
    STARTING = "at some time of its start-up"
    TRAINING = "between two steps"
    SAVING = "while it writes a checkpoint"
    STOPPING = "while its group is stopped"


@dataclass(frozen=True)
class Kill:
    """A SIGKILL that was sent to a living worker."""

    generation: int
    moment: Moment
    pid: int


def seeded() -> random.Random:
    """Random numbers whose seed is printed. ELAUNCH_TEST_SEED repeats a failure as far as the machine allows."""
    seed = int(os.environ.get("ELAUNCH_TEST_SEED", random.randrange(1 << 30)))
    print(f"ELAUNCH_TEST_SEED={seed}")
    return random.Random(seed)


class Storm:
    """Kills workers of `job`, a run of the bundled trainer in `out`. `kills` is what struck, in order."""

    def __init__(self, job: Watched, out: Path, workers: int, dice: random.Random) -> None:
        self.job = job
        self.kills: list[Kill] = []
        self.seen: set[int] = set()
        self._out = out
        self._workers = workers
        self._dice = dice
        self._barren = 0
        self._read_to = 0
        self._server = job.fork_server().pid

    def rage(self, generations: int, census: Census | None = None, census_every: int = 0) -> None:
        """End `generations` generations, one after the other. Take the `census` at each `census_every`th."""
        for generation in range(generations):
            counted = census is not None and generation % census_every == census_every - 1
            moment = Moment.TRAINING if counted else self._moment()
            self._await(rf"^elaunch: generation {generation}: {self._workers} workers", generation)
            assert not (left := [pid for pid in self.seen if is_alive(pid)]), f"alive in {generation}: {left}"
            if census and counted:
                self._await_all_training()
                census.count(self._workers, f"in generation {generation}")
            self.strike(generation, moment)

    def strike(self, generation: int, moment: Moment) -> None:
        """End one generation: kill a worker at `moment`, and sometimes another while the group is stopped."""
        first = self._kill(generation, moment)
        struck = [first]
        siblings = set(self._newborn()) - {first}
        if self._dice.random() < SECOND_KILL_SHARE:
            time.sleep(self._dice.uniform(0, STOP_S))
            # The next generation may run already. Do not kill its workers yet.
            victims = sorted(siblings & set(self._newborn()))
            if victims and _kill(victim := self._dice.choice(victims)):
                self.kills.append(Kill(generation, Moment.STOPPING, victim))
                struck.append(victim)
        pids = "|".join(map(str, struck))
        # The survivors may fail first: a worker that is killed in an fsync ends only after the fsync.
        said = rf"^elaunch: (the cause: )?rank \d+ .*pid ({pids})\) was killed by SIGKILL in generation {generation}\b"
        self._await(said, generation)

    def figures(self) -> str:
        counts = Counter(kill.moment for kill in self.kills)
        return f"{len(self.kills)} kills: " + ", ".join(f"{n} {moment.value}" for moment, n in counts.items())

    def _moment(self) -> Moment:
        easy = [Moment.TRAINING, Moment.SAVING]
        moment = self._dice.choice(easy if self._barren == BARREN_MAX else [*easy, Moment.FORKING, Moment.STARTING])
        self._barren = 0 if moment in easy else self._barren + 1
        return moment

    def _kill(self, generation: int, moment: Moment) -> int:
        """Kill a worker at `moment`. Returns its pid."""
        while True:
            try:
                pid = self._victim(moment)
            except AssertionError as error:
                raise AssertionError(f"generation {generation}: {error}\n{self.job.output[-8000:]}") from None
            self.seen.update(children(self._server))
            # A worker that had already ended does not count as a kill.
            if _kill(pid):
                self.kills.append(Kill(generation, moment, pid))
                return pid

    def _victim(self, moment: Moment) -> int:
        match moment:
            case Moment.FORKING:
                wanted = self._dice.randint(1, self._workers)
                newborn = wait_for(lambda: (now := self._newborn()) and len(now) >= wanted and now, "newborn workers")
                return self._dice.choice(newborn)
            case Moment.STARTING:
                time.sleep(self._dice.uniform(0, START_UP_S))
            case Moment.SAVING:
                return wait_for(self._writer, "a checkpoint that is being written")
            case _:
                goal = self._steps() + self._dice.randint(1, 6)
                wait_for(lambda: self._steps() >= goal, f"step {goal}")
        return self._dice.choice(wait_for(self._named, "a worker to kill"))

    def _newborn(self) -> list[int]:
        """The workers, also those that do not have their name yet. The store is forked before them."""
        return [pid for pid in children(self._server)[1:] if "worker store" not in command(pid)]

    def _named(self) -> list[int]:
        return [pid for pid in children(self._server) if "elaunch.trainer" in command(pid)]

    def _writer(self) -> int:
        """The pid of the worker that is writing a checkpoint now, or 0."""
        for _ in range(100):
            if list((self._out / "checkpoints").glob(".generation-*.writing")):
                # Rank 0 removes unfinished checkpoints of an earlier generation before it opens metrics.jsonl.
                return next((pid for pid in self._named() if _has_open(pid, "metrics.jsonl")), 0)
            time.sleep(0.0003)
        return 0

    def _steps(self) -> int:
        """The number of steps in metrics.jsonl now. A torn last line does not count."""
        try:
            return (self._out / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def _await_all_training(self) -> None:
        goal = self._steps() + 1
        wait_for(lambda: self._steps() >= goal, f"step {goal}")
        wait_for(lambda: len(self._named()) == self._workers, "all workers")

    def _await(self, pattern: str, generation: int) -> None:
        """Wait for a line of stderr. Looks only at output since the line that was found last."""
        compiled = re.compile(pattern, re.MULTILINE)

        def found() -> bool:
            ended = self.job.process.poll() is not None
            if ended:
                # The job has ended: read its output to the end.
                self.job.wait()
            text, end = self.job.stderr_from(self._read_to)
            if compiled.search(text):
                self._read_to = end - 1
                return True
            assert not ended, f"ended without {pattern!r}:\n{text}"
            return False

        try:
            wait_for(found, f"{pattern!r} in generation {generation}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.kills[-3:]}\n{self.job.stderr_from(self._read_to)[0]}") from None


def _has_open(pid: int, name: str) -> bool:
    with suppress(OSError):
        return any(path.readlink().name == name for path in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _kill(pid: int) -> bool:
    """SIGKILL a living process. Returns False if it is gone or a zombie."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(pid):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
