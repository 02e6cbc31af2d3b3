"""Sync points of several ranks in 400 random histories, and the distance of snapshots.

Each rank has its own `SyncSchedule`, `Pace` and speed. Requests to stop come at any moment at any rank, ranks die, and
a new generation continues. Between two sync points the ranks share nothing, so each may be any number of steps ahead.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean as mean

import pytest

from elaunch.trainer.keeper.boundary import StopReason, SyncPlan
from elaunch.trainer.keeper.sync_schedule import SHARE, WITHIN_S, Pace, SyncSchedule

HISTORIES = 400


class Violation(AssertionError):
    """The first word is the fact that does not hold."""


@dataclass(frozen=True)
class History:
    """What happens: each step's duration, when which rank gets a request to stop, and when one dies (never is 1e9)."""

    ranks: int
    total: int
    durations_s: tuple[float, ...]
    ahead: tuple[float, ...]
    requests: tuple[tuple[float, int], ...]
    death: tuple[float, int]
    checkpoint_every: int
    snapshot_every: int

    @classmethod
    def of(cls, seed: int) -> History:
        rng = random.Random(seed)
        ranks, total = rng.randint(1, 4), rng.randint(1, 120)
        base_s = 10 ** rng.uniform(-3.5, 0.5)
        slow = rng.choice([0.0, 0.0, 0.05, 0.3])
        durations_s = [base_s * (rng.uniform(2, 20) if rng.random() < slow else 1) for _ in range(total)]
        if rng.random() < 0.3:
            # The first steps are fast, or the later ones slow.
            durations_s = [each * (1 if step < total / 3 else 10) for step, each in enumerate(durations_s)]
        lasts_s = sum(durations_s)
        requests = tuple((rng.uniform(0, 2 * lasts_s), rng.randrange(ranks)) for _ in range(rng.randint(0, 2)))
        return cls(
            ranks,
            total,
            tuple(durations_s),
            tuple(rng.choice([1.0, 1.0, 0.5]) for _ in range(ranks)),
            requests,
            (rng.uniform(0, 2 * lasts_s) if ranks > 1 else 1e9, rng.randrange(ranks)),
            rng.choice([5, 7, 30, 1000]),
            rng.choice([1, 6, 11, 40, 1000]),
        )


@dataclass
class Rank:
    """One rank in one generation. `step` is complete, and `at_s` is its own time."""

    number: int
    history: History
    step: int
    at_s: float
    schedule: SyncSchedule = field(init=False)
    pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.schedule = SyncSchedule(self.step, [self.history.checkpoint_every])
        self.schedule.leave(self.step, self.at_s)
        self.pace = Pace(self.history.snapshot_every, self.step)

    def run(self, until_s: float) -> str:
        """Continue to the next sync point or the end. Returns what it has reached, or "dead"."""
        while True:
            if self.at_s >= until_s:
                return "dead"
            if self.step >= self.history.total:
                return "end"
            if self.schedule.reached(self.step, self.at_s):
                return "sync"
            self.make_step()

    def make_step(self) -> None:
        # Without gradients to exchange, some ranks are faster than others.
        self.at_s += self.history.durations_s[self.step] * self.history.ahead[self.number]
        self.step += 1

    def propose(self, where: str) -> list[int]:
        history = self.history
        is_requested = any(at_s <= self.at_s and rank == self.number for at_s, rank in history.requests)
        # One rank knows when snapshots are due, and the others are always ready.
        snapshot = bool(self.number) or self.pace.is_due(self.step)
        due = [] if self.number else [self.pace.due_after(self.step, is_taken=snapshot)]
        steps = self.schedule.wanted(self.step, due) if where == "sync" else 1
        return SyncPlan(steps, snapshot, reason=StopReason.LEAVE if is_requested else StopReason.NONE).numbers(0)

    def take(self, agreed: SyncPlan, now_s: float) -> None:
        if agreed.snapshot and self.step:
            self.pace.snapshot_took(self.step, 0.0)
        self.schedule.agreed(self.step, agreed.steps)
        self.at_s = now_s
        self.schedule.leave(self.step, now_s)
        self.make_step()


@dataclass
class Seen:
    """What happened: where each generation began, its sync points with their times, and its snapshots; the stop."""

    began: list[int] = field(default_factory=list)
    syncs: list[list[tuple[int, float]]] = field(default_factory=list)
    snapshots: list[list[int]] = field(default_factory=list)
    stopped: int | None = None
    stopped_s: float = 0.0


def play(history: History) -> Seen:
    """All generations of a history. Raises Violation where ranks do not meet, or go on without one that is dead."""
    seen = Seen()
    step, now_s, until_s = 0, 0.0, history.death[0]
    while True:
        ranks = [Rank(number, history, step, now_s) for number in range(history.ranks)]
        seen.began.append(step)
        seen.syncs.append([])
        seen.snapshots.append([])
        found = _generation(ranks, until_s, seen)
        if found != "dead":
            return seen
        # All others wait at the same place. The newest step that any of them has goes on.
        step, now_s, until_s = max(rank.step for rank in ranks), max(rank.at_s for rank in ranks), 1e9


