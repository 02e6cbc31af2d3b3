"""agent.core.sizes: numbers of bytes as people read them."""

from __future__ import annotations

import pytest

from elaunch.agent.core.sizes import bytes_text


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (10, "10 B"),
        (1536, "1.5 KiB"),
        (20 << 20, "20 MiB"),
        (3 << 29, "1.5 GiB"),
        (500 << 30, "500 GiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_bytes_have_a_unit_and_no_digit_that_says_nothing(count: int, words: str) -> None:
    assert bytes_text(count) == words
