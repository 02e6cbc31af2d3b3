"""Where the second copy of each rank's piece goes."""

from __future__ import annotations

import pytest

from elaunch.trainer.memory.mirror import mirrors


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", [None]),
        ("aa", [None, None]),
        ("ab", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("aab", [2, 2, 0]),
        ("abb", [1, 0, 0]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("abab", [1, 0, 3, 2]),
    ],
)
def test_the_second_copy_is_on_the_next_node(nodes: str, expected: list[int | None]) -> None:
    found = mirrors(list(nodes))

    assert found == expected
    assert all(mirror is None or nodes[mirror] != nodes[rank] for rank, mirror in enumerate(found))
