"""Refusals between agents and a real etcd: no state is silent, no job hangs (soak.py has the oracle).

Tests each answer of the table by itself, and all of them at random for an hour. ELAUNCH_TEST_SOAK_S changes that time.
ELAUNCH_TEST_SEED repeats a seed, and ELAUNCH_TEST_SOAK_JOB runs only that job of it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.etcd import VERSIONS, Etcd
from tests.faults import soak

SOAK_S = float(os.environ.get("ELAUNCH_TEST_SOAK_S", "3600"))
# Jobs that run at the same time. They wait most of the time.
AT_ONCE = 3


@pytest.fixture(scope="module")
def etcds() -> Iterator[list[Etcd]]:
    with Etcd(VERSIONS[0]) as old, Etcd(VERSIONS[1]) as new:
        yield [old, new]


@pytest.mark.slow
def test_under_random_refusals_a_job_goes_on_or_ends_or_says_why(tmp_path: Path, etcds: list[Etcd]) -> None:
    seed = int(os.environ.get("ELAUNCH_TEST_SEED", random.randrange(1 << 30)))
    only = os.environ.get("ELAUNCH_TEST_SOAK_JOB")
    jobs = range(int(only), int(only) + 1) if only else range(1 << 30)
    numbers, end_s = iter(jobs), time.monotonic() + SOAK_S

    def play_until_the_end(_: int) -> list[tuple[int, soak.Plan, dict[str, str]]]:
        played = []
        while time.monotonic() < end_s and (number := next(numbers, None)) is not None:
            dice = random.Random(f"{seed}-{number}")
            plan, etcd = soak.drawn(dice), dice.choice(etcds)
            played.append((number, plan, soak.played(tmp_path / f"job{number}", etcd, plan, f"{seed}-{number}")))
        return played

    with ThreadPoolExecutor(AT_ONCE) as pool:
        by_player = list(pool.map(play_until_the_end, range(AT_ONCE)))
    all_played = sorted((each for played in by_player for each in played), key=lambda each: each[0])
    found: dict[str, list[str]] = {}
    for number, plan, silences in all_played:
        for name, history in silences.items():
            found.setdefault(name, []).append(f"job {number}:\n{plan}\n{history}")
    print(f"seed {seed}: {len(all_played)} jobs")
    kinds = "\n".join(f"{len(histories):4} x {name}" for name, histories in found.items())
    first = "\n\n".join(f"=== {name}\n{histories[0]}" for name, histories in found.items())
    assert not found, f"seed {seed}, {len(all_played)} jobs; silent:\n{kinds}\n\n{first}"
