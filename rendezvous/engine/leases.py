"""Leases: ids that end at their time unless they are renewed, and the keys that end with them."""

from __future__ import annotations

import itertools
import math

from elaunch.rendezvous.engine.mvcc import Refused

# etcd's own limit, about 285 years.
TTL_MAX_S = 9_000_000_000


class LeaseNotFound(Refused):
    """The lease has ended, or never was."""

    def __init__(self) -> None:
        super().__init__(5, "etcdserver: requested lease not found")


class LeaseExists(Refused):
    """The id is in use."""

    def __init__(self) -> None:
        super().__init__(9, "etcdserver: lease already exists")


class Lease:
    """One lease. `ends_s` is on the caller's clock; `keys` are deleted when the lease ends."""

    def __init__(self, ttl_s: int, ends_s: float) -> None:
        self.ttl_s = ttl_s
        self.ends_s = ends_s
        self.keys: set[bytes] = set()


class Leases:
    """All leases that have not ended. None ends by itself: the caller asks which are `due`, and ends them."""

    def __init__(self, ttl_min_s: int) -> None:
        self._ttl_min_s = ttl_min_s
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count(1)
        # No lease ends before this time, so `due` returns at once until then.
        self.soonest_s = math.inf

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: int) -> bool:
        return lease in self._leases

    def find(self, lease: int) -> Lease:
        """Raises LeaseNotFound."""
        try:
            return self._leases[lease]
        except KeyError:
            raise LeaseNotFound from None

    def grant(self, lease: int, ttl_s: int, now_s: float) -> tuple[int, int]:
        """Create a lease; 0 lets this method choose the id. Returns id and time, which may be longer than requested."""
        if ttl_s > TTL_MAX_S:
            raise Refused(11, "etcdserver: too large lease TTL")
        if lease in self._leases:
            raise LeaseExists
        lease = lease or next(number for number in self._numbers if number not in self._leases)
        ttl_s = max(ttl_s, self._ttl_min_s)
        self._leases[lease] = Lease(ttl_s, now_s + ttl_s)
        self.soonest_s = min(self.soonest_s, now_s + ttl_s)
        return lease, ttl_s

    def renew(self, lease: int, now_s: float) -> int:
        """Renew a lease. Returns its seconds. Raises LeaseNotFound."""
        found = self.find(lease)
        found.ends_s = now_s + found.ttl_s
        return found.ttl_s

    def end(self, lease: int) -> list[bytes]:
        """End a lease. Returns the keys to delete, in order. Raises LeaseNotFound."""
        keys = self.find(lease).keys
        del self._leases[lease]
        return sorted(keys)

    def move(self, key: bytes, old: int, new: int) -> None:
        """Attach the key to lease `new` instead of `old`; 0 is none."""
        if old in self._leases:
            self._leases[old].keys.discard(key)
        if new:
            self._leases[new].keys.add(key)

    def due(self, now_s: float) -> list[int]:
        """The leases whose time is over, in the order in which it ran out."""
        if now_s < self.soonest_s:
            return []
        due = sorted((lease.ends_s, number) for number, lease in self._leases.items() if lease.ends_s <= now_s)
        later = (lease.ends_s for lease in self._leases.values() if lease.ends_s > now_s)
        self.soonest_s = min(later, default=math.inf)
        return [number for _, number in due]
