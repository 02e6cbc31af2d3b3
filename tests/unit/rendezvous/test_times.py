"""The protocol's times: those of any lease keep the inequalities; a user's time that breaks one has its sentence."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elaunch.rendezvous.times import Times
from tests.sim.plans import OTHER_TIMES, TIMES


def test_the_defaults_are_those_of_the_default_lease() -> None:
    assert Times.for_lease() == Times()


@pytest.mark.parametrize("times", [*map(Times.for_lease, [2, 3, 5, 15, 60, 600]), TIMES, *OTHER_TIMES])
def test_any_lease_time_that_etcd_knows_gives_times_that_hold(times: Times) -> None:
    times.check()

    ttl, keepalive, deadline, backoff = times.lease_ttl_s, times.keepalive_s, times.call_deadline_s, times.backoff_max_s
    assert min(keepalive, deadline, backoff, times.boundary_wait_s) > 0
    assert 3 * keepalive <= ttl
    assert 3 * (keepalive + 2 * deadline) < 2 * ttl
    assert backoff + 2 * deadline < ttl
    assert times.spare_wait_s < times.form_deadline_s
    assert 0 < times.join_backoff_min_s <= times.join_backoff_max_s


@pytest.mark.parametrize("grace_s", [0.0, 30.0, 900.0])
def test_a_long_stop_grace_lengthens_the_deadlines_that_wait_for_it(grace_s: float) -> None:
    times = Times.for_lease(stop_grace_s=grace_s)

    assert times.form_deadline_s > grace_s + times.boundary_wait_s
    assert times.join_timeout_s >= times.form_deadline_s + 2 * times.lease_ttl_s


def test_a_join_timeout_that_was_chosen_is_kept() -> None:
    assert Times.for_lease(join_timeout_s=2.0).join_timeout_s == 2.0


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (Times.for_lease(1), "etcd's shortest"),
        (replace(Times(), lease_ttl_s=3.5), "must be whole seconds"),  # type: ignore[arg-type]
        (replace(Times(), store_timeout_s=6.0), "it must be above 6 s"),
        (replace(Times(), keys_ttl_s=11.0), "it must be 12 s or more"),
    ],
)
def test_a_users_time_that_breaks_an_inequality_is_one_sentence_with_the_values(times: Times, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        times.check()
