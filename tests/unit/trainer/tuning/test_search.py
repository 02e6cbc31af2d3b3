"""What the search chooses, in simulated networks: the fastest, never worse than the program's own, in few passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from elaunch.trainer.tuning.search import (
    LOSSY_HOOKS,
    CommSettings,
    SearchResult,
    SearchSpace,
    TimedPass,
    search,
    sizes,
)

# Passes of a search at most, without and with lossy hooks, and how many more a graph that is static makes of them.
PASSES_MAX, LOSSY_PASSES_MAX, STATIC_FACTOR = 60, 90, 1.5


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


def by_size(times: dict[float | None, float], otherwise: float = 1.0) -> Callable[[CommSettings, int], float]:
    """A cost that the bucket size alone decides."""
    return lambda settings, rank: times.get(settings.bucket_mb, otherwise)


SEEDS = range(40)
OWN = CommSettings()
SPACE = SearchSpace(OWN, gradient_mb=60)
LOSSY = SearchSpace(OWN, gradient_mb=60, hooks=LOSSY_HOOKS)


def test_the_fastest_bucket_size_is_found() -> None:
    for seed in SEEDS:
        result = World(by_size({1: 0.9, 5: 0.6, 25: 1.0}), seed=seed).run(SPACE)

        assert result.settings.bucket_mb == 5, seed
        assert result.gain == pytest.approx(1 / 0.6, rel=0.1)


def test_among_equals_the_programs_own_settings_stay() -> None:
    for noise in (0.0, 0.01, 0.02):
        for seed in SEEDS:
            result = World(by_size({}), noise=noise, seed=seed).run(LOSSY)

            assert result.settings == OWN, (noise, seed)
            assert result.gain == 1.0
    # Of more noise than the least gain some survives, which costs nothing.
    loud = [World(by_size({}), noise=0.1, seed=seed).run(LOSSY).settings for seed in SEEDS]
    assert loud.count(OWN) >= 0.9 * len(SEEDS)


def test_the_choice_is_never_slower_than_the_programs_own_by_more_than_the_noise() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        times = {size: dice.uniform(0.8, 2.0) for size in (None, 1.0, 5.0, 25.0, 61.0)}
        noise = dice.choice((0.0, 0.02, 0.1, 0.3))
        world = World(by_size(times), noise=noise, drift=dice.uniform(-0.4, 0.4), spikes=0.05, seed=seed)

        result = world.run(SPACE)

        assert world.true_s(result.settings) <= world.true_s(OWN) * (1 + noise), (seed, noise, times, result)


@pytest.mark.parametrize("drift", [-0.4, 0.4])
def test_a_machine_that_becomes_faster_or_slower_changes_no_choice(drift: float) -> None:
    for seed in SEEDS:
        assert World(by_size({}), drift=drift, seed=seed).run(SPACE).settings == OWN, seed
        found = World(by_size({5: 0.7}), drift=drift, seed=seed).run(SPACE)
        assert found.settings.bucket_mb == 5, seed


def test_single_slow_passes_hide_no_large_gain() -> None:
    found = [World(by_size({5: 0.5}), spikes=0.05, seed=seed).run(SPACE).settings.bucket_mb for seed in SEEDS]

    # A spike may fall on the pass that decides. Then the program's own stay, which is never wrong.
    assert set(found) <= {5, None}
    assert found.count(5) >= 0.8 * len(SEEDS)


def test_the_slowest_rank_decides() -> None:
    def cost_s(settings: CommSettings, rank: int) -> float:
        # Small buckets are good for all ranks but the last one, whose CPU is slow.
        return (2.0 if rank == 3 else 0.5) if settings.bucket_mb == 5 else 1.0

    assert World(cost_s, ranks=4).run(SPACE).settings == OWN


def test_views_are_tried_with_the_best_size_and_are_never_taken_away() -> None:
    def cost_s(settings: CommSettings, rank: int) -> float:
        return (0.7 if settings.bucket_mb == 5 else 1.0) - 0.2 * settings.bucket_view

    assert World(cost_s).run(SPACE).settings == CommSettings(5, bucket_view=True)
    without = World(lambda settings, rank: 2.0 - cost_s(settings, rank))
    without.run(SearchSpace(CommSettings(bucket_view=True), gradient_mb=60))
    assert all(each.settings.bucket_view for each in without.passes)


def test_hooks_are_tried_only_if_they_are_allowed_and_must_gain_a_tenth() -> None:
    def cost_s(gain: float) -> World:
        return World(lambda settings, rank: 1.0 - gain * settings.is_lossy)

    assert cost_s(0.5).run(SPACE).settings == OWN
    assert cost_s(0.5).run(LOSSY).settings.is_lossy
    assert cost_s(0.06).run(LOSSY).settings == OWN


def test_hooks_are_tried_with_the_best_buckets_also_with_those_that_the_program_wants() -> None:
    def cost_s(settings: CommSettings, rank: int) -> float:
        return 0.3 if settings.hook == "powersgd" else 0.9 if settings.bucket_mb == 5 else 1.0

    assert World(cost_s).run(LOSSY).settings == CommSettings(5, hook="powersgd")
    fixed = World(cost_s)
    fixed.run(SearchSpace(OWN, gradient_mb=60, hooks=LOSSY_HOOKS, fixed=frozenset({"bucket_mb"})))
    assert {each.settings.hook for each in fixed.passes} == {"none", *LOSSY_HOOKS}


def test_a_lossy_hook_must_beat_the_best_loss_neutral_settings() -> None:
    def cost_s(settings: CommSettings, rank: int) -> float:
        return (0.6 if settings.bucket_mb == 5 else 1.0) - 0.03 * settings.is_lossy

    assert World(cost_s, noise=0.005).run(LOSSY).settings == CommSettings(5)


@pytest.mark.parametrize("name", ["bucket_mb", "bucket_view", "hook"])
def test_what_the_program_has_chosen_itself_stays(name: str) -> None:
    own = CommSettings(7)
    world = World(lambda settings, rank: 1.0 if settings == own else 0.5)

    world.run(SearchSpace(own, gradient_mb=60, fixed=frozenset({name}), hooks=LOSSY_HOOKS))

    assert {getattr(each.settings, name) for each in world.passes} == {getattr(own, name)}


def test_without_communication_to_hide_it_ends_at_once() -> None:
    world = World(by_size({}), alone_s=0.99, noise=0.001)
    result = world.run(SearchSpace(OWN, gradient_mb=60))

    assert result.settings == OWN
    assert result.passes == len(world.passes) <= 8
    assert "adds 1% to a pass" in result.reason


def test_passes_that_differ_do_not_say_that_there_is_nothing_to_gain() -> None:
    for seed in SEEDS:
        world = World(by_size({5: 0.5}), alone_s=0.4, noise=0.5, seed=seed)

        assert world.run(SearchSpace(OWN, gradient_mb=60)).passes > 8, seed


def test_it_ends_within_the_passes_that_are_promised() -> None:
    for seed in SEEDS:
        dice = random.Random(seed)
        costs: dict[CommSettings, float] = {}
        world = World(lambda settings, rank: costs.setdefault(settings, dice.uniform(0.3, 1.0)), seed=seed)  # noqa: B023
        for hooks, most in (((), PASSES_MAX), (LOSSY_HOOKS, LOSSY_PASSES_MAX)):
            for is_static, factor in ((False, 1.0), (True, STATIC_FACTOR)):
                space = SearchSpace(OWN, gradient_mb=1000, hooks=hooks, is_static=is_static)
                assert world.run(space).passes <= most * factor


def test_settings_that_are_hopeless_are_measured_twice() -> None:
    world = World(by_size({1: 3.0}), noise=0.0)
    world.run(SPACE)

    # After two passes in which DDP settles.
    assert sum(each.settings.bucket_mb == 1 for each in world.passes) == 4


def test_sizes_are_those_that_make_other_buckets() -> None:
    assert [each.bucket_mb for each in sizes(SearchSpace(OWN, gradient_mb=0.5))] == []
    assert [each.bucket_mb for each in sizes(SearchSpace(OWN, gradient_mb=8.5))] == [1, 5, 10]
    assert [each.bucket_mb for each in sizes(SearchSpace(CommSettings(5), gradient_mb=400))] == [1, 25, 100, 401]
