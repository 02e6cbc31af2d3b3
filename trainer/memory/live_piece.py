"""A rank's piece of a state that can be copied again without asking torch for the whole state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from elaunch.trainer.state.packing import extended
from elaunch.trainer.state.region import Packed
from elaunch.trainer.state.tree import State


@dataclass(frozen=True)
class LivePiece:
    """`packed` refers to the tensors that training changes in place, and `addresses` are those of all such tensors.

    Taking a state apart takes longer than copying a small one, since FSDP2 looks up each name anew. So it is done once.
    """

    packed: Packed
    addresses: Sequence[int]

    @classmethod
    def of(cls, packed: Packed, live: Sequence[Tensor]) -> LivePiece | None:
        """The piece; None if some of its tensors are copies of the training's tensors, which are `live`."""
        storages = {_local(tensor).untyped_storage().data_ptr() for tensor in live}
        if any(part.numel() and part.untyped_storage().data_ptr() not in storages for part in packed.tensors):
            return None
        return cls(packed, _addresses(live))

    def now(self, live: Sequence[Tensor], rest: State) -> Packed | None:
        """The piece with the present content and `rest`; None if the training has replaced a tensor."""
        return extended(self.packed, rest) if _addresses(live) == self.addresses else None


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [_local(tensor).data_ptr() for tensor in tensors]


def _local(tensor: Tensor) -> Tensor:
    # DTensor.to_local() takes 10 us, and there are hundreds of tensors.
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
