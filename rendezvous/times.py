"""The protocol's times, and the inequalities that must hold between them.

All times are durations on one host's monotonic clock. docs/protocol.md has the reason for each inequality.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

# etcd's shortest lease. A change of etcd's leader takes a little longer than this.
LEASE_TTL_MIN_S = 2
# A lease may expire this late: etcd checks its leases twice a second.
LEASE_SLACK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Times:
    """All times of the protocol. `Times.for_lease(ttl)` scales those that depend on the lease time.

    lease_ttl_s           a silent node is lost after this long; whole seconds, as etcd counts
    keepalive_s           from one renewal of the lease to the next
    call_deadline_s       for one call to one endpoint of the store, including the connection
    backoff_max_s         between two tries to reach the store
    spare_wait_s          a table with free seats waits this long for nodes that were ready a generation before
    last_call_s           once nodes_min are here, a first generation below nodes_max waits this long for more nodes
    nodes_expected        … or until this many are here, the number that a scheduler started; 0 is unknown
    join_timeout_s        fewer than nodes_min for this long end the job, once all survivors are ready
    store_timeout_s       the head's store is given up after it was unreachable for this long
    join_gather_s         nodes that arrive within this time join together, in one generation
    join_backoff_min_s    between two generations opened for newcomers, at first
    join_backoff_max_s    … and at most, while such generations stay short
    failure_grace_s       from a failure of the group to SIGKILL
    stop_grace_s          from a signal to the job to SIGKILL, and from a failure for workers that are saving
    boundary_wait_s       the longest time that workers have to stop at a step boundary
    hang_timeout_s        workers that reported once hang if they are silent for this long, and so do ranks that are
                          idle, even if none waits for another; 0 if the user gave no limit
    hang_after_s          all ranks must be idle for at least this long to hang; 0 switches this off
    keys_ttl_s            a job's keys stay in the store this long after its end, or after its last agent was killed
    """

    lease_ttl_s: int = 3
    keepalive_s: float = 0.8
    call_deadline_s: float = 0.5
    backoff_max_s: float = 0.5
    spare_wait_s: float = 1.0
    last_call_s: float = 2.0
    nodes_expected: int = 0
    join_timeout_s: float = 600.0
    store_timeout_s: float = 60.0
    join_gather_s: float = 0.1
    join_backoff_min_s: float = 1.0
    join_backoff_max_s: float = 60.0
    failure_grace_s: float = 2.0
    stop_grace_s: float = 30.0
    boundary_wait_s: float = 10.0
    hang_timeout_s: float = 0.0
    hang_after_s: float = 0.0
    keys_ttl_s: float = 7 * 24 * 3600.0

    @classmethod
    def for_lease(cls, lease_ttl_s: int = 3, **given: float | None) -> Times:
        """Times with the values that are given and not None; all others are chosen so that every inequality can hold.

        Renewals and call deadlines keep their share of the lease time. The backoff never grows beyond its default:
        otherwise a store that is reachable again would be noticed late.
        """
        scale = lease_ttl_s / cls.lease_ttl_s
        fixed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        fitted = cls(
            lease_ttl_s=lease_ttl_s,
            keepalive_s=cls.keepalive_s * scale,
            call_deadline_s=cls.call_deadline_s * scale,
            backoff_max_s=cls.backoff_max_s * min(1.0, scale),
            **fixed,
        )
        least = {
            "join_timeout_s": fitted.form_deadline_s + 2 * lease_ttl_s,
            "store_timeout_s": 3.0 * lease_ttl_s,
            "keys_ttl_s": fitted.keys_ttl_min_s,
        }
        chosen = {name: max(getattr(cls, name), least_s) for name, least_s in least.items()}
        return replace(fitted, **(chosen | fixed))

    @property
    def form_deadline_s(self) -> float:
        """A seated node that has neither joined nor left after this long is evicted."""
        longest_stop_s = self.boundary_wait_s + max(self.stop_grace_s, self.failure_grace_s) + 2.0
        return longest_stop_s + self.lease_ttl_s + 2.0

    @property
    def store_wait_s(self) -> float:
        """An agent without workers gives up on a store unusable for this long; on a head's that has exited, sooner.

        A join_timeout may be shorter than a restart of etcd, or than the time between the starts of two nodes.
        """
        return max(self.join_timeout_s, self.store_timeout_s)

    @property
    def keys_ttl_min_s(self) -> float:
        """The shortest keys_ttl with which the successor of a dead leader still renews the run's lease in time."""
        return 4.0 * self.lease_ttl_s

    @property
    def shortest_loss_s(self) -> float:
        """If the store is unreachable for less than this, leases renewed in time do not expire."""
        return self.lease_ttl_s - 2 * (self.keepalive_s + self.call_deadline_s)

    @property
    def return_grace_s(self) -> float:
        """After a leader was cut off from the store, it declares no node lost for this long."""
        return self.lease_ttl_s + LEASE_SLACK_S

    def check(self) -> None:
        """Raises ValueError with a sentence for each violated inequality."""
        ttl = self.lease_ttl_s
        rules = (
            (
                ttl >= LEASE_TTL_MIN_S and ttl == int(ttl),
                f"lease_ttl ({ttl:g} s) must be whole seconds, and {LEASE_TTL_MIN_S} s or more, etcd's shortest",
            ),
            (
                self.store_timeout_s > 2 * ttl,
                f"store_timeout ({self.store_timeout_s:g} s) gives up a store while leases may still be alive; with"
                f" lease_ttl {ttl:g} s it must be above {2 * ttl:g} s",
            ),
            (
                self.keys_ttl_s >= self.keys_ttl_min_s,
                f"keys_ttl ({self.keys_ttl_s:g} s) is so short that a job could lose its keys while it runs; with"
                f" lease_ttl {ttl:g} s it must be {self.keys_ttl_min_s:g} s or more",
            ),
        )
        if broken := [sentence for holds, sentence in rules if not holds]:
            raise ValueError("; ".join(broken))