def _generation(ranks: list[Rank], until_s: float, seen: Seen) -> str:
    history = ranks[0].history
    while True:
        places = [rank.run(until_s if rank.number == history.death[1] else 1e9) for rank in ranks]
        living = {(place, rank.step) for place, rank in zip(places, ranks, strict=True) if place != "dead"}
        if len(living) > 1:
            raise Violation(f"apart: {living}")
        if "dead" in places:
            return "dead"
        ((place, step),) = living
        numbers = [max(each) for each in zip(*(rank.propose(place) for rank in ranks), strict=True)]
        agreed, now_s = SyncPlan.agreed(numbers), max(rank.at_s for rank in ranks)
        # The end is a sync point too.
        seen.syncs[-1].append((step, now_s))
        if agreed.reason:
            seen.stopped, seen.stopped_s = step, now_s
            return "stopped"
        if place == "end":
            return "end"
        if agreed.snapshot and step:
            seen.snapshots[-1].append(step)
        for rank in ranks:
            rank.take(agreed, now_s)


def check(history: History, seen: Seen) -> None:
    """The facts that must hold in each history."""
    for began, found, snapshots in zip(seen.began, seen.syncs, seen.snapshots, strict=True):
        if found:
            _check_syncs(history, began, [step for step, _ in found], snapshots)
    is_even = set(history.ahead) == {1.0}
    if seen.stopped is not None and is_even:
        first_s = min(at_s for at_s, _ in history.requests)
        _check_time(history, seen, first_s)


def _check_syncs(history: History, began: int, at: list[int], snapshots: list[int]) -> None:
    """Sync points are where they must be, and where they need not be there are few. `at` is not empty."""
    last = at[-1]
    if at[0] != began:
        raise Violation(f"late: the first sync point is {at[0]} and not {began}")
    if missing := [step for step in range(began + 1, last) if step % history.checkpoint_every == 0 and step not in at]:
        raise Violation(f"skipped: a checkpoint after {missing}, sync points {at}")
    due = list(range(began + history.snapshot_every if began else 1, last, history.snapshot_every))
    if due != [step for step in snapshots if step < last]:
        raise Violation(f"skipped: snapshots {snapshots} instead of {due}")
    for before, after in pairwise(at):
        if after - before > before - began + 1:
            raise Violation(f"trust: {after - before} steps without a sync point after {before - began}: {at}")
    steps = last - began
    # One for each doubling, and those that are due.
    most = 2 * (8 + steps // history.checkpoint_every + steps // history.snapshot_every)
    if max(history.durations_s) < 0.001 and len(at) > most:
        raise Violation(f"many: {len(at)} sync points for {steps} steps")


def _check_time(history: History, seen: Seen, first_s: float) -> None:
    """A request is obeyed soon: so much later than WITHIN_S and one step as steps have become slower."""
    found = next(its for its in seen.syncs if its and its[-1][1] >= first_s)
    if found[-1] != (seen.stopped, seen.stopped_s) or first_s < found[0][1]:
        # A death came between, or the request was there from the beginning.
        return
    steps = [step for step, _ in found]
    begun = steps[-2] if len(steps) > 1 else steps[-1]
    now = history.durations_s[begun : steps[-1]] or (0.0,)
    known = [history.durations_s[a:b] for a, b in pairwise(steps[max(0, len(steps) - 4) : -1])]
    slower = max(1.0, mean(now) / max(map(mean, known), default=mean(now)))
    if seen.stopped_s - first_s > slower * WITHIN_S + max(now) + 1e-9:
        raise Violation(f"late: {seen.stopped_s - first_s:.3f} s, steps take {slower:.1f} times as long as before")


def test_all_facts_hold_in_all_histories() -> None:
    seen = []
    for seed in range(HISTORIES):
        history = History.of(seed)
        try:
            seen.append(play(history))
            check(history, seen[-1])
        except Violation as violation:
            pytest.fail(f"{violation} in history {seed}")

    # And what the facts are about has happened.
    assert sum(each.stopped is not None for each in seen) > HISTORIES / 10
    assert sum(len(each.syncs) > 1 for each in seen) > HISTORIES / 10
    far = [max((b - a for (a, _), (b, _) in pairwise(its)), default=0) for each in seen for its in each.syncs]
    assert sum(steps > 8 for steps in far) > HISTORIES / 20


def run(pace: Pace, steps: int, step_s: float, snapshot_s: float) -> list[int]:
    taken = []
    for step in range(1, steps + 1):
        pace.step_took(step_s)
        if pace.is_due(step):
            pace.snapshot_took(step, snapshot_s)
            taken.append(step)
    return taken


@pytest.mark.parametrize(("step_s", "snapshot_s"), [(0.1, 0.001), (0.1, 0.002), (0.05, 0.03), (0.5, 2.0), (1.0, 0.0)])
def test_the_cost_stays_under_the_share(step_s: float, snapshot_s: float) -> None:
    steps = 20_000

    taken = run(Pace(None, 0), steps, step_s, snapshot_s)

    assert len(taken) * snapshot_s <= 1.001 * SHARE * steps * step_s + snapshot_s
    # And no fewer than that allows.
    assert (len(taken) + 2) * max(snapshot_s, SHARE * step_s) >= 0.98 * SHARE * steps * step_s


def test_the_first_step_has_a_copy_whatever_it_costs() -> None:
    assert run(Pace(None, 0), 50, 0.1, 100.0) == [1]
    assert run(Pace(20, 0), 50, 0.1, 100.0) == [1, 21, 41]


def test_copies_that_take_new_memory_are_not_measured() -> None:
    pace = Pace(None, 0, fresh=2, share=0.01)
    pace.step_took(1.0)
    for step in (1, 2):
        assert pace.is_due(step)
        pace.snapshot_took(step, 5.0)
    assert pace.every == 1

    pace.snapshot_took(3, 0.02)

    assert pace.every == 2
