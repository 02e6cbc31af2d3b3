"""What of a state goes into a rank's piece."""

from __future__ import annotations

from typing import Any

import torch

from elaunch.trainer.memory.pieces import Cutter, boxed, contents, held_by
from elaunch.trainer.memory.recovery_plan import Held, digest_of
from elaunch.trainer.state.region import PAGE, Packed, Piece, Version
from elaunch.trainer.state.tree import PerRank, Tree, flatten

PIECE = Piece(Version(0, 1), 2, 0)
WHOLE = digest_of({"own-1", "own-2", "common-1"})


def zero(rank: int) -> dict[str, Any]:
    """A state of ZeRO-1: weights that all ranks have, and this rank's moments of some of them."""
    moments = PerRank({f"w{rank}": {"exp_avg": torch.ones(1000)}})
    return {"model": {"w0": torch.zeros(1000), "w1": torch.zeros(1000)}, "optimizer": {"state": moments}, "step": rank}


def piece(rank: int, *, has_common: bool) -> tuple[Tree, Packed]:
    """What is in that rank's piece, and the piece."""
    state = zero(rank)
    cutter, tree = Cutter(has_common), flatten(state)
    packed = cutter.pack(state, tree, cutter.parts(tree), WHOLE)
    return contents(packed.skeleton, packed.data_length), packed


def test_what_all_ranks_have_is_in_the_piece_of_one_rank_of_each_node() -> None:
    first, first_packed = piece(0, has_common=True)
    second, second_packed = piece(1, has_common=False)

    assert [name for name, tensor in boxed(first).items() if tensor.boxes] == [
        "model.w0",
        "model.w1",
        "optimizer.state.w0.exp_avg",
    ]
    assert [name for name, tensor in boxed(second).items() if tensor.boxes] == ["optimizer.state.w1.exp_avg"]
    assert (first_packed.data_length, second_packed.data_length) == (3 * PAGE, PAGE)
    # Its plain values, and the names and shapes of all tensors, are in each piece.
    assert second.plain["step"] == 1
    assert boxed(second)["model.w0"].size == (1000,)


def test_ranks_with_the_same_boxes_have_the_same_part_and_others_another() -> None:
    def parts(rank: int, *, has_common: bool) -> frozenset[str]:
        return Cutter(has_common).parts(flatten(zero(rank)))

    common = parts(0, has_common=True) & parts(1, has_common=True)

    assert [part.partition("-")[0] for part in common] == ["common"]
    assert parts(0, has_common=False) == parts(0, has_common=True) - common
    assert not parts(0, has_common=False) & parts(1, has_common=False)
    held = held_by(PIECE, piece(0, has_common=True)[1].skeleton)
    assert held == Held(PIECE, parts(0, has_common=True), WHOLE)


def test_a_state_that_differs_in_a_shape_has_other_parts() -> None:
    one, other = zero(0), zero(0)
    other["model"]["w1"] = torch.zeros(10, 100)

    assert Cutter(True).parts(flatten(one)) != Cutter(True).parts(flatten(other))
