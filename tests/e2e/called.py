"""Functions that the workers of tests/e2e/test_functions.py run. They import this module by its name."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def place(*args: Any, **named: Any) -> tuple[int, str, int, tuple[Any, ...]]:
    return int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.getpid(), (*args, *named.items())


def raise_on_rank_1(word: str) -> None:
    if os.environ["RANK"] == "1":
        raise ValueError(f"no {word}")


def die_once() -> str:
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def leave(how: str) -> int:
    if how == "sys":
        sys.exit()
    os._exit(0)
