"""Finds workers that cannot connect to other nodes: their ports may be closed there, and they would wait for minutes.

The kernel says which connections a worker has asked for and gets no answer to. Whether the port of rank 0 is refused,
or has no route, is tried from here. What may be the program's own affair counts only if the rank waits for others.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from elaunch.agent.core.stack_groups import ranks_words
from elaunch.agent.core.waits import Doing, doing
from elaunch.agent.linux import start_thread
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.reporter import Reporter
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.http.client import Deadline
from elaunch.rendezvous.http.dial import dial, is_silence
from elaunch.rendezvous.http.resolve import resolve

# A connection that is unanswered in two looks is worth a line.
LOOK_EVERY_S = 5.0
# A program that loads its data is not to be tried for and looked into every few seconds.
_TRY_EVERY_S_MAX = 60.0
# With a process group on all ranks, NCCL may still connect at the first collective.
_AFTER_GROUP_S = 120.0
_TRY_S = 2.0
_SYN_SENT = "02"
_NO_ANSWER, REFUSED = "no answer", "refused"
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def look_every_s(age_s: float) -> float:
    """The pause between two looks at workers of that age. A program without torch never reports a connection."""
    return min(max(LOOK_EVERY_S, age_s * LOOK_EVERY_S / _AFTER_GROUP_S), _TRY_EVERY_S_MAX)


class Unanswered:
    """Looks at the workers of one generation after another. The agent's loop calls `tick`."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._group: WorkerGroup | None = None
        self._look_at_s = self._try_at_s = 0.0
        self._pause_s = LOOK_EVERY_S
        self._before: frozenset[tuple[int, Endpoint]] = frozenset()
        self._is_reached = self._is_busy = self._is_said = self._was_refused = False

    def tick(self, group: WorkerGroup, now_s: float, *, has_store: bool) -> None:
        """Look, if that is due. `has_store`: a process of its own serves MASTER_PORT, which listens from the start."""
        if group is not self._group:
            self._group, self._before, self._is_said, self._was_refused = group, frozenset(), False, False
            self._is_reached, self._pause_s = group.group_rank == 0 or not has_store, LOOK_EVERY_S
            self._look_at_s = self._try_at_s = group.started_s + LOOK_EVERY_S
        is_past = len(group.recorders) == group.slots and now_s - group.started_s > _AFTER_GROUP_S
        if now_s < self._look_at_s or self._is_said or self._is_busy or is_past or len(group.table.seats) < 2:
            return
        self._look_at_s = now_s + look_every_s(now_s - group.started_s)
        seen = frozenset(connecting(group.pids))
        lasting, self._before = seen & self._before, seen
        # Without a process group somewhere, a worker may be on its way to rank 0.
        is_to_try = not self._is_reached and len(group.recorders) < group.slots
        is_certain = any(remote.port == group.table.master_port for _, remote in lasting)
        is_due = now_s >= self._try_at_s and (lasting or is_to_try)
        if is_due:
            self._try_at_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, _TRY_EVERY_S_MAX)
        if is_certain or is_due:
            # Before the start: the thread may end before this one goes on.
            self._is_busy = True
            if not start_thread(lambda: self._find(group, lasting, is_to_try=is_to_try), "elaunch-reach"):
                self._is_busy = False

    def _find(self, group: WorkerGroup, lasting: frozenset[tuple[int, Endpoint]], *, is_to_try: bool) -> None:
        try:
            master = Endpoint(group.table.master_addr, group.table.master_port)
            to_master = frozenset(rank for rank, remote in lasting if remote.port == master.port)
            why = why_not(master) if is_to_try or to_master else ""
            if group is self._group:
                self._is_reached |= is_to_try and not why
                # The node of rank 0 may start its workers later than this one, or just be losing them.
                is_first, self._was_refused = why == REFUSED and not self._was_refused, why == REFUSED
                why = "" if is_first else why
            if to_master and why:
                self._say(group, to_master, master, why)
                return
            # What gets no answer is in `lasting` as soon as a worker tries it.
            tried = why and why != _NO_ANSWER
            waiting = _that_wait(group) if tried or lasting else {}
            first, last = map(int, _own_ports())
            # The kernel gives ranks their ports; a program's server on another host has one of its own.
            of_ranks = {remote for _, remote in lasting if first <= remote.port <= last}
            remotes = {remote: {rank for rank, other in lasting if other == remote} for remote in of_ranks}
            for remote, ranks in remotes.items():
                if found := frozenset(rank for rank in ranks if waiting.get(rank)):
                    self._say(group, found, remote, _NO_ANSWER)
                    return
            if tried and (found := frozenset(rank for rank, waits in waiting.items() if waits is not False)):
                self._say(group, found, master, why)
                return
        finally:
            self._is_busy = False

    def _say(self, group: WorkerGroup, local_ranks: frozenset[int], remote: Endpoint, why: str) -> None:
        if group is not self._group:
            return
        self._is_said = True
        ranks = [group.rank(local_rank) for local_rank in local_ranks]
        for rank in ranks:
            group.unreached[rank] = f"and cannot connect to {remote} ({why})"
        self._reporter.warn(unreached_words(ranks, remote, why, is_master=remote.port == group.table.master_port))


