"""bench.scale: a few agents without workers, on a real etcd, to see that they are measured rightly."""

from __future__ import annotations

import pytest

from bench import scale
from tests.harness import slow


@pytest.mark.parametrize("version", [slow("3.4"), "3.5"])
def test_what_agents_ask_is_what_etcd_has_seen(version: str) -> None:
    first, idle, restart = scale.rendezvous(version, 5, limit_s=60, idle_s=0.5)

    assert [sample.section for sample in (first, idle, restart)] == [scale.FIRST, scale.IDLE, scale.RESTART]
    for sample in (first, restart):
        assert not sample.why
        assert 0 < sample.values[scale.SEALED] <= sample.values[scale.RANKS]
        # A renewal of a lease may come between the two counts.
        assert sample.values[scale.REQUESTS] == pytest.approx(sample.values[scale.SEEN], abs=0.5)
        assert sample.values[scale.SEEN] > 1
