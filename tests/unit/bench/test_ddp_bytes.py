"""The formulas of docs/parallelism.md for bytes on the network."""

from __future__ import annotations

import pytest

from bench.ddp_bytes import formula, rows

# A matrix of 8000 elements, and a bias.
SHAPES, BUCKETS = [[100, 80], [100]], [4 * 8100]


@pytest.mark.parametrize(
    ("hook", "ranks", "expected"),
    [
        ("none", 2, 4 * 8100),
        ("none", 4, 1.5 * 4 * 8100),
        ("fp16", 4, 1.5 * 2 * 8100),
        # Codes and headers: of the two tensors, and of two more pieces where the shares' borders cut them.
        ("quantised", 3, 4 / 3 * (8100 + 32)),
        # Two columns of 100 and two of 80, and the bias.
        ("powersgd", 2, 4 * (360 + 100)),
        # The bucket as a square of 90 × 90.
        ("batched-powersgd", 2, 4 * 2 * 2 * 90),
        ("none", 1, 0),
    ],
)
def test_a_hooks_bytes(hook: str, ranks: int, expected: float) -> None:
    assert formula(hook, ranks, SHAPES, BUCKETS) == pytest.approx(expected)


def test_a_matrix_that_saves_little_is_sent_whole() -> None:
    assert formula("powersgd", 2, [[4, 4]], [64]) == 4 * 16


def test_what_was_counted_stands_beside_the_formula() -> None:
    found = {"hook": "none", "ranks": 2, "sent": 33_000.0, "shapes": SHAPES, "buckets": BUCKETS}

    assert rows([found]) == ["| `none` | 2 | 33,000 | 32,400 | 1.019 |"]
