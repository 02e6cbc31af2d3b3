"""State as one region of bytes: what went in comes out; what is torn, corrupt or foreign is not taken for it."""

from __future__ import annotations

import math
import pickle
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elaunch.trainer.state.packing import NotPlain, Placer, pack, unpack
from elaunch.trainer.state.region import (
    MARK,
    PAGE,
    Packed,
    Piece,
    Version,
    checksum,
    finish,
    header_of,
    is_intact,
    tear,
    views,
)
from tests.unit.trainer.checkpoint.test_checkpoints import Bomb

LAYOUT = b"sixteen bytes ok"
PIECE = Piece(Version(2, 7), world_size=4, rank=3)


def region_with(state: object) -> Tensor:
    packed = pack(state)
    region = torch.zeros(packed.length, dtype=torch.uint8)
    if packed.tensors:
        torch._foreach_copy_(views(region, packed), packed.tensors)
    finish(region, LAYOUT, PIECE, packed)
    return region


def test_what_went_in_comes_out_with_its_types() -> None:
    weights = torch.randn(3, 5)
    state = {
        "model": OrderedDict(
            a=weights, t=weights.t(), half=torch.ones(3, dtype=torch.bfloat16), none=torch.empty(0, 4)
        ),
        "plain": [1, 2.5, math.inf, "x", None, True, (1, b"bytes"), {3: "integer key"}, {1, 2}, 1j],
        "milestones": Counter({30: 1}),
        "scalar": torch.tensor(5),
        "shape": torch.Size([2, 3]),
    }

    region = region_with(state)
    header = header_of(region)
    assert header is not None
    back = unpack(region, header)

    assert header.piece == PIECE
    assert is_intact(region, header)
    assert back["plain"] == state["plain"]
    assert type(back["model"]) is OrderedDict
    assert type(back["milestones"]) is Counter
    assert back["milestones"] == state["milestones"]
    assert back["shape"] == torch.Size([2, 3])
    for name, tensor in state["model"].items():  # type: ignore[union-attr]
        assert torch.equal(back["model"][name], tensor)
        assert back["model"][name].dtype == tensor.dtype
    assert back["scalar"].item() == 5


def test_tied_weights_are_kept_once() -> None:
    weights = torch.randn(1000, 1000)

    assert pack({"a": weights, "b": weights.detach()}).length == pack({"a": weights}).length
    # Same storage, another view of it: not the same.
    assert pack({"a": weights, "b": weights.t()}).length > 1.9 * pack({"a": weights}).length


@pytest.mark.parametrize(
    "value", [object(), print, Path("x"), torch.nn.Linear(1, 1), torch.ones(2).to_sparse(), lambda: None]
)
def test_what_cannot_be_kept_is_refused_by_name(value: object) -> None:
    with pytest.raises(NotPlain, match="cannot be kept"):
        pack({"a": value})


@pytest.mark.parametrize("strides", [(1, 2), (3, 1), (2, -1), (2,), (1, 1), (2, 1, 1), "ab"])
def test_strides_come_back_and_those_that_do_not_fit_are_not_read(strides: object) -> None:
    class Claims(Placer):
        def reference(self, tensor: Tensor) -> tuple[object, ...]:
            return (*super().reference(tensor)[:3], strides)

    packed = pack({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, Claims())
    region = torch.zeros(packed.length, dtype=torch.uint8)
    torch._foreach_copy_(views(region, packed), packed.tensors)
    header = finish(region, LAYOUT, PIECE, packed)

    if strides == (1, 2):
        assert unpack(region, header)["a"].tolist() == [[1, 3], [2, 4]]
    else:
        with pytest.raises((ValueError, pickle.UnpicklingError)):
            unpack(region, header)


def test_a_region_without_its_mark_is_nothing() -> None:
    region = region_with({"a": torch.ones(3)})

    tear(region)

    assert header_of(region) is None
    assert header_of(region, marked=False) is not None


@pytest.mark.parametrize("where", ["skeleton", "tensor"])
def test_one_flipped_bit_is_seen(where: str) -> None:
    region = region_with({"a": torch.ones(5000)})
    header = header_of(region)
    assert header is not None

    region[PAGE + (5 if where == "skeleton" else header.skeleton_room + 9000)] ^= 4

    assert header_of(region) == header
    assert not is_intact(region, header)


def test_a_damaged_header_is_nothing() -> None:
    for offset in range(len(MARK), 88):
        region = region_with({"a": torch.ones(3)})
        region[offset] ^= 1
        assert header_of(region) is None, offset


def test_the_checksum_sees_stale_missing_and_exchanged_pages() -> None:
    data = torch.randint(0, 256, (8 * 4096,), dtype=torch.uint8)
    original = checksum(data)
    page = data[:4096].clone()

    stale = data.clone()
    stale[4096:8192] = 0
    exchanged = data.clone()
    exchanged[:4096], exchanged[4096:8192] = data[4096:8192], page
    assert checksum(data.clone()) == original
    assert checksum(stale) != original
    assert checksum(exchanged) != original
    assert checksum(data[:-4096]) != original


def test_reading_a_skeleton_runs_no_code(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "ran")
    for evil in (pickle.dumps(bomb), pickle.dumps(bomb, protocol=0)):
        packed = Packed(evil, [], [], 0)
        region = torch.zeros(packed.length, dtype=torch.uint8)
        header = finish(region, LAYOUT, PIECE, packed)
        with pytest.raises(pickle.UnpicklingError, match="is not a plain value"):
            unpack(region, header)
    assert not (tmp_path / "ran").exists()
