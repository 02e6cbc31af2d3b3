"""Which rank's copy is damaged, and the error about it."""

from __future__ import annotations

import pytest
import torch

from elaunch.trainer.keeper.verification import RankDigest, differing, sentence
from elaunch.trainer.state.tree import digests


def of(*values: str, holds: str = "") -> list[RankDigest]:
    return [RankDigest(f"node-{rank}", holds, each) for rank, each in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ("aaaa", []),
        ("aaba", [2]),
        ("abca", [0, 1, 2, 3]),
        ("abcaa", [1, 2]),
        ("ab", [0, 1]),
        ("aabb", [0, 1, 2, 3]),
        ("a", []),
    ],
)
def test_the_majority_decides_and_without_one_all_are_named(values: str, wrong: list[int]) -> None:
    assert differing(of(*values)) == wrong


def test_only_ranks_that_hold_the_same_are_compared() -> None:
    # Two shards with two replicas each.
    shards = [
        RankDigest("a", "left", "1"),
        RankDigest("a", "right", "2"),
        RankDigest("b", "left", "1"),
        RankDigest("b", "right", "3"),
    ]

    assert differing(shards) == [1, 3]
    assert differing([RankDigest("a", str(rank), str(rank)) for rank in range(4)]) == []


def test_the_sentence_names_rank_host_tensor_and_the_step_to_which_it_goes_back() -> None:
    found = [{"0.weight": 1, "0.bias": 2}] * 4
    found[2] = {"0.weight": 1, "0.bias": 3}

    assert sentence(of(*"aaba"), found, [2], 400, 300) == (
        "rank 2's copy of `0.bias` on node-2 differs from the other 3 ranks' after step 400: silent data corruption, "
        "or a change that not all ranks made. The training goes back to step 300, after which they were equal. If it "
        "happens again, test that host's memory and GPU; a program whose ranks differ on purpose leaves out "
        "verify_every"
    )
    assert sentence(of(*"ab"), [{"w": 1}, {"w": 2}], [0, 1], 7, 0).startswith(
        "rank 0 on node-0 and rank 1 on node-1 have different copies of `w`, and it is unknown which is right after "
        "step 7: silent data corruption, or a change that not all ranks made. The training starts over."
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4), (4, 4)])
def test_each_changed_bit_changes_the_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    before = digests({"w": tensor})["w"]
    raw = tensor.view(-1).view(torch.uint8)

    for byte in range(raw.numel()):
        raw[byte] ^= 1
        assert digests({"w": tensor})["w"] != before
        raw[byte] ^= 1

    assert digests({"w": tensor.clone()})["w"] == before
