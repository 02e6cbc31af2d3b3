"""A network and ranks whose passes take as long as a test says: no clock, and no torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from elaunch.trainer.tuning.search import SearchResult, SearchSpace, TimedPass, search
from elaunch.trainer.tuning.settings import CommSettings


@dataclass
class World:
    """`cost_s(settings, rank)` is a pass's true time. Each pass differs from it by `noise`, a share of it.

    Over 100 passes everything becomes slower by the share `drift`. A share of `spikes` passes take five times as long.
    """

    cost_s: Callable[[CommSettings, int], float]
    ranks: int = 2
    noise: float = 0.02
    drift: float = 0.0
    spikes: float = 0.0
    alone_s: float = 0.1
    seed: int = 0
    passes: list[TimedPass] = field(default_factory=list)

    def true_s(self, settings: CommSettings) -> float:
        """What the slowest rank needs."""
        return max(self.cost_s(settings, rank) for rank in range(self.ranks))

    def run(self, space: SearchSpace) -> SearchResult:
        """The whole search."""
        dice = random.Random(self.seed)
        steps = search(space)
        wanted = next(steps)
        while True:
            self.passes.append(wanted)
            assert len(self.passes) < 1000, "the search does not end"
            drifted = 1 + self.drift * len(self.passes) / 100
            spike = 5.0 if dice.random() < self.spikes else 1.0
            costs = [
                (self.alone_s if wanted.is_alone else self.cost_s(wanted.settings, rank)) * dice.gauss(1, self.noise)
                for rank in range(self.ranks)
            ]
            try:
                wanted = steps.send(max(0.1 * max(costs), max(costs)) * drifted * spike)
            except StopIteration as end:
                result: SearchResult = end.value
                return result


def by_size(times: dict[float, float], otherwise: float = 1.0) -> Callable[[CommSettings, int], float]:
    """A cost that the bucket size alone decides."""
    return lambda settings, rank: times.get(settings.bucket_mb, otherwise)
