"""Snapshots of a sharded state in the memory of the nodes. Two nodes hold each part.

    memory = ShardedMemory(folder, say=say, generation=generation)
    found = restore(memory.load, model, optimizer, rest)   # (generation, step), or None if nothing is complete
    memory.save(step, {**rest, **state_of(model, optimizer)})   # every k steps

All ranks call all of these, in the same order. Each rank copies its part of the state to a file in `folder`, which
belongs to the node and outlives the workers; a thread then sends the file to the next node. Two versions are kept,
since a failure may happen before every rank has the newer one. The older is overwritten only when all ranks agree that
the newer is whole on both nodes. So neither a lost node nor any number of lost workers loses a snapshot. At the next
start the ranks assemble what the nodes hold, send each other what a node lacks, and cut it to the new world size.

A node holds twice the part of its own ranks, and twice the part of the node before it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.memory import shard_load
from elaunch.trainer.memory.shard_choice import Choice, Piece, choose, mirrors
from elaunch.trainer.memory.shard_file import Layout, PieceFile, Received, StoredPiece, Torn, lay_out, live
from elaunch.trainer.ranks.agreement import Ranks
from elaunch.trainer.state.tree import State, Tree, flatten, pack

_VERSIONS = 2


class ShardedMemory:
    """The snapshots of one job in `folder`, a directory in shared memory that all ranks of a node use.

    `generation` is the job's. `group` must move host memory; the default is the job's own group or a new gloo group.
    `say` gets sentences for people. `cost_s` is how long the last `save` stopped the training.
    """

    def __init__(
        self,
        folder: str | Path,
        group: dist.ProcessGroup | None = None,
        say: Callable[[str], None] = print,
        *,
        generation: int,
    ) -> None:
        self.folder = Path(folder)
        self.cost_s = 0.0
        self._say, self._generation = say, generation
        self._ranks = Ranks(group)
        told = self._ranks.from_all((_node(self.folder), secrets.token_hex(4)))
        self._nodes, self._nonce = [node for node, _ in told], told[0][1]
        self._mirrors = mirrors(self._nodes)
        self._sources = [rank for rank, mirror in enumerate(self._mirrors) if mirror == self._ranks.rank]
        # The mirroring thread has its own group: messages of other threads must not mix with its messages.
        apart = any(mirror is not None for mirror in self._mirrors)
        self._mirror_group = dist.new_group(backend="gloo") if apart else None
        self._files: dict[int, PieceFile] = {}
        self._received: dict[tuple[int, int], Received] = {}
        self._layout: Layout | None = None
        self._signature = ""
        self._turn = 0
        self._mirroring: threading.Thread | None = None
        self._trouble = ""
        self._off = False
        self._choice: Choice | None = None
        self._has_looked = False
        self._found: dict[Path, Piece] = {}
        self._outdated: list[Path] = []

    def newest(self) -> tuple[int, int] | None:
        """(generation, step) of the newest snapshot that is complete on the living nodes; None if there is none.

        The ranks of a node share the work of reading and checking its pieces. Collective.
        """
        told = self._ranks.from_all(self._whole_pieces())
        on_node: dict[str, dict[Path, Piece]] = {node: {} for node in self._nodes}
        for node, pieces in zip(self._nodes, told, strict=True):
            on_node[node] |= pieces
        self._found = on_node[self._nodes[self._ranks.rank]]
        self._choice = choose([list(on_node[node].values()) for node in self._nodes])
        self._has_looked = True
        return self._chosen

    def load(self, state: State) -> tuple[int, int] | None:
        """Load the newest complete snapshot into `state`, as `Checkpoints.load_newest` does: (generation, step).

        Pieces that came from other nodes lack one copy until the next `save`, so call `save` right after the restart.
        All other snapshots in the folder are deleted.
        """
        # `newest` has checked all pieces already.
        found = self._chosen if self._has_looked else self.newest()
        self._has_looked = False
        if self._choice is not None:
            mine = {p.rank: StoredPiece(path, checked=True) for path, p in self._found.items() if self._is_chosen(p)}
            shard_load.load(self._choice, mine, state, self._ranks)
        self._forget_others()
        return found

    def save(self, step: int, state: State) -> None:
        """Copy this rank's part of the state after `step`. The state may change after this returns.

        First waits until every rank's part of the last snapshot is whole on both nodes. If the memory is too small, it
        says so and makes no more snapshots. Raises TypeError for a value that a state cannot hold.
        """
        begun_s = time.monotonic()
        if self._off:
            return
        parts = flatten(state)
        layout, tensors = self._laid_out(parts)
        plain = pack(parts) if self._ranks.leads else b""
        self._settle()
        self._has_looked = False
        file = self._files.get(self._turn)
        if layout != self._layout:
            self._layout = layout
            self._files.clear()
            file = None
        if self._any(file is None or not file.has_room(plain)):
            file = self._allocated(layout, len(plain))
        if file is None:
            return
        file.erase()
        file.copy(tensors)
        piece = Piece(self._generation, step, self._ranks.world_size, self._ranks.rank)
        turn, self._turn = self._turn, (self._turn + 1) % _VERSIONS
        # A daemon thread: a process that ends does not wait for its peers.
        self._mirroring = threading.Thread(
            target=self._complete, args=(file, piece, plain, turn), name="snapshot", daemon=True
        )
        self._mirroring.start()
        self.cost_s = time.monotonic() - begun_s

    def _laid_out(self, parts: Tree) -> tuple[Layout, list[Tensor]]:
        """The last layout if it still fits the state, else a new one: DCP's planning takes 0.1 ms per tensor."""
        signature = parts.signature()
        if self._layout is not None and signature == self._signature:
            return self._layout, live(parts)
        self._signature = signature
        return lay_out(parts)

    def wait(self) -> bool:
        """Wait until the last snapshot is whole on every node. False if that failed; the snapshot before it stays."""
        return self._settle()

    def _settle(self) -> bool:
        """Agree whether the last snapshot is whole everywhere. If it is, older ones may be overwritten or deleted.

        If not, the next snapshot overwrites the failed one, and the snapshot before it stays.
        """
        if self._mirroring is None:
            return True
        self._mirroring.join()
        self._mirroring = None
        troubled = self._any(bool(self._trouble))
        if self._trouble:
            self._say(f"rank {self._ranks.rank}: the snapshot is on its own node only: {self._trouble}")
            self._trouble = ""
        if troubled:
            self._turn = (self._turn - 1) % _VERSIONS
        else:
            for path in self._outdated:
                path.unlink(missing_ok=True)
            self._outdated = []
        return not troubled

    def _any(self, fact: bool) -> bool:
        """Whether `fact` is True on any rank. Collective."""
        if self._ranks.group is None:
            return fact
        flag = torch.tensor([fact], dtype=torch.uint8)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._ranks.group)
        return bool(flag.item())

    def _allocated(self, layout: Layout, plain_length: int) -> PieceFile | None:
        """Allocate a version: this rank's part, and the mirrors that it keeps. None, for good, if a rank has no room.

        This is checked here and not when a mirror arrives: its sender would wait forever.
        """
        problem = self._try(lambda: self._allocate_own(layout, plain_length))
        file = self._files.get(self._turn)
        lengths = self._ranks.from_all(file.length if file else 0)
        if all(lengths):
            problem = self._try(lambda: self._allocate_mirrors(lengths))
        if not self._any(bool(problem)):
            return file
        self._off = True
        paths = [file.path for file in self._files.values()] + [held.path for held in self._received.values()]
        for path in paths:
            path.unlink(missing_ok=True)
        self._files.clear()
        self._received.clear()
        if problem:
            self._say(
                f"rank {self._ranks.rank}: no room for a snapshot of {layout.length / 1e6:,.1f} MB in {self.folder} "
                f"({problem}); there are no snapshots of the sharded state, only its checkpoints"
            )
        return None

    def _try(self, allocate: Callable[[], None]) -> str:
        """Why `allocate` fails; empty if it succeeds."""
        try:
            allocate()
        except OSError as error:
            space = os.statvfs(self.folder)
            return f"{error.strerror}; {space.f_bavail * space.f_frsize / 1e6:,.1f} MB are free there"
        return ""

    def _allocate_own(self, layout: Layout, plain_length: int) -> None:
        # Release the old one first, so that its memory is free.
        self._files.pop(self._turn, None)
        self._files[self._turn] = PieceFile(self._path(self._turn, self._ranks.rank), layout, plain_length)

    def _allocate_mirrors(self, lengths: list[int]) -> None:
        for source in self._sources:
            held = self._received.pop((self._turn, source), None)
            if held is None or held.length != lengths[source]:
                del held
                held = Received(self._path(self._turn, source), lengths[source])
            self._received[self._turn, source] = held

    def _complete(self, file: PieceFile, piece: Piece, plain: bytes, turn: int) -> None:
        """The thread: complete the piece, and send it to the next node while other pieces are received."""
        try:
            file.complete(piece, plain)
            file.mark()
            if self._mirror_group is not None:
                self._exchange(file, piece, turn)
        # The outermost frame of the thread. Usually a peer has died.
        except Exception as error:
            self._trouble = str(error).splitlines()[0] if str(error) else type(error).__name__

    def _exchange(self, file: PieceFile, piece: Piece, turn: int) -> None:
        """Send the piece, and receive pieces of other ranks. Raises Torn at the end if one of them arrived changed."""
        mirror = self._mirrors[self._ranks.rank]
        sending = None if mirror is None else dist.isend(file.body(), mirror, self._mirror_group)
        torn = None
        for source in self._sources:
            held = self._received[turn, source]
            held.erase()
            dist.recv(held.body(), source, self._mirror_group)
            try:
                held.accept(replace(piece, rank=source))
            except Torn as error:
                torn = Torn(f"the part that rank {source} sent arrived damaged: {error}")
        if sending is not None:
            sending.wait()
        if torn:
            raise torn

    def _path(self, turn: int, rank: int) -> Path:
        return self.folder / f"piece-{self._generation}-{self._nonce}-{turn}-{rank}"

    def _whole_pieces(self) -> dict[Path, Piece]:
        """The whole pieces in this rank's share of the node's files."""
        mates = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[self._ranks.rank]]
        paths = sorted(self.folder.glob("piece-*"))
        whole = {}
        for path in paths[mates.index(self._ranks.rank) :: len(mates)]:
            with contextlib.suppress(Torn, OSError):
                whole[path] = StoredPiece(path).piece
        return whole

    @property
    def _chosen(self) -> tuple[int, int] | None:
        return (self._choice.generation, self._choice.step) if self._choice else None

    def _is_chosen(self, piece: Piece) -> bool:
        return (piece.generation, piece.step) == self._chosen

    def _forget_others(self) -> None:
        """Delete all pieces on this node but those of the chosen snapshot; they go once there is a newer one."""
        # Wait for all ranks: none may look for files while they are being deleted.
        self._ranks.from_all(None)
        if self._nodes.index(self._nodes[self._ranks.rank]) != self._ranks.rank:
            return
        for path in self.folder.glob("piece-*"):
            piece = self._found.get(path)
            if piece is not None and self._is_chosen(piece):
                self._outdated.append(path)
            else:
                path.unlink(missing_ok=True)


def _node(folder: Path) -> str:
    """A name shared by the ranks of one node only. The first of them creates it."""
    path = folder / "node"
    own = folder / f".node.{os.getpid()}.{secrets.token_hex(4)}"
    own.write_text(secrets.token_hex(8))
    with contextlib.suppress(FileExistsError):
        os.link(own, path)
    own.unlink()
    return path.read_text()
