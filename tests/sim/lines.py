"""One agent's line to a real store in memory. The line may be slow or cut, and may lose or repeat requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from elaunch.rendezvous.store import (
    HistoryLost,
    LeaseGone,
    Put,
    Rejected,
    StoreError,
    Txn,
    TxnResponse,
    Unavailable,
    Update,
    View,
)

if TYPE_CHECKING:
    from tests.sim.agents import AgentProcess
    from tests.sim.cluster import World

T = TypeVar("T")
LATE_MAX_S = 4.0
# A store that is back for less than this may go unnoticed: an agent without an answer for a while tries only so often.
NOTICED_S = 3.0


class Gone(Exception):
    """The process that made the call is dead, so the call does not return."""


class Line:
    """A `Store` as one agent's process reaches it."""

    def __init__(self, world: World, process: AgentProcess) -> None:
        self._world = world
        self._process = process
        self._watches: list[WatchLine] = []
        # The additional time that the calls of the last request took.
        self.waited_s = 0.0
        self.down_since_s: float | None = None
        self.up_since_s: float | None = None

    @property
    def is_up(self) -> bool:
        return not (self._world.is_store_away or self._process.host.is_cut or self._process.host.is_storeless)

    def check(self) -> None:
        self._call(lambda: None)

    def read(self, prefix: str) -> View:
        return self._call(lambda: self._world.store.read(prefix))

    def commit(self, txn: Txn) -> TxnResponse:
        def again() -> None:
            with suppress(LeaseGone):
                self._world.commit(self._process, txn)

        if self._world.is_store_full and any(isinstance(op, Put) for op in (*txn.then, *txn.otherwise)):
            self._call(self._refuse)
        return self._call(lambda: self._world.commit(self._process, txn), again)

    def grant(self, lease: int, ttl_s: float) -> None:
        def granted() -> None:
            self._world.store.grant(lease, ttl_s)
            self._world.checks.granted(self._process, lease, ttl_s)

        self._call(self._refuse if self._world.is_store_full else granted)

    def keep_alive(self, lease: int) -> float:
        return self._call(lambda: self._world.store.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        self._call(lambda: self._world.revoke(self._process, lease), lambda: self._world.revoke(self._process, lease))

    def watch(self, prefix: str, after: int | None, notify: Callable[[Update], None]) -> WatchLine:
        watch = WatchLine(self._world, self._process, prefix, notify)
        self._watches = [kept for kept in self._watches if not kept.is_closed]
        self._watches.append(watch)
        watch.begin(after)
        return watch

    def close(self) -> None:
        for watch in self._watches:
            watch.close()

    def resume(self) -> None:
        """The line may be up again. Then watches go on where they were."""
        self.note()
        for watch in self._watches:
            watch.resume()

    def deafen(self) -> None:
        """The present watches report nothing any more."""
        for watch in self._watches:
            watch.is_deaf = True

    def note(self) -> None:
        """Keep count of how long the agent could not use the line."""
        now_s = self._world.now_s
        is_served = self.is_up and not (self._world.is_store_full or self._process.host.is_refused)
        if is_served and not (self._process.is_stopped or self._process.is_wedged):
            self.up_since_s = now_s if self.up_since_s is None else self.up_since_s
            return
        is_long = self.up_since_s is not None and now_s - self.up_since_s > NOTICED_S
        if self.down_since_s is None or is_long:
            self.down_since_s = now_s
        self.up_since_s = None

    def down_s(self) -> float:
        """How long the line has been down. Moments in which it was up, and which an agent may miss, do not count."""
        self.note()
        return self._world.now_s - self.down_since_s if self.down_since_s is not None else 0.0

    def _call(self, do: Callable[[], T], again: Callable[[], None] | None = None) -> T:
        world, plan, rng = self._world, self._world.plan, self._world.rng
        world.checks.called(self._process)
        self._travel()
        if not self.is_up:
            raise Unavailable("the line is cut")
        if self._process.host.is_refused:
            raise Rejected("a proxy is in the way")
        if world.is_history_lost:
            raise HistoryLost("the store lost its history")
        is_rough = world.is_rough
        if is_rough and plan.twice and again and rng.random() < plan.twice:
            # Either the caller stops waiting for this request, which arrives later. Or the request arrives, and is
            # repeated on the way.
            world.later(rng.uniform(0, LATE_MAX_S), again)
            if rng.random() < 0.5:
                self._time_out()
        result = do()
        if not self._process.is_alive:
            raise Gone
        if is_rough and plan.lost and rng.random() < plan.lost:
            self._time_out()
        return result

    def _refuse(self) -> None:
        raise Rejected("the store is full")

    def _time_out(self) -> None:
        self.waited_s += self._world.plan.times.call_deadline_s
        raise Unavailable("no answer came in time")

    def _travel(self) -> None:
        """Let time pass during a call, in which others act. Only one call in the world does so at a time."""
        world = self._world
        if not world.is_pumping and world.rng.random() < world.plan.interleave:
            world.pump_for(world.rng.uniform(0, 2 * world.plan.call_s))
            while self._process.is_stopped and self._process.is_alive:
                world.pump_for(0.1)
        if not self._process.is_alive:
            raise Gone


class WatchLine:
    """A watch that reports changes late, and sometimes twice. A deaf watch reports nothing."""

    def __init__(self, world: World, process: AgentProcess, prefix: str, notify: Callable[[Update], None]) -> None:
        self._world = world
        self._process = process
        self._prefix = prefix
        self._notify = notify
        self._pending: deque[Update] = deque()
        self._arrives_s = 0.0
        self.is_deaf = False
        self.is_closed = False

    def begin(self, after: int | None) -> None:
        self._watch = self._world.store.watch(self._prefix, after, self._changed)

    def begun(self) -> None:
        """Once the watch has begun, read the present keys by a call like any other."""
        try:
            view = self._process.line.read(self._prefix)
        except StoreError:
            self.close()
            raise
        self._notify(view)

    def close(self) -> None:
        self.is_closed = True
        self._watch.close()

    def resume(self) -> None:
        """Reconnect. Missed changes come one by one, or as one view if the store has compacted them."""
        if not self._pending or self.is_closed or not self._process.line.is_up:
            return
        if self._world.rng.random() < 0.2:
            self._pending = deque([self._world.store.read(self._prefix)])
        for _ in range(len(self._pending)):
            self._order()

    def _changed(self, update: Update) -> None:
        if not self.is_closed and not self.is_deaf:
            self._pending.append(update)
            self._order()

    def _order(self) -> None:
        world = self._world
        late_s = self._process.host.plan.behind_s + world.rng.uniform(0, world.watch_s)
        # Updates arrive in order, although each has its own delay.
        self._arrives_s = max(self._arrives_s, world.now_s + late_s)
        world.later(self._arrives_s - world.now_s, self._deliver)

    def _deliver(self) -> None:
        if self.is_closed or self.is_deaf or not self._pending or self._process.holds(self._deliver):
            return
        if not self._process.line.is_up:
            return
        update = self._pending.popleft()
        self._notify(update)
        if self._world.is_rough and self._world.rng.random() < 0.05:
            self._notify(update)
