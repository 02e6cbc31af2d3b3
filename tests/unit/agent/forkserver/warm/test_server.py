"""When a fork server that stays gives its memory back."""

from __future__ import annotations

import pytest

from elaunch.agent.forkserver.warm.server import is_short


@pytest.mark.parametrize(("free_kib", "short"), [(900_000, False), (50_001, False), (49_999, True), (0, True)], ids=str)
def test_memory_is_short_below_a_twentieth(free_kib: int, short: bool) -> None:
    text = f"MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: {free_kib} kB\nHugePages_Total: 0\n"

    assert is_short(text) is short


def test_a_kernel_that_does_not_tell_is_not_short_of_it() -> None:
    assert not is_short("")
    assert not is_short("MemTotal:  1000000 kB\n")
