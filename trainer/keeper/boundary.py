"""Requests to stop: noted when they arrive, and obeyed by all ranks after the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from elaunch.trainer.keeper.stop import StopRequest
from elaunch.trainer.ranks.peers import Peers

# The way out for ranks that have different numbers of batches.
EVEN = (
    "give all ranks the same number of batches: next(batches) of Batches(loader) goes on with the next epoch, and "
    "DistributedSampler repeats samples, or leaves out the last ones (drop_last=True)"
)


class Wish(IntEnum):
    """The reason for a stop. If several arrive, the greatest counts."""

    NONE = 0
    JOIN = 1
    LEAVE = 2
    INTERRUPT = 3

    @property
    def exit_code(self) -> int:
        """The exit code of a script that stopped for this reason."""
        return 130 if self is Wish.INTERRUPT else 143

    @property
    def reason(self) -> str:
        """The reason as the end of a sentence."""
        return {
            Wish.NONE: "for no reason",
            Wish.JOIN: "for nodes that join",
            Wish.LEAVE: "as it was told to leave",
            Wish.INTERRUPT: "as it was interrupted",
        }[self]


class Stopped(SystemExit):
    """All ranks have stopped after the same step, because of `wish`. The exception ends the script."""

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish.exit_code)
        self.wish = wish


@dataclass(frozen=True)
class Wants:
    """The wants of one rank at a look: the next look in `steps` steps at the latest, a snapshot now, a copy of the next
    step, and copies of all steps until the next look if there are any. Its loop counts up to step `total`.
    """

    steps: int = 1
    snapshot: bool = False
    copy: bool = False
    copies: bool = False
    total: int = 0

    def numbers(self, wish: Wish, speaker: int) -> list[int]:
        """The numbers that the ranks compare, with this rank's reason to stop; `speaker` is 0 if it has nothing to say.

        The greatest counts: one rank can make all stop or look soon, and refuse a copy for all.
        """
        total = self.total
        return [wish, not self.snapshot, not self.copy, not self.copies, -self.steps, total, -total, speaker]


@dataclass(frozen=True)
class Agreed:
    """The plan of all ranks after a look: `wish` is why they stop now, the rest is as in `Wants`."""

    wish: Wish
    snapshot: bool
    copy: bool
    copies: bool
    steps: int

    @classmethod
    def by(cls, numbers: Sequence[int]) -> Agreed:
        """From the greatest of all ranks' `Wants.numbers`, one by one. Raises ValueError if their loops differ."""
        wish, *refused, steps, most, least, _ = numbers
        if most != -least:
            raise ValueError(
                f"the ranks have different numbers of steps: {-least} on one and {most} on another, and each step of "
                f"the Keeper needs all ranks; {EVEN}"
            )
        snapshot, copy, copies = (not each for each in refused)
        return cls(Wish(wish), snapshot, copy, copies, -steps)


class Boundary:
    """Collects the requests to this rank, from signals and from its agent; `agreed` combines those of all ranks."""

    def __init__(self, peers: Peers, signals: StopRequest, say: Callable[[str], None]) -> None:
        self._peers, self._signals, self._say = peers, signals, say
        self._told = Wish.NONE
        self._news = ""

    @property
    def has_peers(self) -> bool:
        """Whether another rank must be asked."""
        return self._peers.world_size > 1

    def tell(self, reason: str) -> None:
        """The agent asks for a stop ("join", "leave", "interrupt"). Call this from any thread."""
        wish = {"join": Wish.JOIN, "interrupt": Wish.INTERRUPT}.get(reason, Wish.LEAVE)
        self._told = max(self._told, wish)

    def report(self, news: str) -> None:
        """Say this at the next look. If all ranks have such a sentence there, only the lowest one says its own."""
        self._news = self._news or news

    def agreed(self, wants: Wants) -> Agreed:
        """Agree with all ranks on the plan, with this rank's wants. Collective: every rank gets the same."""
        order = self._peers.world_size - self._peers.rank
        wish = max(self._told, self._noted())
        numbers = self._peers.largest(wants.numbers(wish, order if self._news else 0))
        if numbers[-1] == order:
            self._say(self._news)
        self._news = ""
        return Agreed.by(numbers)

    def _noted(self) -> Wish:
        match self._signals.signum:
            case 0:
                return Wish.NONE
            case signal.SIGINT:
                return Wish.INTERRUPT
            case _:
                return Wish.LEAVE
