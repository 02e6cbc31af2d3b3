"""Copies each rank's own state to a second node, in a thread, while training goes on."""

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
    """Sends this rank's records to the next node's memory, and receives those of the node before.

    `nodes` names each rank's node; there is more than one. All ranks create it together, and then call `exchange` in
    the same order. `records` returns a rank's records in this node's memory. `say` gets one sentence if there is no
    room for a record.
    """

    def __init__(
        self, peers: Peers, nodes: Sequence[str], records: Callable[[int], Records], say: Callable[[str], None]
    ) -> None:
        found = mirrors(nodes)
        self._mirror = found[peers.rank]
        self._sources = {rank: records(rank) for rank, mirror in enumerate(found) if mirror == peers.rank}
        # A separate group: messages of other threads must not mix with these.
        self._peers = Peers(dist.new_group(backend="gloo"))
        self._say = say
        self._thread: threading.Thread | None = None
        self._has_arrived = True

    def exchange(self, record: Tensor | None, spare: Collection[Version]) -> None:
        """Begin to send `record` and to receive other ranks' records. The region must not change until the next call.

        Pass None if there is no record. A received record of a version in `spare` is not overwritten.
        """
        self.wait()
        self._has_arrived = False
        # A daemon thread: a process that ends does not wait for its peers.
        self._thread = threading.Thread(target=self._run, args=(record, spare), name="mirror", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Wait for the last exchange. Returns whether every record sent to this rank is in its node's memory."""
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
            # A peer has died. The group fails, and every rank will notice it.
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
            # The sender waits until the record is received.
            self._peers.receive(torch.empty(length, dtype=torch.uint8), rank)
            return False
        self._peers.receive(region, rank)
        return slot.accept() is not None