def unreached_words(ranks: Iterable[int], remote: Endpoint, why: str, *, is_master: bool) -> str:
    """The sentence, with the ports that must be open."""
    first, last = _own_ports()
    whose = "MASTER_PORT on the node of rank 0" if is_master else "a port of another rank"
    return (
        f"{ranks_words([*ranks])} cannot connect to {remote} ({why}), {whose}: a firewall? Ports to open between"
        f" all nodes: MASTER_PORT (--master-port FIRST:LAST limits it), and {first}-{last}, from which the kernel gives"
        " gloo and NCCL theirs; `elaunch doctor` with the options of this job tries them"
    )


def connecting(pids: Mapping[int, int]) -> Iterator[tuple[int, Endpoint]]:
    """The connections that processes wait for, each with the process's key."""
    remotes = dict(unanswered_in("\n".join(map(_read, (f"/proc/net/{name}" for name in ("tcp", "tcp6"))))))
    if not remotes:
        return
    for key, pid in pids.items():
        with suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if remote := remotes.get(os.readlink(fd.path)):  # noqa: PTH115
                        yield key, remote


def unanswered_in(table: str) -> Iterator[tuple[str, Endpoint]]:
    """The sockets of /proc/net/tcp and tcp6 that wait for an answer to their first packet, and to whom they connect."""
    for row in table.splitlines():
        fields = row.split()
        if len(fields) > 9 and fields[3] == _SYN_SENT:
            address, _, port = fields[2].partition(":")
            yield f"socket:[{fields[9]}]", Endpoint(_address(address), int(port, 16))


def _address(digits: str) -> str:
    """Words of 32 bits in the order of this host's bytes."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 4 and packed.startswith(b"\0" * 10 + b"\xff\xff"):
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def why_not(master: Endpoint) -> str:
    """Why no connection to that port is possible now; empty if one is, or if nothing is known."""
    try:
        dial(resolve(master.host, master.port, _TRY_S), Deadline(_TRY_S).left).close()
    except socket.gaierror:
        return ""
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return _NO_ANSWER
    except OSError as error:
        # Not this agent's own trouble, as too many open files: the worker may have none.
        return (error.strerror or str(error)).lower() if is_silence(error) else ""
    return ""


def _that_wait(group: WorkerGroup) -> dict[int, bool | None]:
    """Whether each worker waits for other ranks, by local rank; None where its stack cannot be read."""
    from elaunch.agent.workers import stacks

    found = {stack.rank: stack for stack in stacks.take(dict(group.pids))}
    return {rank: None if doing(each) is Doing.UNKNOWN else doing(each).is_for_ranks for rank, each in found.items()}


def _own_ports() -> tuple[str, str]:
    words = _read(str(_PORTS)).split()
    return (words[0], words[1]) if len(words) == 2 else ("32768", "60999")


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text()
    return ""
