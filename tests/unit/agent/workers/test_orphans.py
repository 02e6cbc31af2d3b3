"""agent.workers.observers: how long the orphans of a successful job may run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.workers import observers
from elaunch.agent.workers.observers import Orphans

GRACE_S = 60.0
Use = Callable[[float], tuple[float, float]]


def ends_at_s(use: Use, monkeypatch: pytest.MonkeyPatch) -> float:
    """When the wait for a process is over that has used so much CPU time and moved so many bytes by then."""
    now_s, lines = 0.0, list[str]()
    monkeypatch.setattr(observers, "_use", lambda _: use(now_s))
    reporter: Any = SimpleNamespace(log=lines.append)
    left = Orphans(lambda: [1], GRACE_S, reporter)
    while left.may_run(now_s):
        now_s = left.due_s or now_s
    assert len(lines) == 1
    return now_s


@pytest.mark.parametrize(
    "use", [lambda s: (3.0, 1e9), lambda s: (0.01 * s, 1000 * s)], ids=["nothing", "a poll now and then"]
)
def test_what_does_next_to_nothing_has_the_grace(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GRACE_S <= ends_at_s(use, monkeypatch) < GRACE_S + 2


@pytest.mark.parametrize("use", [lambda s: (0.1 * s, 0), lambda s: (0, 20_000 * s)], ids=["cpu", "bytes"])
def test_what_works_for_ten_minutes_ends_a_grace_later(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 600 + GRACE_S <= ends_at_s(lambda s: use(min(s, 600.0)), monkeypatch) < 610 + GRACE_S


def test_what_always_works_ends_after_sixty_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 60 * GRACE_S <= ends_at_s(lambda s: (s, 0), monkeypatch) < 60 * GRACE_S + 2
