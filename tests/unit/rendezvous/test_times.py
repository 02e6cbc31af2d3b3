"""The protocol's times: the defaults hold, what is derived follows, and each inequality has its sentence."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elaunch.rendezvous.times import Times


def test_the_defaults_hold() -> None:
    Times().check()

    assert Times.for_lease() == Times()


@pytest.mark.parametrize("ttl_s", [2, 3, 5, 15, 60, 600])
def test_any_lease_time_that_etcd_knows_gives_times_that_hold(ttl_s: int) -> None:
    Times.for_lease(ttl_s).check()


@pytest.mark.parametrize("grace_s", [0.0, 30.0, 900.0])
def test_a_long_stop_grace_lengthens_the_deadlines_that_wait_for_it(grace_s: float) -> None:
    times = Times.for_lease(stop_grace_s=grace_s)

    times.check()
    assert times.form_deadline_s > grace_s + times.boundary_wait_s
    assert times.join_timeout_s >= times.form_deadline_s + 2 * times.lease_ttl_s


def test_a_join_timeout_that_was_chosen_is_kept() -> None:
    assert Times.for_lease(join_timeout_s=2.0).join_timeout_s == 2.0


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (replace(Times(), lease_ttl_s=1, keepalive_s=0.2, call_deadline_s=0.1, backoff_max_s=0.1), "etcd's shortest"),
        (replace(Times(), lease_ttl_s=3.5), "must be whole seconds"),  # type: ignore[arg-type]
        (replace(Times(), keepalive_s=1.01, call_deadline_s=0.1), "3 * keepalive <= lease_ttl"),
        (replace(Times(), call_deadline_s=0.6), "2/3 * lease_ttl"),
        (replace(Times(), backoff_max_s=2.0), "backoff + 2 * call deadline"),
        (replace(Times(), keepalive_s=0.0), "0 < keepalive"),
        (replace(Times(), spare_wait_s=50.0), "spare_wait < form deadline"),
        (replace(Times(), store_timeout_s=6.0), "it must be above 6 s"),
        (replace(Times(), keys_ttl_s=11.0), "it must be 12 s or more"),
        (replace(Times(), join_backoff_min_s=61.0), "join_backoff_min <= join_backoff_max"),
        (replace(Times(), boundary_wait_s=0.0), "0 < boundary_wait"),
    ],
)
def test_a_violated_inequality_is_one_sentence_with_the_values(times: Times, words: str) -> None:
    assert len(times.violations()) == 1

    with pytest.raises(ValueError, match=re.escape(words)):
        times.check()
