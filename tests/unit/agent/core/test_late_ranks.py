"""agent.core.late_ranks: which rank enters the collectives last, and which does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from elaunch.agent.core.collectives import DEFAULT_GROUP, Collective, Count
from elaunch.agent.core.late_ranks import LOOKS, WINDOWS, Behind, late_rank

STEP_S = 0.1


def entries(at_s: Callable[[int, int], float], *, ranks: int = 3, count: int = 200) -> dict[int, list[Collective]]:
    """Each rank's entries, where rank enters collective number at `at_s(rank, number)`."""
    return {
        rank: [
            Collective(DEFAULT_GROUP, n, "all_reduce", at_s(rank, n), has_begun=False, is_outstanding=False)
            for n in range(1, count + 1)
        ]
        for rank in range(ranks)
    }


def looks(
    numbers: Callable[[int], Mapping[int, int]], count: int, state: Behind | None = None
) -> tuple[Behind, list[int]]:
    """What is suspected in `count` looks, where `numbers` says how many collectives each rank has entered."""
    state, found = state or Behind(), []
    for look in range(count):
        counts = {rank: {(0, 0): Count(number, -1, number - 1)} for rank, number in numbers(look).items()}
        state, rank = state.after(counts)
        found += [] if rank is None else [rank]
    return state, found


def behind(look: int) -> dict[int, int]:
    """Rank 1 is behind at every second look."""
    return {0: 10 * look + 1, 1: 10 * look + look % 2, 2: 10 * look + 1}


def test_a_rank_that_is_alone_behind_for_two_minutes_is_a_suspect_and_then_not_soon_again() -> None:
    state, early = looks(behind, LOOKS * WINDOWS - 1)

    state, found = looks(behind, 1, state)
    state, soon = looks(behind, 4 * LOOKS, state)
    _, later = looks(behind, 3 * LOOKS, state)

    assert (early, found, soon, later) == ([], [1], [], [1])


@pytest.mark.parametrize(
    "numbers",
    [
        lambda look: {0: look, 1: look, 2: look},
        lambda look: {0: look + 1, 1: look, 2: look},
        lambda look: {0: look + (look % 3 == 0), 1: look + (look % 3 == 1), 2: look + (look % 3 == 2)},
        lambda look: {rank: 10 * look + (look % 3 != rank) for rank in range(3)},
        lambda _: {0: 8, 1: 7, 2: 8},
        lambda look: {0: look},
        lambda _: {},
    ],
    ids=["alike", "two behind", "one ahead", "in turn", "nothing moves", "alone", "nobody"],
)
def test_nobody_is_suspected_where_no_rank_alone_is_behind(numbers: Callable[[int], Mapping[int, int]]) -> None:
    assert looks(numbers, 6 * LOOKS)[1] == []


def test_a_rank_that_has_come_begins_it_afresh() -> None:
    state, _ = looks(behind, LOOKS * WINDOWS - 1)

    _, found = looks(lambda look: {**behind(look), 3: 10 * look + 1}, LOOKS, state)

    assert found == []


def test_the_rank_that_enters_last_is_found_with_the_share_for_which_the_others_wait() -> None:
    late = late_rank(entries(lambda rank, n: n * STEP_S + (0.03 if rank == 1 else 0.001 * rank)))

    assert late
    assert (late.rank, late.collectives) == (1, 200)
    assert late.share == pytest.approx(0.28, abs=0.01)
    assert late.late_s == pytest.approx(0.028, abs=0.001)


def test_of_ten_collectives_in_a_row_only_the_first_has_to_wait() -> None:
    noise = random.Random(7)

    def at_s(rank: int, n: int) -> float:
        step, bucket = divmod(n, 10)
        return (
            step * 10 * STEP_S
            + 0.001 * bucket
            + noise.uniform(0, 0.0005)
            + (0.3 if rank == 2 and bucket == 0 else 0.3 if bucket else 0)
        )

    late = late_rank(entries(at_s))

    assert late
    assert late.rank == 2
    assert late.late_s == pytest.approx(0.3, abs=0.01)


def test_one_long_evaluation_is_no_slow_rank() -> None:
    assert (
        late_rank(entries(lambda rank, n: n * STEP_S + (30.0 if n > 100 else 0.0) - (29.0 if n == 101 and rank else 0)))
        is None
    )


@pytest.mark.parametrize("case", ["alike", "noise", "in turn", "too few", "alone", "no common ones", "nothing"])
def test_nobody_is_late_where_no_rank_is_last_all_the_time(case: str) -> None:
    noise = random.Random(1)
    found = {
        "alike": lambda: entries(lambda _, n: n * STEP_S),
        "noise": lambda: entries(lambda _, n: n * STEP_S + noise.uniform(0, 0.09)),
        "in turn": lambda: entries(lambda rank, n: n * STEP_S + 0.05 * (n % 3 == rank)),
        "too few": lambda: entries(lambda rank, n: n * STEP_S + 0.05 * (rank == 1), count=19),
        "alone": lambda: entries(lambda _, n: n * STEP_S, ranks=1),
        "no common ones": lambda: {0: entries(lambda _, n: n * STEP_S)[0], 1: []},
        "nothing": dict,
    }[case]()

    assert late_rank(found) is None
