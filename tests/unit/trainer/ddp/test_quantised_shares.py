"""A bucket is cut into a share for each rank."""

from __future__ import annotations

import pytest

from elaunch.trainer.ddp.quantised import HEADER_BYTES, message_bytes, shares


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([6], 2, [[3], [3]]),
        ([5, 2], 2, [[4], [1, 2]]),
        # The last ranks have nothing to do for a small bucket.
        ([3], 4, [[1], [1], [1], []]),
        ([4, 0, 4], 2, [[4], [4]]),
        ([7], 1, [[7]]),
        ([], 2, [[], []]),
    ],
)
def test_shares_have_nearly_the_same_size(sizes: list[int], count: int, expected: list[list[int]]) -> None:
    assert shares(sizes, count) == expected


def test_a_share_is_sent_with_a_header_for_each_piece() -> None:
    assert message_bytes([4, 1]) == 2 * HEADER_BYTES + 5
    assert message_bytes([]) == 0
