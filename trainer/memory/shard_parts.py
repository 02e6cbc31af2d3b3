"""Cuts a rank's piece out of a state, and reads what a piece says is in it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from elaunch.trainer.checkpoint import dcp
from elaunch.trainer.memory.shard_choice import Held, Parts
from elaunch.trainer.memory.slots import Torn
from elaunch.trainer.state.packing import Boxed, Placer, Reference, Shape, describe, pack, values
from elaunch.trainer.state.region import Packed
from elaunch.trainer.state.tree import State, Tree, flatten, is_shard, local_parts
from elaunch.trainer.state.version import Piece

Boxes = list[tuple[Tensor, Shape]]


class Cutter:
    """Takes this rank's piece of a state: its boxes of distributed tensors, and its PerRanks.

    With `has_common` the piece also has the tensors that are the same on all ranks. One rank of each node has them.
    Call `parts` whenever the state has another signature: between these calls the boxes stay where they are.
    """

    def __init__(self, has_common: bool) -> None:
        self._has_common = has_common
        self._offsets: dict[object, list[Shape]] = {}
        self._plan: _Plan | None = None

    def pack(self, state: State, tree: Tree, parts: Parts, whole: str) -> Packed:
        """The piece of `state`, whose tree is `tree`, with its parts and the digest of all. Raises NotPlain."""
        held = {"parts": sorted(parts), "whole": whole, "state": dict(state)}
        if self._plan is not None:
            return pack(held, _Planned(self._plan))
        own = self._own(tree)
        self._plan = _Plan(lambda tensor: self._boxes(tensor, id(tensor) in own))
        return pack(held, self._plan)

    def parts(self, tree: Tree) -> Parts:
        """The digests of the parts in this rank's piece: of what all ranks have, and of what this rank has."""
        self._plan = None
        own = self._own(tree)
        digests = {True: hashlib.sha256(), False: hashlib.sha256()}
        found = set()
        for name, tensor in tree.tensors.items():
            is_own = id(tensor) in own
            for part, offsets in self._boxes(tensor, is_own):
                row = (name, str(tensor.dtype), tuple(tensor.shape), offsets, tuple(part.shape))
                digests[is_own].update(repr(row).encode())
                found.add(is_own)
        return frozenset(f"{'own' if each else 'common'}-{digests[each].hexdigest()[:16]}" for each in found)

    @staticmethod
    def _own(tree: Tree) -> set[int]:
        """The tensors that are not the same on all ranks, by identity."""
        return {id(t) for name, t in tree.tensors.items() if is_shard(t) or tree.owner(tree.paths[name]) is not None}

    def _boxes(self, tensor: Tensor, is_own: bool) -> Boxes:
        if not is_shard(tensor):
            return [(tensor.detach(), (0,) * tensor.ndim)] if is_own or self._has_common else []
        locals_ = local_parts(tensor)
        offsets = self._offsets_of(tensor)
        return [(part.detach(), at) for part, at in zip(locals_, offsets, strict=True) if part.numel()]

    def _offsets_of(self, tensor: Any) -> list[Shape]:
        """Where the local parts lie in the tensor. DCP's answer takes 0.1 ms, so it is kept for each distribution."""
        if not hasattr(tensor, "placements"):
            return [tuple(shard.metadata.shard_offsets) for shard in tensor.local_shards()]
        key = (tensor.shape, tensor.device_mesh, tensor.placements)
        if key not in self._offsets:
            items = [item.tensor_data for _, item in dcp.local_chunks({"": tensor})]
            self._offsets[key] = [tuple(data.chunk.offsets) for data in items if data is not None]
        return self._offsets[key]


class _Plan(Placer):
    """Places the boxes that `boxes` gives, and remembers the references."""

    def __init__(self, boxes: Callable[[Tensor], Boxes]) -> None:
        super().__init__()
        self.references: list[Reference] = []
        self._boxes = boxes

    def reference(self, tensor: Tensor) -> Reference:
        boxes = tuple((self.once(at), self.once(tuple(part.shape)), self.put(part)) for part, at in self._boxes(tensor))
        found = self.once(str(tensor.dtype).removeprefix("torch.")), self.once(tuple(tensor.shape)), boxes
        self.references.append(found)
        return found


class _Planned(Placer):
    """Places the tensors of a state with the same signature where a plan has placed them: several times as fast."""

    def __init__(self, plan: _Plan) -> None:
        super().__init__()
        self.offsets, self.end = plan.offsets, plan.end
        self._references = iter(plan.references)

    def reference(self, tensor: Tensor) -> Reference:
        found = next(self._references, None)
        if found is None or found[1] != tensor.shape:
            raise RuntimeError("the tensors of the state have changed places, and its names and shapes have not")
        if found[2]:
            self.tensors += [p for p in local_parts(tensor) if p.numel()] if is_shard(tensor) else [tensor]
        return found


@dataclass(frozen=True)
class PieceContents:
    """The state in a piece, with a Boxed for each tensor."""

    tree: Tree

    @property
    def tensors(self) -> dict[str, Boxed]:
        return cast(dict[str, Boxed], self.tree.tensors)

    @classmethod
    def read(cls, skeleton: bytes, data_length: int) -> PieceContents:
        """The contents that a piece's skeleton describes. Raises Torn if it is not one."""
        try:
            held, *rest = describe(skeleton, data_length)
            return cls(flatten({**held["state"], **dict(*rest)}, Boxed))
        except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise Torn(f"its skeleton cannot be read ({str(error)[:200]})") from error


def held_by(piece: Piece, skeleton: bytes) -> Held:
    """The account of itself in a piece with that skeleton. Raises Torn if it is not one."""
    try:
        held = values(skeleton)
        return Held(piece, frozenset(map(str, held["parts"])), str(held["whole"]))
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError) as error:
        raise Torn(f"its skeleton cannot be read ({str(error)[:200]})") from error
