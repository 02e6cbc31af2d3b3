"""Rules of agent.core that only a case at their edge shows: rank 0, one of several, and what is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Blame
from elaunch.agent.core.hang import Standing, who_hangs
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.hang_records import Hang
from elaunch.rendezvous.store import Put
from tests.unit.agent.core.causes.test_table import CUDA_OOM, advice, raised
from tests.unit.agent.core.test_entries import named
from tests.unit.agent.core.test_standstill import IDLE, SPINS, WAITING, busy, said, samples, watching
from tests.unit.agent.driver import KEYS, started


def test_a_hang_of_rank_0_is_blamed_on_it() -> None:
    driver = watching(restarts=True)

    samples(driver, 80, {0: SPINS, 1: IDLE, 2: IDLE}, (busy(0), *WAITING[1:]))

    (blamed,) = (action for action in driver.all_acted if isinstance(action, Blame))
    assert blamed.local_rank == 0


def test_the_timeline_names_rank_0_and_no_rank_where_none_is_named() -> None:
    for rank, fields in ((0, {"rank": 0}), (-1, {})):
        driver = started()
        driver.write(Put(KEYS.hang, encode(Hang(0, driver.node_id, rank, "hung: it sleeps,"))))
        driver.settle()

        (hung,) = named(driver, "seems_hung")
        assert {key: value for key, value in hung.fields.items() if key == "rank"} == fields


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_person_is_told_of_a_restart_only_where_the_job_may_restart(max_restarts: int) -> None:
    driver = watching()
    driver.agent = replace(driver.agent, spec=replace(driver.agent.spec, max_restarts=max_restarts))

    samples(driver, 80, {0: IDLE, 1: SPINS, 2: IDLE}, (WAITING[0], busy(1), WAITING[2]))

    assert ("to restart the workers: elaunch restart " in said(driver)) is bool(max_restarts)
    assert (", or kill -9 4001 on node-a (it counts as a failure)" in said(driver)) is bool(max_restarts)
    assert ("start the job with --on-hang restart" in said(driver)) is bool(max_restarts)


def test_of_several_ranks_that_are_behind_the_phase_is_that_of_the_one_that_is_named() -> None:
    suspect = who_hangs({0: Standing(7, "evaluating"), 1: Standing(7, "loading")}, {}, 30.2)

    assert "in its phase 'evaluating', as did local rank 1" in suspect.message


def test_a_full_gpu_whose_message_has_no_share_of_idle_memory_is_the_programs_own() -> None:
    words, _, rest = CUDA_OOM.format(other="", idle="6.00 GiB").partition(", and ")

    assert rest
    assert "micro-batch" in advice(raised("torch.OutOfMemoryError", f"{words}."))
