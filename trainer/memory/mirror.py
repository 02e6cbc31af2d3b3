"""What is a rank's alone, on a second node: sent by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.memory.replicated import Records
from elaunch.trainer.memory.shard_choice import mirrors
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.version import Version


class Mirror:
    """Puts this rank's records into the next node's memory, and those of the node before into this one's.

    `nodes` names each rank's node, more than one. Made by all ranks together, which then call `exchange` in the same
    order. `records` gives a rank's in this node's memory; `say` is told once what a record had no room for.
    """

    def __init__(
        self, peers: Peers, nodes: Sequence[str], records: Callable[[int], Records], say: Callable[[str], None]
    ) -> None:
        found = mirrors(nodes)
        self._mirror = found[peers.rank]
        self._sources = {rank: records(rank) for rank, mirror in enumerate(found) if mirror == peers.rank}
        # A group of its own: nobody may come between the messages of another thread.
        self._peers = Peers(dist.new_group(backend="gloo"))
        self._say = say
        self._thread: threading.Thread | None = None
        self._has_arrived = True

    def exchange(self, record: Tensor | None, spare: Collection[Version]) -> None:
        """Begin to send `record`, a region that stays as it is until the next call, and to receive the others'.

        None is sent where there is none. What was received of a version in `spare` is not written over.
        """
        self.wait()
        self._has_arrived = False
        # A daemon: a process that is on its way out does not wait for its peers.
        self._thread = threading.Thread(target=self._run, args=(record, spare), name="mirror", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Until the last exchange is over; whether all that was sent to this rank is in its node's memory."""
        if self._thread is not None:
            self._thread.join()
        return self._has_arrived

    def _run(self, record: Tensor | None, spare: Collection[Version]) -> None:
        try:
            region = torch.empty(0, dtype=torch.uint8) if record is None else record
            sending = [] if self._mirror is None else self._peers.begin_send(region, self._mirror)
            received = [self._receive(rank, records, spare) for rank, records in self._sources.items()]
            for work in sending:
                work.wait()
            self._has_arrived = all(received)
        except RuntimeError:
            # A peer has died, as all will see: it is the group that fails.
            return

    def _receive(self, rank: int, records: Records, spare: Collection[Version]) -> bool:
        length = self._peers.length_from(rank)
        if not length:
            return False
        try:
            slot = records.kept.older(spare)
            slot.discard()
            slot.grow(length)
            region = slot.raw(length)
        except OSError as error:
            self._say(f"rank {rank}'s own state cannot be kept on a second node: {error.strerror}")
            # Its sender waits until somebody has it.
            self._peers.receive(torch.empty(length, dtype=torch.uint8), rank)
            return False
        self._peers.receive(region, rank)
        return slot.accept() is not None
